"""The light watch: what a step has once, for a loop that must not be slowed down."""

# torch shows its reductions over many tensors to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from floatline.probe import late
from floatline.probe.aside import Aside
from floatline.probe.events import Event, Watch
from floatline.probe.frames import NOWHERE
from floatline.probe.gradient_scales import Held, largest_of
from floatline.probe.graphs import find_factor
from floatline.probe.late import ScaledLoss, are_finite
from floatline.probe.watch_steps import describe_step, open_region

# As it was at import: while a loop is watched, torch's own reports who reads scaled gradients.
_foreach_norm: Any = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]


def note_light_forward(seen: Watch, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A root module runs. Whether its inputs are finite is asked later, if at all."""
    data = {"root": seen.number(module), "bad_inputs": False, "region": open_region(seen)}
    event = seen.note_cheaply("forward", data)
    if seen.listener is not None:
        seen.listener.begin_forward(module, args, kwargs, event)


def run_light_backward(
    seen: Watch, run: Callable[..., Any], outputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A backward pass: its loss is kept, on its device."""
    if not kwargs.get("accumulate_grad", True):
        return run(outputs, *args, **kwargs)
    factor = find_factor((*outputs, *(args[0] if args else ()))) if seen.scales.active else 1.0
    loss = _read_loss(outputs, factor)
    seen.note_cheaply("backward", {"loss": loss, "factor": factor, "create_graph": bool(args[2]), "region": 0})
    seen.step_losses.append(loss)
    seen.busy += 1
    try:
        return run(outputs, *args, **kwargs)
    finally:
        seen.busy -= 1
        seen.note_backward()


def _read_loss(outputs: Any, factor: float) -> ScaledLoss | float:
    """What goes backward, without the loss scale: a number on a CPU, else a tensor that nobody waits for."""
    if len(outputs) == 1 and outputs[0].numel() == 1:
        value = outputs[0]
        return ScaledLoss(value.detach(), factor) if late.is_far(value) else value.item() / factor
    with Aside():
        loss: Any = sum(output.detach().double().sum() for output in outputs)
        return ScaledLoss(loss, factor) if late.is_far(loss) else float(loss) / factor


def note_light_step(seen: Watch, optimizer: Optimizer) -> Event:
    """An optimizer steps: one reduction over its gradients, which is read at once on a CPU and late on a GPU."""
    made = seen.optimizers.get(id(optimizer)) or seen.add_optimizer(optimizer, NOWHERE)
    held = seen.scales.find(optimizer)
    parameters = held.parameters
    gradients = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
    if seen.detailed:
        made = seen.add_optimizer(optimizer, NOWHERE)
        if seen.scales.active:
            seen.scales.look(held)
        seen.leaves |= {id(p): p for p in parameters if p.grad is not None}
        values, health = _judge(seen, largest_of(gradients), gradients)
    elif seen.busy and not seen.unscaled:
        # What a scaler lets through has finite gradients, unless the loop has changed them since.
        values, health = _judge(seen, None, [])
    else:
        values, health = _judge(seen, _measure(held, gradients), gradients)
    data = describe_step(seen, optimizer, made, held, (len(parameters), len(gradients)), values)
    if not seen.detailed:
        data["factors"], data["shrunk"] = [], 1.0  # they are not followed now
    if not seen.busy:
        seen.note_attempt()
    event = seen.note_cheaply("step", data)
    if seen.listener is not None:
        seen.listener.see_gradients(optimizer, event, health)
    return event


def _measure(held: Held, gradients: list[Tensor]) -> Tensor | None:
    """The largest magnitude in each gradient; on a CPU its norm, which takes a fourth of the time."""
    if not gradients or torch._C._len_torch_dispatch_stack():
        return largest_of(gradients)
    if held.plain is None:  # layouts and devices of gradients are looked at once
        held.plain = not any(g.is_sparse or g.device != gradients[0].device or not g.numel() for g in gradients)
    if not held.plain:
        return largest_of(gradients)
    tracked = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        return torch.stack(_foreach_norm(gradients, 2 if gradients[0].device.type == "cpu" else math.inf))
    except RuntimeError:  # a gradient is of another kind than before
        held.plain = False
    finally:
        torch._C._set_grad_enabled(tracked)
    return largest_of(gradients)


def are_weights_finite(weights: list[Tensor]) -> Tensor | bool:
    """Whether no weight is inf or NaN; on a GPU the answer stays there.

    Numerics:
        As in `_judge`: a finite norm leaves no doubt, and for any other the largest magnitudes tell.
    """
    if weights and not any(late.is_far(weight) or weight.is_sparse for weight in weights):
        norms = torch.stack(_foreach_norm([weight.detach() for weight in weights], 2))
        if math.isfinite(norms.sum(dtype=torch.float64).item()):
            return True
    largest = largest_of(weights)
    return True if largest is None else largest.isfinite().all()


def loss_is_finite(seen: Watch) -> bool:
    """Whether the losses of the step under way are finite; waits for the device where they are there."""
    return all(math.isfinite(loss) for loss in seen.step_losses)


def _judge(seen: Watch, sizes: Tensor | None, gradients: list[Tensor]) -> tuple[Any, Tensor | float]:
    """The largest gradients, all of them or one, and numbers that are finite where they and the losses are.

    On a GPU the numbers stay there, and so do the gradients' sizes where all is looked at.

    Numerics:
        A norm that is not finite may have overflowed: then the largest magnitudes tell. A finite one leaves no doubt.
    """
    losses = find_late_losses(seen)
    if losses or (sizes is not None and late.is_far(sizes)):
        known = [loss for loss in seen.step_losses if loss not in losses]
        packed = _pack(sizes, losses, fine=all(math.isfinite(loss) for loss in known))
        wanted = sizes is not None and (seen.detailed or seen.listener is None)
        return (sizes if wanted else []), packed
    found = [] if sizes is None else cast("list[float]", sizes.tolist())
    if not are_finite(found) and not seen.detailed:
        largest = largest_of(gradients)
        found = [] if largest is None else cast("list[float]", largest.tolist())
    fine = are_finite(found)
    return found if seen.detailed or not fine else found[:1], 0.0 if fine and loss_is_finite(seen) else math.nan


def find_late_losses(seen: Watch) -> list[ScaledLoss]:
    """The losses of the step under way that are still on a device."""
    return [loss for loss in seen.step_losses if isinstance(loss, ScaledLoss) and isinstance(loss.value, Tensor)]


def _pack(sizes: Tensor | None, losses: list[ScaledLoss], *, fine: bool) -> Tensor:
    """Numbers on a device as one vector: the losses come last."""
    with Aside():
        tensors = [loss.value.detach().reshape(1) for loss in losses if isinstance(loss.value, Tensor)]
        parts = tensors if sizes is None else [sizes, *tensors]
        parts = [part.to(parts[0].device) for part in parts]
        packed = torch.cat(parts) if len(parts) > 1 else parts[0]
        return packed if fine else packed * math.nan
