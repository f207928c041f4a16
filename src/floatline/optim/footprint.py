"""The memory an optimizer and its parameters hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from floatline.optim.mesh import local_part


@dataclass(frozen=True)
class Footprint:
    """Bytes of each part, as counted from the tensors; of this process where parameters are sharded.

    Args:
        parts: Bytes by part: "weights", "gradients", "step", the states, their "_scale"s, "remainder" or
            "compensation", and "copies" of weights that others write before every step.
        num_parameters: How many weights there are.
    """

    parts: dict[str, int]
    num_parameters: int

    @classmethod
    def of(
        cls, params: Iterable[Tensor], state: Mapping[Tensor, Mapping[str, Any]], *, copies: Iterable[Tensor] = ()
    ) -> Footprint:
        """Count the tensors."""
        parts = {"weights": 0, "gradients": 0}
        count = 0
        for param in params:
            weight = local_part(param)
            count += weight.numel()
            parts["weights"] += weight.nbytes
            if param.grad is not None:
                parts["gradients"] += local_part(param.grad).nbytes
            for name, value in state.get(param, {}).items():
                parts[name] = parts.get(name, 0) + local_part(value).nbytes
        for copy in copies:
            parts["copies"] = parts.get("copies", 0) + copy.nbytes
        return cls(parts, count)

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def per_parameter(self) -> dict[str, float]:
        """Bytes of each part for one weight."""
        return {name: size / max(self.num_parameters, 1) for name, size in self.parts.items()}

    def __str__(self) -> str:
        """A table for people."""
        width = max(map(len, self.parts))
        rows = [(name, size) for name, size in self.parts.items() if size]
        lines = [f"{self.num_parameters:,} parameters, {self.total:,} bytes"]
        for name, size in [*rows, ("total", self.total)]:
            lines.append(f"  {name:<{width}}  {size:>15,}  {size / max(self.num_parameters, 1):6.2f} a parameter")
        return "\n".join(lines)
