"""What is noted when a model runs, a backward pass runs or an optimizer steps, by the full watch and the light one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from floatline.precision.dtypes import NARROW
from floatline.precision.user_frames import NOWHERE
from floatline.probe.watch.events import BackwardEvent, ForwardEvent, StepEvent
from floatline.probe.watch.gradient_scales import Held, find_factor, largest_of
from floatline.probe.watch.health import Health, ScaledLoss, is_far, judge, look
from floatline.probe.watch.loop import MadeOptimizer, Watch
from floatline.probe.watch.patches import Aside, holds_numbers
from floatline.probe.watch.weights import match_masters

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
        region=seen.regions.current,
    )


def _find_scale_left(seen: Watch, held: Held) -> list[float]:
    """What of a scale by hand is left in the gradients of master copies when their optimizer steps; [] for nothing.

    Numerics:
        The ratio of the largest magnitudes of the copies' gradients and of the weights', times the scale. Gradients
        that were clipped as well are smaller: where not the whole scale is left, nothing is claimed.
    """
    scale = seen.scaling.by_hand
    if scale == 1.0:
        return []
    known = seen.weights.masters if seen.num_stepped else match_masters(held.parameters, [*seen.modules.parameters()])
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
    made = seen.optimizers.get(id(optimizer))
    on_device = any(isinstance(rate, Tensor) and rate.device.type != "cpu" for rate in rates)
    if made is not None and made.rates is not None and on_device and not seen.detailed:
        return made.rates
    with Aside():
        found = [float(rate) for rate in rates]
    if made is not None:
        made.rates = found
    return found


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
                if parameter.grad is None or not isinstance(moment, Tensor) or moment.dtype not in NARROW:
                    continue
                first = state.get("exp_avg", parameter.grad)
                dead += int(((moment == 0) & (first.float().abs() > _FAR_ABOVE * float(group.get("eps", 0.0)))).sum())
                total += moment.numel()
    return dead / total if total else 0.0


# The light watch: what a step has once, for a loop that must not be slowed down.


def note_light_forward(seen: Watch, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A root module runs. Whether its inputs are finite is asked later, if at all, by who listens."""
    region = seen.regions.current
    if seen.listener is None:
        bad: Any = has_bad(args, kwargs)
        seen.note_cheaply(ForwardEvent(bad, region))
        return
    event = seen.note_cheaply(ForwardEvent(bad_inputs=False, region=region))
    seen.listener.begin_forward(module, args, kwargs, event)


def run_light_backward(
    seen: Watch,
    run: Callable[..., Any],
    outputs: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    trained: list[Tensor],
) -> Any:
    """A backward pass: its loss is kept, on its device; `trained` are the weights of torch.autograd.grad."""
    if not kwargs.get("accumulate_grad", True) and not trained:
        return run(outputs, *args, **kwargs)
    _note_backward(seen, outputs, args)
    result: Any = None
    try:
        with seen.one_call:
            result = run(outputs, *args, **kwargs)
        return result
    finally:
        seen.note_backward(dict(zip(map(id, trained), result or (), strict=False)) if trained else None)


def _note_backward(seen: Watch, outputs: Any, args: tuple[Any, ...]) -> None:
    factor = find_factor((*outputs, *(args[0] if args else ()))) if seen.scaling.gradients.active else 1.0
    loss: Any = read_loss(outputs, factor)
    seen.note_cheaply(BackwardEvent(loss, factor, bool(args[2]), seen.scaling.find_by_hand(outputs)))
    seen.step_losses.append(loss)


def read_loss(outputs: Any, factor: float) -> ScaledLoss | float:
    """What goes backward, without the loss scale: a number on a CPU, else a tensor that nobody waits for."""
    if len(outputs) == 1 and outputs[0].numel() == 1:
        value = outputs[0]
        return ScaledLoss(value.detach(), factor) if is_far(value) else value.item() / factor
    with Aside():
        loss: Any = sum(output.detach().double().sum() for output in outputs)
        return ScaledLoss(loss, factor) if is_far(loss) else float(loss) / factor


def note_light_step(seen: Watch, optimizer: Optimizer) -> StepEvent:
    """An optimizer steps: one reduction over its gradients, which is read at once on a CPU and late on a GPU."""
    event, health = (_see_all if seen.detailed else _see_again)(seen, optimizer)
    seen.num_stepped += 1
    if not seen.busy:
        seen.note_attempt()
    seen.note_cheaply(event, of=event.optimizer)
    if seen.listener is not None:
        seen.listener.see_gradients(optimizer, event, health)
    return event


def _see_all(seen: Watch, optimizer: Optimizer) -> tuple[StepEvent, Health]:
    """A step that is looked at in detail."""
    made = seen.add_optimizer(optimizer, NOWHERE)
    held = seen.scaling.gradients.find(optimizer)
    if seen.scaling.gradients.active:
        seen.scaling.gradients.look(held)
    parameters, gradients = held.parameters, held.gradients
    seen.weights.add_leaves(p for p in parameters if p.grad is not None)
    values, health = judge(seen, largest_of(gradients), gradients)
    return describe_step(seen, optimizer, made, held, (len(parameters), len(gradients)), values), health


def _see_again(seen: Watch, optimizer: Optimizer) -> tuple[StepEvent, Health]:
    """Any other step. If it is like the one before, that one's event is repeated, which is quicker."""
    held = seen.scaling.gradients.find(optimizer)
    setting = seen.busy > 0, seen.regions.current, read_rates(seen, optimizer)
    groups = [group["params"] for group in optimizer.param_groups]
    gradients = [gradient for group in groups for p in group if (gradient := p.grad) is not None]
    if gradients and (seen.scaling.unscaled or not seen.busy):
        values, health = look(seen, held, gradients)
    else:
        # What a scaler lets through has finite gradients, unless the loop has changed them since.
        values, health = judge(seen, None, [])
    counts = sum(map(len, groups)), len(gradients)
    if held.described is not None and held.described[:2] == (setting, counts) and not len(values):
        return held.described[2].again(), health
    made = seen.optimizers.get(id(optimizer)) or seen.add_optimizer(optimizer, NOWHERE)
    event = describe_step(seen, optimizer, made, held, counts, values)
    event.factors, event.shrunk = [], 1.0  # they are not followed now
    # A copy: who reads the event may write to it.
    held.described = (setting, counts, event.again()) if seen.light and not len(values) else None
    return event, health
