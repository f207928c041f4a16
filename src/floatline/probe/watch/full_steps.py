"""What is known when a model runs or an optimizer steps, for the full watch and the light one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from floatline.probe.watch.events import StepEvent
from floatline.probe.watch.gradient_scales import Held, largest_of
from floatline.probe.watch.loop import MadeOptimizer, Watch
from floatline.probe.watch.master_copies import match_masters
from floatline.probe.watch.patches import Aside, holds_numbers

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
_NUMBERS = frozenset((float,))
# What Adam, RMSprop and Adagrad call the mean or the sum of squared gradients.
_SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum")
# An eps that is as large as a hundredth of what it divides keeps steps in bounds.
_FAR_ABOVE = 100


def has_bad(*trees: Any) -> Tensor | bool:
    """Whether a tensor holds NaN or inf. -inf is how masks are written.

    Numerics:
        On a CPU a finite sum leaves no doubt, and any other may have overflowed: then each element is looked at.
    """
    leaves = [leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor)]
    tensors = [tensor for tensor in leaves if tensor.is_floating_point() and tensor.numel() and holds_numbers(tensor)]
    with Aside():
        if all(t.is_cpu and t.layout is torch.strided and math.isfinite(t.sum().item()) for t in tensors):
            return False
        bad = [(tensor.isnan() | tensor.isposinf()).any() for tensor in tensors]
        return torch.stack([flag.to(bad[0].device) for flag in bad]).any() if bad else False


def open_region(seen: Watch) -> int:
    """Number of the outermost open autocast region that keeps weight copies; 0 where none is open."""
    if not seen.regions:
        return 0
    enabled = any(enabled for _, enabled in seen.regions)
    return seen.regions[0][0] if enabled and torch.is_autocast_cache_enabled() else 0


def describe_step(
    seen: Watch, optimizer: Optimizer, made: MadeOptimizer, held: Held, counts: tuple[int, int], largest: Any
) -> StepEvent:
    """What is known when an optimizer steps.

    Args:
        seen: The watch.
        optimizer: The optimizer.
        made: What is known of it.
        held: What its gradients are made of.
        counts: How many parameters it has, and how many gradients.
        largest: The largest magnitude in each gradient.
    """
    return StepEvent(
        made.number,
        made.name,
        through_scaler=seen.busy > 0,
        scales_itself=bool(getattr(optimizer, "_step_supports_amp_scaling", False)),
        factors=list(held.factors) or _find_scale_left(seen, held),
        shrunk=held.shrunk,
        num_parameters=counts[0],
        num_without_gradient=counts[0] - counts[1],
        largest=largest,
        rates=read_rates(seen, optimizer),
        region=open_region(seen),
    )


def _find_scale_left(seen: Watch, held: Held) -> list[float]:
    """What of a scale by hand is left in the gradients of master copies when their optimizer steps; [] for nothing.

    Numerics:
        The ratio of the largest magnitudes of the copies' gradients and of the weights', times the scale. Gradients
        that were clipped as well are smaller: where not the whole scale is left, nothing is claimed.
    """
    scale = seen.scale_by_hand
    if scale == 1.0:
        return []
    known = seen.masters if seen.num_stepped else match_masters(seen, held.parameters)
    masters = [p for p in held.parameters if p.grad is not None and id(p) in known]
    weights = [w for p in masters for w in known[id(p)] if w.grad is not None]
    if not weights:
        return []
    tops = [largest_of([p.grad for p in group if p.grad is not None]) for group in (masters, weights)]
    if tops[0] is None or tops[1] is None:
        return []
    with Aside():
        left = scale * float(tops[0].max()) / max(float(tops[1].max()), 1e-30)
    return [left] if math.isfinite(left) and left > 0.98 * scale else []


def read_rates(seen: Watch, optimizer: Optimizer) -> list[float]:
    """The learning rates. Where one lies on a GPU, a light watch waits for it in steps that it sees in detail only."""
    rates = [group.get("lr", 0.0) for group in optimizer.param_groups]
    if _NUMBERS.issuperset(map(type, rates)):
        return rates
    known = seen.rates.get(id(optimizer))
    on_device = any(isinstance(rate, Tensor) and rate.device.type != "cpu" for rate in rates)
    if known is not None and on_device and not seen.detailed:
        return known
    with Aside():
        seen.rates[id(optimizer)] = [float(rate) for rate in rates]
    return seen.rates[id(optimizer)]


def share_of_dead_moments(optimizer: Optimizer) -> float:
    """Share of the second moments that are 0 in 16 bits, and whose weights an optimizer moves too far for that.

    Where a second moment has become 0, Adam divides by eps alone, or, if it is fused, by the last gradient's share of
    the moment and eps: those count whose first moment, or gradient, is far above eps.
    """
    dead = total = 0
    with Aside():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state: dict[str, Any] = optimizer.state.get(parameter, {})
                moment = next((state[name] for name in _SECOND_MOMENTS if name in state), None)
                if parameter.grad is None or not isinstance(moment, Tensor) or moment.dtype not in _SIXTEEN_BITS:
                    continue
                first = state.get("exp_avg", parameter.grad)
                dead += int(((moment == 0) & (first.float().abs() > _FAR_ABOVE * float(group.get("eps", 0.0)))).sum())
                total += moment.numel()
    return dead / total if total else 0.0
