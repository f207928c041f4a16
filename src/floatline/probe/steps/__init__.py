"""One training step captured as it was, and run again in any precision."""
