"""LostDecay: a weight decay that 16-bit weights round away, and how large they become for it. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from floatline.findings import Finding

LOST = "decay-lost-to-rounding"
# A decay that rounds away has done harm from this share on by which it would have shrunk the weights.
DECAYED = 0.05


@dataclass(frozen=True)
class LostDecay:
    """A decay that leaves weights as they are, and takes much of them in FP32.

    Args:
        finding: What is told of it where weights show it.
        factor: What FP32's weights are multiplied by in each step.
        names: The weights.
        num_steps: Of the run.
    """

    finding: Finding
    factor: float
    names: tuple[str, ...]
    num_steps: int

    def shows_in(self, grown: float, num_steps: int) -> bool:
        """Whether weights that are larger than FP32's by a share show it after so many steps."""
        due = 1 - self.factor**num_steps
        return due >= DECAYED and grown > due / 2

    def as_json(self) -> dict[str, Any]:
        """Plain data that `read` takes."""
        return {**asdict(self), "finding": self.finding.as_json()}

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> LostDecay:
        """What `as_json` wrote."""
        return cls(Finding.read(entry["finding"]), entry["factor"], tuple(entry["names"]), entry["num_steps"])
