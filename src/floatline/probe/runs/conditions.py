"""The conditions a target is run under: seeds, path, output, precision, a time limit, and a Change that is tried."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from floatline.numerics.cuda_autocast import gpu_arithmetic
from floatline.precision.dtypes import NARROW
from floatline.precision.islands import Line, LineIslands
from floatline.probe.steps.other_precision import as_bf16, as_fp32
from floatline.probe.watch.patches import Aside, Patches
from floatline.workload import Target

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Change:
    """One change of a run, applied from outside.

    Args:
        islands: Modules that compute in FP32, by their names in the model that is called.
        lines: Lines of code that are computed in FP32.
        fitting: Lines whose constants are brought within their format.
        loss_factor: In the recorded step, backward begins with this instead of 1.
        fp32_updates: Whether optimizers update FP32 copies of 16-bit weights, with FP32 states.
        widens: Whether what the lines write in place becomes FP32 as well.
    """

    islands: tuple[str, ...] = ()
    lines: tuple[Line, ...] = ()
    fitting: tuple[Line, ...] = ()
    loss_factor: float = 1.0
    fp32_updates: bool = False
    widens: bool = False


@contextlib.contextmanager
def changed(change: Change, *, in_step: Callable[[], bool]) -> Generator[None]:
    """Run what is inside with a change; islands are the caller's, who knows the model.

    Args:
        change: The change.
        in_step: Whether the recorded step is under way: the loss factor is for that one only.
    """
    with contextlib.ExitStack() as stack:
        if change.lines or change.fitting:
            stack.enter_context(LineIslands(change.lines, fitting=change.fitting, widens=change.widens))
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
        to between steps is copied again.
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
                state.update({k: v.float() for k, v in state.items() if isinstance(v, Tensor) and v.dtype in NARROW})
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
    return [p for group in optimizer.param_groups for p in group["params"] if p.dtype in NARROW]


class LimitReached(BaseException):
    """The time is up. Not an Exception: the user's loop may catch those."""


@contextlib.contextmanager
def prepared(target: Target, precision: Precision | None, seed: int) -> Generator[None]:
    """Seeds, search path, output and precision, for as long as the user's code runs."""
    set_seeds(seed)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        stack.enter_context(_on_path(str(target.folder)))
        if precision != "fp32":
            stack.enter_context(gpu_arithmetic())
        if precision is not None:
            stack.enter_context(as_fp32() if precision == "fp32" else as_bf16())
        yield


def set_seeds(seed: int) -> None:
    """Seed torch, random, and numpy where it is installed."""
    random.seed(seed)
    torch.manual_seed(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed)  # the user's code may draw from it


@contextlib.contextmanager
def _on_path(folder: str) -> Generator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


@contextlib.contextmanager
def time_limit(seconds: float) -> Generator[Callable[[], None]]:
    """Interrupt a loop that goes on for so long without calling what it gets, on the main thread of a Unix process.

    Elsewhere a loop is interrupted when it calls that too late.
    """
    end = time.monotonic() + seconds
    armed = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")

    def stop(*_: object) -> None:
        raise LimitReached

    def go_on() -> None:
        nonlocal end
        if time.monotonic() > end:
            raise LimitReached
        end = time.monotonic() + seconds
        if armed:
            signal.setitimer(signal.ITIMER_REAL, seconds)

    old = signal.signal(signal.SIGALRM, stop) if armed else None
    try:
        go_on()
        yield go_on
    finally:
        if armed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
