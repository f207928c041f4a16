"""Calls of steps that nobody looks at: kept as they came, and noted later, many at once.

A step of tiny kernels runs so much of torch's code between two of these calls that the processor has forgotten the code
which notes them: it takes five times as long there as in a row.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from floatline.probe import late
from floatline.probe.aside import Aside
from floatline.probe.events import Listener, Watch
from floatline.probe.health import wait_for_losses
from floatline.probe.late import ScaledLoss
from floatline.probe.watch_steps import read_rates


def leave_out_forward(
    seen: Watch, listener: Listener, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """A root module runs."""
    seen.left_out.append(("forward", seen.step, (module, args, kwargs, listener.read_autocast(module))))


def leave_out_backward(seen: Watch, outputs: Any, *, create_graph: bool) -> None:
    """A backward pass is about to run."""
    single = len(outputs) == 1 and outputs[0].numel() == 1
    loss = outputs[0].detach() if single else read_loss(outputs, 1.0)
    seen.left_out.append(("backward", seen.step, (loss, create_graph)))


def leave_out_step(seen: Watch, optimizer: Optimizer) -> bool:
    """An optimizer steps; whether it could be left out: its gradients lie on a GPU, as in the steps before."""
    held = seen.scales.find(optimizer)
    if held.kind != "far" or held.described is None or seen.busy:
        seen.look_again()
        return False
    seen.left_out.append(("step", seen.step, (held.described[2], read_rates(seen, optimizer))))
    seen.num_stepped += 1
    seen.note_attempt()
    return True


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
            data, rates = what
            event = seen.note_left_out(kind, number, data if data["rates"] == rates else {**data, "rates": rates})
            if seen.listener is not None:
                seen.listener.put_off(event, wait_for_losses(losses, [], looked=False))
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
