"""The light watch: what a step has once, for a loop that must not be slowed down."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from floatline.probe.aside import Aside
from floatline.probe.events import Watch
from floatline.probe.frames import NOWHERE
from floatline.probe.gradient_scales import largest_of
from floatline.probe.graphs import find_factor
from floatline.probe.watch_steps import describe_step, open_region

# As it was at import: while a loop is watched, torch's own reports who reads scaled gradients.
_foreach_norm: Any = torch._foreach_norm  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


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


def _read_loss(outputs: Any, factor: float) -> Tensor | float:
    """What goes backward, without the loss scale: a number on a CPU, else a tensor that nobody waits for."""
    if len(outputs) == 1 and outputs[0].numel() == 1:
        if outputs[0].device.type == "cpu":
            return outputs[0].item() / factor
        return outputs[0].detach() if factor == 1.0 else outputs[0].detach().double() / factor
    with Aside():
        loss: Any = sum(output.detach().double().sum() for output in outputs) / factor
        return float(loss) if loss.device.type == "cpu" else loss


def note_light_step(seen: Watch, optimizer: Optimizer) -> None:
    """An optimizer steps: one reduction over its gradients, which is read at once on a CPU and late on a GPU."""
    made = seen.optimizers.get(id(optimizer)) or seen.add_optimizer(optimizer, NOWHERE)
    held = seen.scales.find(optimizer)
    if seen.detailed:
        made = seen.add_optimizer(optimizer, NOWHERE)
        if seen.scales.active:
            seen.scales.look(held)
        seen.leaves |= {id(p): p for p in held.parameters if p.grad is not None}
    values, health = _look(seen, _measure(held.gradients, exactly=seen.detailed))
    data = describe_step(seen, optimizer, made, held, values)
    if not seen.detailed:
        data |= {"factors": [], "shrunk": 1.0}  # they are not followed now
    if not seen.busy:
        seen.note_attempt()
    event = seen.note_cheaply("step", data)
    if seen.listener is not None:
        seen.listener.see_gradients(optimizer, event, health)


def _measure(gradients: list[Tensor], *, exactly: bool) -> Tensor | None:
    """The largest magnitude in each gradient; else its norm, if that is finite, which a CPU computes four times faster.

    Numerics:
        A norm that is not finite may have overflowed: then the largest magnitudes tell. A finite one leaves no doubt.
    """
    plain = gradients and not any(g.is_sparse or g.requires_grad or not g.numel() for g in gradients)
    if exactly or not plain or torch._C._len_torch_dispatch_stack():  # pyright: ignore[reportPrivateUsage]
        return largest_of(gradients)
    on_cpu = all(gradient.device.type == "cpu" for gradient in gradients)
    if not on_cpu and any(gradient.device != gradients[0].device for gradient in gradients):
        return largest_of(gradients)
    norms = torch.stack(_foreach_norm(gradients, 2 if on_cpu else math.inf))
    return largest_of(gradients) if on_cpu and not math.isfinite(norms.sum(dtype=torch.float64)) else norms


def loss_is_finite(seen: Watch) -> bool:
    """Whether the losses of the step under way are finite; waits for the device where they are there."""
    return all(math.isfinite(loss) for loss in seen.step_losses)


def _look(seen: Watch, largest: Tensor | None) -> tuple[Any, Tensor | float]:
    """The largest gradients, all of them or one, and a number that is finite where they and the loss are.

    On a GPU the number stays there, and so do the gradients' sizes where all is looked at.
    """
    if largest is None or largest.device.type == "cpu":
        values = _to_list(largest)
        fine = loss_is_finite(seen) and all(map(math.isfinite, values))
        return (values if seen.detailed or not fine else values[:1]), 0.0 if fine else math.nan
    with Aside():
        health = largest.sum(dtype=torch.float64)
        for loss in seen.step_losses:
            health = health + (loss.sum() if isinstance(loss, Tensor) else loss)
        return (largest if seen.detailed else []), health


def _to_list(sizes: Tensor | None) -> list[float]:
    return [] if sizes is None else cast("list[float]", sizes.tolist())
