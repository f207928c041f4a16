"""Origin: where a captured step comes from, as plain data for its bundle."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """Where a step comes from.

    Args:
        target: The target, as the user wrote it; '' where there is none.
        file: Its source file; '' where there is none.
        sha256: Checksum of that file.
        seed: Seed that it was built with.
        step: Number of the step, from 0.
        batch: Place of its first batch in the target's batches; None where it is not known.
        islands: Modules that computed in FP32 in the step.
    """

    target: str = ""
    file: str = ""
    sha256: str = ""
    seed: int = 0
    step: int = 0
    batch: int | None = None
    islands: tuple[str, ...] = ()
