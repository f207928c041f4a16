"""Change: what a replay of a target does otherwise, to see whether that mends it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from floatline.precision.islands import Line, LineIslands
from floatline.probe.watch.patches import Aside, Patches

_NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Change:
    """One change of a run, applied from outside.

    Args:
        islands: Modules that compute in FP32, by their names in the model that is called.
        lines: Lines of code that are computed in FP32.
        fitting: Lines whose constants are brought within their format.
        loss_factor: In the recorded step, backward begins with this in the place of 1.
        fp32_updates: Whether optimizers update FP32 copies of 16-bit weights, with FP32 states.
    """

    islands: tuple[str, ...] = ()
    lines: tuple[Line, ...] = ()
    fitting: tuple[Line, ...] = ()
    loss_factor: float = 1.0
    fp32_updates: bool = False


@contextlib.contextmanager
def changed(change: Change, *, in_step: Callable[[], bool]) -> Generator[None]:
    """Run what is inside with a change; islands are the caller's, who knows the model.

    Args:
        change: The change.
        in_step: Whether the recorded step is under way: the loss factor is for that one only.
    """
    with contextlib.ExitStack() as stack:
        if change.lines or change.fitting:
            stack.enter_context(LineIslands(change.lines, fitting=change.fitting))
        if change.loss_factor != 1.0:
            stack.enter_context(_scaled_backward(change.loss_factor, in_step))
        if change.fp32_updates:
            stack.enter_context(_fp32_updates())
        yield


@contextlib.contextmanager
def _scaled_backward(factor: float, in_step: Callable[[], bool]) -> Generator[None]:
    patches = Patches()

    def wrap(run: Callable[..., Any]) -> Callable[..., Any]:
        def scaled(outputs: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
            if not in_step():
                return run(outputs, gradients, *args, **kwargs)
            grown = [g * factor if isinstance(g, Tensor) else g for g in gradients]
            return run(outputs, tuple(grown), *args, **kwargs)

        return scaled

    patches.wrap(torch.autograd, "_engine_run_backward", wrap)
    try:
        yield
    finally:
        patches.undo()


@contextlib.contextmanager
def _fp32_updates() -> Generator[None]:
    """Optimizers see FP32 weights and gradients; the model gets them rounded.

    Numerics:
        The FP32 copy of a weight is kept from step to step, so that no update is lost. A weight that the code writes
        to between steps is taken anew.
    """
    masters: dict[int, tuple[Tensor, Tensor]] = {}  # the FP32 copy, and what the model got of it
    widened: list[tuple[Tensor, torch.dtype]] = []

    def before(optimizer: Optimizer, *_: Any) -> None:
        with Aside():
            for parameter in _narrow_weights(optimizer):
                gradient, dtype = parameter.grad, parameter.dtype
                master, given = masters.get(id(parameter), (None, None))
                if master is None or given is None or not torch.equal(given, parameter.data):
                    master = parameter.data.float()
                parameter.grad = None
                parameter.data = master
                parameter.grad = None if gradient is None else gradient.float()
                state = optimizer.state.get(parameter, {})  # some optimizers make it before their first step
                state.update({k: v.float() for k, v in state.items() if isinstance(v, Tensor) and v.dtype in _NARROW})
                widened.append((parameter, dtype))

    def after(*_: Any) -> None:
        with Aside():
            while widened:
                parameter, dtype = widened.pop()
                master, gradient = parameter.data, parameter.grad
                parameter.grad = None
                parameter.data = master.to(dtype)
                parameter.grad = None if gradient is None else gradient.to(dtype)
                masters[id(parameter)] = master, parameter.data.clone()

    hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _narrow_weights(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.dtype in _NARROW]
