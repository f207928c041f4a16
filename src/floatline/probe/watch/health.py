"""Whether the gradients, losses and weights of a step are finite: at once on a CPU, later on a GPU."""

# torch shows its reductions over many tensors to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from floatline.numerics.foreach import check_and_unscale_, choose
from floatline.probe.watch import late_numbers
from floatline.probe.watch.gradient_scales import Held, largest_of
from floatline.probe.watch.late_numbers import LateHealth, ScaledLoss, are_finite
from floatline.probe.watch.loop import Watch
from floatline.probe.watch.patches import Aside

# As it was at import: while a loop is watched, torch's own reports who reads scaled gradients.
_foreach_norm: Any = choose("norm")
# Elements of a gradient, on average, up to which the check of loss scalers, at scale 1, is the quickest.
_SMALL = {"near": 2**12, "far": 2**16}
# Flags that are made at once, for so many steps.
_FLAGS = 64
_KNOWN = frozenset((float,))

# Finite where gradients and losses are: a number, or what is still on a device.
Health: TypeAlias = "LateHealth | float"


def look(seen: Watch, held: Held, gradients: list[Tensor]) -> tuple[Any, Health]:
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
    return "far" if late_numbers.is_far(first) else "near"


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


def _look_later(seen: Watch, held: Held, gradients: list[Tensor]) -> LateHealth:
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


def judge(seen: Watch, sizes: Tensor | None, gradients: list[Tensor]) -> tuple[Any, Health]:
    """The largest gradients, all of them or one, and numbers that are finite where they and the losses are.

    On a GPU the numbers stay there, and so do the gradients' sizes where all is looked at.

    Numerics:
        A norm that is not finite may have overflowed: then the largest magnitudes tell. A finite one leaves no doubt.
    """
    if find_late_losses(seen.step_losses) or (sizes is not None and late_numbers.is_far(sizes)):
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
    if weights and not any(late_numbers.is_far(weight) or weight.is_sparse for weight in weights):
        norms = _foreach_norm([weight.detach() for weight in weights], 2)
        if math.isfinite(sum(norm.item() for norm in norms)):
            return True
    largest = largest_of(weights)
    return True if largest is None else largest.isfinite().all()
