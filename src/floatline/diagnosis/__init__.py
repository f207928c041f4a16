"""Why a training step went wrong: detectors from evidence to findings, and the diagnosis they give."""
