"""The light watch: what a step has once, for a loop that must not be slowed down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from floatline.precision.user_frames import NOWHERE
from floatline.probe.watch import late_numbers
from floatline.probe.watch.events import BackwardEvent, ForwardEvent, StepEvent
from floatline.probe.watch.full_steps import describe_step, has_bad, open_region, read_rates
from floatline.probe.watch.gradient_scales import find_factor, find_factor_by_hand, largest_of
from floatline.probe.watch.health import Health, judge, look
from floatline.probe.watch.late_numbers import ScaledLoss
from floatline.probe.watch.loop import Watch
from floatline.probe.watch.patches import Aside


def note_light_forward(seen: Watch, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A root module runs. Whether its inputs are finite is asked later, if at all, by who listens."""
    region = open_region(seen) if seen.regions else 0
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
    seen.busy += 1
    try:
        result = run(outputs, *args, **kwargs)
        return result
    finally:
        seen.busy -= 1
        seen.note_backward(dict(zip(map(id, trained), result or (), strict=False)) if trained else None)


def _note_backward(seen: Watch, outputs: Any, args: tuple[Any, ...]) -> None:
    factor = find_factor((*outputs, *(args[0] if args else ()))) if seen.scales.active else 1.0
    loss: Any = read_loss(outputs, factor)
    seen.scale_by_hand = 1.0 if seen.scales.active else find_factor_by_hand(outputs)
    seen.note_cheaply(BackwardEvent(loss, factor, bool(args[2]), seen.scale_by_hand))
    seen.step_losses.append(loss)


def read_loss(outputs: Any, factor: float) -> ScaledLoss | float:
    """What goes backward, without the loss scale: a number on a CPU, else a tensor that nobody waits for."""
    if len(outputs) == 1 and outputs[0].numel() == 1:
        value = outputs[0]
        return ScaledLoss(value.detach(), factor) if late_numbers.is_far(value) else value.item() / factor
    with Aside():
        loss: Any = sum(output.detach().double().sum() for output in outputs)
        return ScaledLoss(loss, factor) if late_numbers.is_far(loss) else float(loss) / factor


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
    held = seen.scales.find(optimizer)
    if seen.scales.active:
        seen.scales.look(held)
    parameters, gradients = held.parameters, held.gradients
    seen.leaves |= {id(p): p for p in parameters if p.grad is not None}
    values, health = judge(seen, largest_of(gradients), gradients)
    return describe_step(seen, optimizer, made, held, (len(parameters), len(gradients)), values), health


def _see_again(seen: Watch, optimizer: Optimizer) -> tuple[StepEvent, Health]:
    """Any other step. If it is like the one before, that one's event is repeated, which is quicker."""
    held = seen.scales.find(optimizer)
    setting = seen.busy > 0, open_region(seen) if seen.regions else 0, read_rates(seen, optimizer)
    groups = [group["params"] for group in optimizer.param_groups]
    gradients = [gradient for group in groups for p in group if (gradient := p.grad) is not None]
    if gradients and (seen.unscaled or not seen.busy):
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
