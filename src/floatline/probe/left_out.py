"""Calls of steps that nobody looks at: kept as they came, and noted later, many at once.

On a CPU, where nothing must be waited for, it is still asked whether losses and gradients are finite; if not, all is
noted at once, and the step is looked at.

A step of tiny kernels runs so much of torch's code between two of these calls that the processor has forgotten the code
which notes them: it takes five times as long there as in a row.
"""

# torch shows its dispatcher to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from floatline.probe import late
from floatline.probe.aside import Aside
from floatline.probe.events import Listener, Watch
from floatline.probe.gradient_scales import Held
from floatline.probe.health import is_fine_nearby, wait_for_losses
from floatline.probe.late import ScaledLoss
from floatline.probe.watch_steps import read_rates


def leave_out_forward(
    seen: Watch, listener: Listener, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """A root module runs."""
    autocast = listener.read_autocast(module) if torch._C._is_any_autocast_enabled() else None
    seen.left_out.append(("forward", seen.step, (module, args, kwargs, autocast)))


def leave_out_backward(seen: Watch, outputs: Any, *, create_graph: bool) -> bool:
    """A backward pass is about to run; whether it could be left out: its loss is finite, or still on a GPU."""
    loss = outputs[0] if len(outputs) == 1 and outputs[0].numel() == 1 else None
    if loss is not None and late.is_far(loss):
        loss = loss.detach()
    else:
        loss = read_loss(outputs, 1.0) if loss is None else loss.item()
        if isinstance(loss, float) and not math.isfinite(loss):
            seen.look_again()
            return False
    seen.left_out.append(("backward", seen.step, (loss, create_graph)))
    return True


def leave_out_step(seen: Watch, optimizer: Optimizer) -> bool:
    """An optimizer steps; whether it could be left out: its gradients are on a GPU, or few and finite."""
    held = seen.scales.find(optimizer)
    far = held.kind == "far"
    if held.described is None or seen.busy or not (far or _is_fine_nearby(held)):
        seen.look_again()
        return False
    seen.left_out.append(("step", seen.step, (held.described[2], read_rates(seen, optimizer), far)))
    seen.num_stepped += 1
    seen.note_attempt()
    return True


def _is_fine_nearby(held: Held) -> bool:
    if torch._C._len_torch_dispatch_stack():
        return False
    groups = held.optimizer.param_groups
    try:
        return is_fine_nearby(held, [g for group in groups for p in group["params"] if (g := p.grad) is not None])
    except RuntimeError:  # a gradient is of another kind than before
        return False


def note_left_out(seen: Watch) -> None:
    """Note all that was left out so far, and tell who listens."""
    calls, seen.left_out = seen.left_out, []
    step, losses = -1, list[ScaledLoss | float]()
    for kind, number, what in calls:
        if number != step:
            step, losses = number, seen.step_losses if number == seen.step else []
        if kind == "forward":
            data = {"root": seen.number(what[0]), "bad_inputs": False, "region": 0}
            event = seen.note_left_out(kind, number, data)
            if seen.listener is not None:
                seen.listener.hold_forward(event, *what)
        elif kind == "backward":
            loss = what[0] if isinstance(what[0], ScaledLoss | float) else read_loss([what[0]], 1.0)
            losses.append(loss)
            seen.note_left_out(kind, number, {"loss": loss, "factor": 1.0, "create_graph": what[1], "region": 0})
        elif kind == "step":
            data, rates, far = what
            event = seen.note_left_out(kind, number, data if data["rates"] == rates else {**data, "rates": rates})
            if seen.listener is not None:
                seen.listener.put_off(event, wait_for_losses(losses, [], looked=False) if far else None)
        else:
            seen.note_left_out(kind, number, what)


def read_loss(outputs: Any, factor: float) -> ScaledLoss | float:
    """What goes backward, without the loss scale: a number on a CPU, else a tensor that nobody waits for."""
    if len(outputs) == 1 and outputs[0].numel() == 1:
        value = outputs[0]
        return ScaledLoss(value.detach(), factor) if late.is_far(value) else value.item() / factor
    with Aside():
        loss: Any = sum(output.detach().double().sum() for output in outputs)
        return ScaledLoss(loss, factor) if late.is_far(loss) else float(loss) / factor
