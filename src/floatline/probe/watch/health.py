"""Whether the gradients, losses and weights of a step are finite: known at once on a CPU, and later on a GPU."""

# torch shows its reductions over many tensors to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from floatline.numerics.foreach import check_and_unscale_, choose
from floatline.probe.watch.gradient_scales import Held, largest_of
from floatline.probe.watch.patches import Aside

# As it was at import: while a loop is watched, torch's own reports who reads scaled gradients.
_foreach_norm: Any = choose("norm")
# Elements of a gradient, on average, up to which the check of loss scalers, at scale 1, is the quickest.
_SMALL = {"near": 2**12, "far": 2**16}
# Flags that are made at once, for so many steps.
_FLAGS = 64
_KNOWN = frozenset((float,))

# Numbers that fit into the memory of an answer, at least: more gradients than most models have.
_USUAL = 512
# Such memory that is kept for later.
_MOST_FREE = 8


@dataclass(slots=True)
class _NumberSlot:
    """Memory on the host, the part of it that was last asked for, and when it has been filled."""

    host: Tensor
    arrived: torch.cuda.Event
    part: Tensor


@dataclass(slots=True)
class _Asked:
    """A question: its step, where the answer comes to, and who is told."""

    step: int
    host: Tensor
    slot: _NumberSlot | None
    then: Callable[[list[float]], None]


@dataclass(slots=True, eq=False)
class ScaledLoss:
    """A loss that goes backward with a loss scale in it, without that scale; on its device until somebody reads it.

    Args:
        value: The loss with its scale.
        factor: The scale.
    """

    value: Tensor | float
    factor: float

    def __float__(self) -> float:
        return float(self.value) / self.factor


@dataclass(slots=True)
class LateHealth:
    """Numbers of a step, still on their device, that tell whether it was finite.

    Args:
        numbers: Finite where gradients and losses are, the losses last.
        losses: Those losses.
        flagged: Whether the first is a flag instead: 0 where all gradients are finite.
    """

    numbers: list[Tensor]
    losses: list[ScaledLoss] = field(default_factory=list[ScaledLoss])
    flagged: bool = False

    def is_fine(self, found: list[float]) -> bool:
        """Whether the step was finite, by what the numbers turned out to be."""
        return are_finite(found) and not (self.flagged and found[0])


class LateNumbers:
    """Numbers of a device, copied to the host behind the work that is queued there.

    A step later the device has long passed that place: reading then waits for nothing that is still to do. Numbers that
    are on the host already are late as well, so that a loop without a GPU can be treated alike.
    """

    def __init__(self) -> None:
        self._asked: deque[_Asked] = deque()
        self._free: list[_NumberSlot] = []

    def ask(self, numbers: Tensor, step: int, then: Callable[[list[float]], None]) -> None:
        """Send numbers on their way.

        Args:
            numbers: A vector, or one number.
            step: The step that they belong to.
            then: Called with them when they are read.
        """
        with Aside():
            if numbers.ndim != 1:
                numbers = numbers.flatten()
            if numbers.device.type != "cuda":
                self._asked.append(_Asked(step, numbers.detach().clone(), None, then))
                return
            slot = self._take(len(numbers))
            slot.part.copy_(numbers, non_blocking=True)
            slot.arrived.record(torch.cuda.current_stream(numbers.device))  # pyright: ignore[reportUnknownMemberType]
        self._asked.append(_Asked(step, slot.part, slot, then))

    def _take(self, size: int) -> _NumberSlot:
        place = next((i for i, free in enumerate(self._free) if len(free.host) >= size), None)
        if place is None:
            host = torch.empty(max(size, _USUAL), dtype=torch.float32, device="cpu", pin_memory=True)
            return _NumberSlot(host, torch.cuda.Event(), host[:size])
        slot = self._free.pop(place)
        if len(slot.part) != size:
            slot.part = slot.host[:size]
        return slot

    def read(self, *, before: int | None = None) -> None:
        """Tell those who asked in steps before one; None: everybody. Waits for what has not arrived yet."""
        while self._asked and (before is None or self._asked[0].step < before):
            asked = self._asked.popleft()
            with Aside():
                if asked.slot is not None:
                    asked.slot.arrived.synchronize()
                numbers = cast("list[float]", asked.host.tolist())
            if asked.slot is not None:
                self._free.append(asked.slot)
                del self._free[:-_MOST_FREE]
            asked.then(numbers)


def is_far(tensor: Tensor) -> bool:
    """Whether a tensor lies on a device that works on by itself: reading it would wait."""
    return not tensor.is_cpu


def are_finite(numbers: list[float]) -> bool:
    """Whether no number is inf or NaN."""
    return math.isfinite(sum(numbers)) or all(map(math.isfinite, numbers))


# Finite where gradients and losses are: a number, or what is still on a device.
Health: TypeAlias = "LateHealth | float"


class StepUnderWay(Protocol):
    """What is known of the step under way; a Watch."""

    @property
    def detailed(self) -> bool:
        """Whether all calls of the step are looked at."""
        ...

    @property
    def step_losses(self) -> list[ScaledLoss | float]:
        """Its losses so far."""
        ...

    @property
    def listener(self) -> object | None:
        """Who asks about the steps of a light watch; None where nobody does."""
        ...


def look(seen: StepUnderWay, held: Held, gradients: list[Tensor]) -> tuple[Any, Health]:
    """As `judge` for a step that is not looked at in detail, in as few calls as can be.

    Numerics:
        The gradients keep their bits. Checked by tests/probe/watch/test_health.py.
    """
    if len(gradients) != held.num_seen:  # the kinds of gradients are looked at once
        held.num_seen, held.kind = len(gradients), _find_kind(gradients)
        held.flags, held.fresh = _make_flags(gradients, held.kind), []
    if held.kind == "mixed" or torch._C._len_torch_dispatch_stack():
        return judge(seen, largest_of(gradients), gradients)
    try:
        if held.kind == "far" and seen.listener is not None:
            return [], _look_later(seen, held, gradients)
        if _is_fine_nearby(held, gradients) and _are_known_and_finite(seen.step_losses):
            return [], 0.0
        norms = torch.stack(find_norms(gradients, math.inf if held.kind == "far" else 2))
    except RuntimeError:  # a gradient is of another kind than before
        held.kind, held.flags = "mixed", None
        return judge(seen, largest_of(gradients), gradients)
    return judge(seen, norms, gradients)


def _is_fine_nearby(held: Held, gradients: list[Tensor]) -> bool:
    """Whether small gradients on a CPU are finite, in one call; False where that takes more."""
    if held.kind != "near" or held.flags is None or len(gradients) != held.num_seen:
        return False
    check_and_unscale_([gradient.data for gradient in gradients], *held.flags)
    if not held.flags[0].item():
        return True
    held.flags[0].zero_()
    return False


def _find_kind(gradients: list[Tensor]) -> str:
    first = gradients[0]
    if any(g.is_sparse or g.device != first.device or not g.numel() for g in gradients):
        return "mixed"
    return "far" if is_far(first) else "near"


def _make_flags(gradients: list[Tensor], kind: str) -> tuple[Tensor, Tensor] | None:
    """A flag and a scale of 1 for small float32 gradients; others are not written to."""
    place = gradients[0].device
    if kind == "mixed" or place.type not in ("cpu", "cuda") or _mean_size(gradients) > _SMALL[kind]:
        return None
    usual = all(type(g) is Tensor and g.dtype is torch.float32 for g in gradients)
    alone = place.type != "cpu" or all(not g.is_shared() for g in gradients)
    if not (usual and alone):
        return None
    with Aside():
        return torch.zeros(1, dtype=torch.float32, device=place), torch.ones(1, dtype=torch.float32, device=place)


def _mean_size(tensors: list[Tensor]) -> float:
    return sum(tensor.numel() for tensor in tensors) / len(tensors)


def _look_later(seen: StepUnderWay, held: Held, gradients: list[Tensor]) -> LateHealth:
    """What will tell, on a GPU: a flag, which took a third of the time on an H200, or the norms."""
    if held.flags is None:
        return wait_for_losses(seen.step_losses, [*find_norms(gradients, math.inf)])
    if not held.fresh:  # none is used twice, so that none must be set back to 0
        with Aside():
            held.fresh += held.flags[0].new_zeros(_FLAGS).unbind()
    flag = held.fresh.pop()
    check_and_unscale_([gradient.data for gradient in gradients], flag, held.flags[1])
    return wait_for_losses(seen.step_losses, [flag], flagged=True)


def find_norms(tensors: list[Tensor], order: float) -> list[Tensor]:
    """The norm of each tensor. On a CPU that of order 2 takes a fourth of the time of the largest magnitude."""
    tracked = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        return _foreach_norm(tensors, order)
    finally:
        torch._C._set_grad_enabled(tracked)


def judge(seen: StepUnderWay, sizes: Tensor | None, gradients: list[Tensor]) -> tuple[Any, Health]:
    """The largest gradients, all of them or one, and numbers that are finite where they and the losses are.

    On a GPU the numbers stay there, and so do the gradients' sizes where all is looked at.

    Numerics:
        A norm that is not finite may have overflowed: then the largest magnitudes tell. A finite one leaves no doubt.
    """
    if find_late_losses(seen.step_losses) or (sizes is not None and is_far(sizes)):
        wanted = sizes is not None and (seen.detailed or seen.listener is None)
        return (sizes if wanted else []), wait_for_losses(seen.step_losses, [] if sizes is None else [*sizes.unbind()])
    found = [] if sizes is None else cast("list[float]", sizes.tolist())
    if not are_finite(found) and not seen.detailed:
        largest = largest_of(gradients)
        found = [] if largest is None else cast("list[float]", largest.tolist())
    fine = are_finite(found)
    health = 0.0 if fine and are_losses_finite(seen.step_losses) else math.nan
    return found if seen.detailed or not fine else found[:1], health


def wait_for_losses(losses: list[ScaledLoss | float], numbers: list[Tensor], *, flagged: bool = False) -> LateHealth:
    """Numbers of a step, with its losses that are still on a device; NaN where another is not finite."""
    health = LateHealth(numbers, flagged=flagged)
    waiting: list[Tensor] = []
    for loss in losses:
        if type(loss) is ScaledLoss and isinstance(value := loss.value, Tensor):
            waiting.append(value if not value.ndim else value.reshape(()))
            health.losses.append(loss)
        elif not math.isfinite(loss):
            numbers.append(torch.tensor(math.nan, dtype=torch.float32, device="cpu"))
    numbers += waiting
    return health


def _are_known_and_finite(losses: list[ScaledLoss | float]) -> bool:
    return {*map(type, losses)} <= _KNOWN and all(map(math.isfinite, losses))


def find_late_losses(losses: Iterable[ScaledLoss | float]) -> list[ScaledLoss]:
    """The losses that are still on a device."""
    return [loss for loss in losses if isinstance(loss, ScaledLoss) and isinstance(loss.value, Tensor)]


def are_losses_finite(losses: Iterable[ScaledLoss | float]) -> bool:
    """Whether the losses of a step are finite; waits for the device where they are there."""
    return all(math.isfinite(loss) for loss in losses)


def are_losses_lost(losses: Sequence[ScaledLoss | float]) -> bool:
    """Whether the losses of a step are known by now, and one is not finite."""
    return not find_late_losses(losses) and not are_losses_finite(losses)


def are_weights_finite(weights: list[Tensor]) -> Tensor | bool:
    """Whether no weight is inf or NaN; on a GPU the answer stays there.

    Numerics:
        As in `judge`: a finite norm leaves no doubt, and for any other the largest magnitudes tell.
    """
    if weights and not any(is_far(weight) or weight.is_sparse for weight in weights):
        norms = _foreach_norm([weight.detach() for weight in weights], 2)
        if math.isfinite(sum(norm.item() for norm in norms)):
            return True
    largest = largest_of(weights)
    return True if largest is None else largest.isfinite().all()
