"""An exponential average of the weights in float32, moved by applied steps only."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from floatline.errors import GuardError
from floatline.optim import mesh
from floatline.optim.storage import load_weight
from floatline.precision.wrappers import unwrap


class Average:
    """The average of a model's weights over its steps.

    Numerics:
        average + (1 - decay) (weight - average) in float32, from the float32 weight that is being trained: a 16-bit
        weight is joined with what stands beside it in the optimizer. Where the step was skipped the average keeps
        every bit: it is selected, never multiplied by zero. Checked by tests/guard/test_averages.py.

    Args:
        model: Whose floating-point parameters are averaged.
        optimizer: Holds what stands beside 16-bit weights.
        decay: What the average keeps in each step.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, decay: float) -> None:
        if isinstance(decay, bool) or not math.isfinite(decay) or not 0 <= decay < 1:
            raise GuardError(f"decay is {decay!r}. Give a number from 0 to below 1, such as 0.999.")
        self.decay = decay
        self._state = cast("dict[Tensor, dict[str, Any]]", optimizer.state)
        self._params = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
        self.tensors = {name: self._master(p).clone() for name, p in self._params.items()}

    @torch.no_grad()
    def update(self, applied: Tensor) -> None:
        """Move the average where the step was applied; no host read."""
        for name, param in self._params.items():
            average = self.tensors[name]
            moved = torch.lerp(average, self._master(param), 1 - self.decay)
            torch.where(applied.to(average.device), moved, average, out=average)

    def copy_to(self, model: nn.Module) -> None:
        """Write the averages into a model of the same kind, rounded to its weights' dtypes."""
        with torch.no_grad():
            for name, param in unwrap(model).named_parameters():
                if name in self.tensors:
                    mesh.local_part(param).copy_(self.tensors[name])

    def _master(self, param: Tensor) -> Tensor:
        state = self._state.get(param, {})
        extra = state.get("remainder", state.get("compensation"))
        weight = mesh.local_part(param.detach())
        return load_weight(weight, None if extra is None else mesh.local_part(extra))
