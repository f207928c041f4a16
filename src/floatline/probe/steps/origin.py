"""Where a captured step comes from, as a bundle tells it."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from floatline.findings import Finding


@dataclass(frozen=True)
class StepOrigin:
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


def describe_origin(kind: str, origin: StepOrigin, findings: Sequence[Finding]) -> dict[str, Any]:
    """The fields that every bundle has."""
    return {
        "kind": kind,
        "origin": {**asdict(origin), "islands": list(origin.islands)},
        "findings": [finding.as_json() for finding in findings],
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {"python": platform.python_version(), "torch": str(torch.__version__), "device": device}
