"""What surrounds the user's code while it runs: seeds, search path, output, precision and a time limit."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
from collections.abc import Generator
from typing import Literal

import torch

from floatline.numerics.half_on_cpu import HalfOnCPU
from floatline.probe.steps.other_precision import as_bf16, as_fp32
from floatline.workload import Target

Precision = Literal["fp32", "bf16"]


class LimitReached(BaseException):
    """The time is up. Not an Exception: the user's loop may catch those."""


@contextlib.contextmanager
def prepared(target: Target, precision: Precision | None, seed: int) -> Generator[None]:
    """Seeds, search path, output and precision, for as long as the user's code runs."""
    _sow(seed)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        stack.enter_context(_on_path(str(target.folder)))
        if precision != "fp32":  # what lies on a GPU passes through it
            stack.enter_context(HalfOnCPU())
        if precision is not None:
            stack.enter_context(as_fp32() if precision == "fp32" else as_bf16())
        yield


def _sow(seed: int) -> None:
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
def time_limit(seconds: float) -> Generator[None]:
    """Interrupt a loop that calls nothing we watch, where this is the main thread of a Unix process."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: object) -> None:
        raise LimitReached

    old = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
