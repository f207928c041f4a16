"""GradientScales: the loss scale in the gradients of each optimizer, followed through the calls of a loop."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from floatline.numerics.foreach import choose
from floatline.optim.mesh import local_part
from floatline.probe.watch.events import StepEvent
from floatline.probe.watch.patches import Aside

_TAG = "floatline_scale"
_GRADIENT_TAG = "floatline_scaled_gradient"
# A scaled loss is divided by the number of micro-batches, or summed with others; hardly more.
_NEAR = 64
_PRODUCTS = frozenset(("MulBackward0", "DivBackward0"))
# No weight of a loss is meant by a larger number.
_LEAST_SCALE = 7.9


def mark_scaled(tensor: Tensor, scale: float) -> None:
    """Remember that a tensor, and what is made of it, is multiplied by a loss scale."""
    setattr(tensor, _TAG, scale)
    node: Any = tensor.grad_fn
    if node is not None:
        node.metadata[_TAG] = scale


def find_factor(tensors: Iterable[Any]) -> float:
    """The loss scale in these tensors or just below them; 1 where there is none, and NaN for a scale of 0."""
    present = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    for tensor in present:
        if hasattr(tensor, _TAG):
            return getattr(tensor, _TAG) or math.nan
    for number, node in enumerate(_walk(present)):
        if _TAG in node.metadata:
            return node.metadata[_TAG] or math.nan
        if number == _NEAR:
            break
    return 1.0


def find_factor_by_hand(outputs: Sequence[Any]) -> float:
    """The number that a loss was multiplied by last, as in `(loss * 2**16).backward()`; 1 where there is none."""
    node: Any = outputs[0].grad_fn if len(outputs) == 1 and isinstance(outputs[0], Tensor) else None
    for _ in range(3):  # a division by the number of micro-batches may come after it
        if node is None or node.name() not in _PRODUCTS:
            return 1.0
        other = getattr(node, "_saved_other", None)
        if isinstance(other, Tensor) and other.is_cpu and other.numel() == 1 and not other.requires_grad:
            with Aside():
                number = float(other)
            factor = 1 / number if number and node.name().startswith("Div") else number
            if factor > _LEAST_SCALE:
                return factor
        node = next((following for following, _ in node.next_functions if following is not None), None)
    return 1.0


def mark_scaled_gradients(tensors: Iterable[Any], scale: float) -> None:
    """Remember that tensors are gradients with a loss scale in them, which a loss may be made of."""
    for tensor in tensors:
        node: Any = getattr(tensor, "grad_fn", None)
        if node is not None:
            node.metadata[_GRADIENT_TAG] = scale


def find_scaled_gradient(outputs: Iterable[Any]) -> float:
    """The loss scale of gradients that the outputs are made of, where nothing divides by it on the way; else 1."""
    scale, factors = 1.0, set[float]()
    for node in _walk((o for o in outputs if isinstance(o, Tensor)), stop=_GRADIENT_TAG):
        scale = max(scale, node.metadata.get(_GRADIENT_TAG, 1.0))
        factors |= set(_read_factors(node))
    divided = any(abs(factor * scale**power - 1) < 1e-3 for factor in factors for power in (1, 2))
    return 1.0 if divided else scale


def _read_factors(node: Any) -> Iterator[float]:
    """Single numbers that a node multiplies by, as it keeps them for its backward pass."""
    divides = "Div" in node.name()
    if _GRADIENT_TAG in node.metadata or not (divides or "Mul" in node.name()):
        return
    for name in dir(node):
        if not name.startswith("_saved_"):
            continue
        try:
            with Aside():
                value = getattr(node, name)
                value = float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
        except RuntimeError:  # freed by an earlier backward pass
            continue
        if isinstance(value, float) and value:
            yield 1 / value if divides else value


def find_leaves(outputs: Iterable[Any]) -> list[Tensor]:
    """Every tensor that a backward pass from the outputs adds a gradient to."""
    return [node.variable for node in _walk(o for o in outputs if isinstance(o, Tensor)) if hasattr(node, "variable")]


def _walk(tensors: Iterable[Tensor], *, stop: str = "") -> Iterator[Any]:
    """The nodes, nearest first; not what lies behind one that has the tag `stop`."""
    queue: deque[Any] = deque(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None)
    known = {id(node) for node in queue}
    kept: list[Any] = []  # a node's id is its own only while Python holds it
    while queue:
        node = queue.popleft()
        kept.append(node)
        yield node
        if stop and stop in node.metadata:
            continue
        for following, _ in node.next_functions:
            if following is not None and id(following) not in known:
                known.add(id(following))
                queue.append(following)


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
    described: tuple[Any, tuple[int, int], StepEvent] | None = None

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
        # A scaler that has backed off for long is at 0: what is left of the gradients then is not known.
        held.factors = [factor / (scale or math.nan) for factor in before]
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
        own = [local_part(gradient) for gradient in gradients]
        dense = [g.coalesce().values() if g.is_sparse else g.detach() for g in own]
        dense = [gradient for gradient in dense if gradient.numel()]
        if not dense:
            return None
        norms: list[Tensor] = _foreach_norm(dense, float("inf"))
        return torch.stack([norm.to(dense[0].device, torch.float32) for norm in norms])


def _largest(gradients: list[Tensor]) -> float:
    found = largest_of(gradients)
    with Aside():
        return 0.0 if found is None else float(found.max())
