"""GradientScales: the loss scale in the gradients of each optimizer, followed through the calls of a loop."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from floatline.numerics.foreach import choose
from floatline.probe.aside import Aside

_Marks = dict[int, tuple[int, int]]
# As it was at import: while a loop is watched, torch's own reports who reads scaled gradients.
_foreach_norm: Any = choose("norm")


@dataclass(slots=True)
class Held:
    """What one optimizer's gradients are made of.

    Args:
        optimizer: The optimizer.
        factors: One for each backward pass that is summed up in the gradients: the loss scale still in it. 1 is a true
            gradient, 65536 a scaled one, 1/65536 one that was divided once too often.
        shrunk: The code itself multiplied scaled gradients by this, and it was not one over the scale; 1 is not at all.
        marks: Identity and version of each gradient when it was last looked at.
        largest: Largest magnitude then; None where nothing was scaled.
        touched: Something wrote into the memory of a gradient since.
        num_seen: How many gradients there were when their kinds were last looked at.
        kind: Of those: 'far' on a GPU, 'near' on a CPU, 'mixed' where some are sparse, empty or on another device.
        flags: For small ones: where torch writes 1 if one is not finite, and what it divides them by to find out.
        fresh: On a GPU, a flag for each of the next steps.
        described: What may change from step to step, how many parameters and gradients there were, and what was noted
            of the last step.
    """

    optimizer: Optimizer
    factors: list[float] = field(default_factory=list[float])
    shrunk: float = 1.0
    marks: _Marks = field(default_factory=dict[int, tuple[int, int]])
    largest: float | None = None
    touched: bool = False
    num_seen: int = 0
    kind: str = "mixed"
    flags: tuple[Tensor, Tensor] | None = None
    fresh: list[Tensor] = field(default_factory=list[Tensor])
    described: tuple[Any, tuple[int, int], dict[str, Any]] | None = None

    @property
    def parameters(self) -> list[Tensor]:
        """What the optimizer holds."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients that are there."""
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    @property
    def scale(self) -> float:
        """The factor that is furthest from 1; 1 where all gradients are true ones."""
        return max(self.factors, key=lambda factor: max(factor, 1 / factor), default=1.0)


class GradientScales:
    """Follows scale, backward, unscale, clearing and hand-made changes.

    Numerics:
        Gradients that the code divides by hand are found by their size: where the largest falls by a factor within
        2 % of the scale, they count as unscaled; by another factor, as shrunk.
    """

    def __init__(self) -> None:
        self.active = False  # from the first call of a scaler on: without one nothing is scaled
        self._held: dict[int, Held] = {}
        self._before: dict[int, _Marks] = {}
        self._memory: dict[int, Held] = {}

    def find(self, optimizer: Optimizer) -> Held:
        """The record of an optimizer."""
        held = self._held.get(id(optimizer))
        return held if held is not None else self._held.setdefault(id(optimizer), Held(optimizer))

    def owner_of(self, tensor: Tensor) -> Held | None:
        """Whose scaled gradient lies in the memory of a tensor."""
        return self._memory.get(_address(tensor)) if self._memory else None

    def owners_among(self, tensors: list[Tensor]) -> list[Held]:
        """Whose scaled gradients are among tensors, each once."""
        found = {id(held): held for tensor in tensors if (held := self.owner_of(tensor)) is not None}
        return list(found.values())

    def owners_of_all(self, tensors: list[Tensor]) -> list[Held]:
        """The same for a call that takes all gradients at once; those that the code has divided meanwhile are out."""
        found = self.owners_among(tensors)
        for held in found:
            self.look(held)
        return [held for held in found if held.scale != 1.0]

    def before_backward(self) -> None:
        """Look at all gradients, so that what backward changes can be told."""
        if not self.active:
            return
        for held in self._held.values():
            self.look(held)
            if held.factors and not _largest(held.gradients):
                self._forget(held)  # cleared, however it was done
            self._before[id(held)] = _read_marks(held)

    def after_backward(self, factor: float) -> None:
        """Add one pass, at this loss scale, to the optimizers whose gradients it changed."""
        if not self.active:
            return
        for held in self._held.values():
            marks = _read_marks(held)
            if marks == self._before.get(id(held)):
                continue
            held.factors.append(factor)
            self._note(held, marks)

    def unscale(self, optimizer: Optimizer, scale: float) -> tuple[list[float], list[float]]:
        """A scaler divided the gradients: the factors before and after."""
        held = self.find(optimizer)
        before = list(held.factors)
        held.factors = [factor / scale for factor in before]
        self._note(held, _read_marks(held))
        return before, list(held.factors)

    def clear(self, optimizer: Optimizer) -> None:
        """The gradients were cleared."""
        self._forget(self.find(optimizer))

    def forget_all(self) -> None:
        """Nothing is known about the gradients that are there."""
        for held in self._held.values():
            self._forget(held)

    def settle(self, optimizer: Optimizer) -> None:
        """A call that is known has just changed the gradients."""
        held = self.find(optimizer)
        self._note(held, _read_marks(held))

    def look(self, held: Held) -> None:
        """See whether the code itself changed scaled gradients since the last look."""
        marks = _read_marks(held)
        if held.largest is None or (marks == held.marks and not held.touched):
            return
        now = _largest(held.gradients)
        ratio = now / held.largest if held.largest else 1.0
        if not math.isfinite(ratio):
            held.factors = []  # inf and NaN hide what was done to them: nothing is claimed
        elif abs(ratio * held.scale - 1) < 0.02:
            held.factors = [factor / held.scale for factor in list(held.factors)]
        elif ratio < 0.98:
            held.shrunk *= ratio
        self._note(held, marks)

    def _note(self, held: Held, marks: _Marks) -> None:
        held.marks, held.touched = marks, False
        scaled = held.scale != 1.0
        held.largest = _largest(held.gradients) if scaled else None
        self._memory = {pointer: owner for pointer, owner in self._memory.items() if owner is not held}
        if scaled:
            self._memory |= {_address(gradient): held for gradient in held.gradients}

    def _forget(self, held: Held) -> None:
        held.factors, held.shrunk = [], 1.0
        self._note(held, {})


def _address(tensor: Tensor) -> int:
    """Where the numbers of a tensor lie; a sparse one has no memory of its own, but its values have."""
    return (tensor._values() if tensor.is_sparse else tensor).data_ptr()


def _read_marks(held: Held) -> _Marks:
    return {
        id(parameter): (id(parameter.grad), parameter.grad._version)
        for parameter in held.parameters
        if parameter.grad is not None
    }


def largest_of(gradients: list[Tensor]) -> Tensor | None:
    """The largest magnitude in each gradient, as one tensor; NaN where one holds NaN."""
    with Aside():
        dense = [g.coalesce().values() if g.is_sparse else g.detach() for g in gradients]
        dense = [gradient for gradient in dense if gradient.numel()]
        if not dense:
            return None
        norms: list[Tensor] = _foreach_norm(dense, float("inf"))
        return torch.stack([norm.to(dense[0].device, torch.float32) for norm in norms])


def _largest(gradients: list[Tensor]) -> float:
    found = largest_of(gradients)
    with Aside():
        return 0.0 if found is None else float(found.max())
