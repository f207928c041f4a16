"""Who listens to an optimizer's step, and how torch.compile leaves it alone: torch's names for both are private."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_SHARED = importlib.import_module("torch.optim.optimizer")  # torch.optim does not show it
_SOMEONE = (True,)  # where torch does not tell who listens


def uncompiled(function: FunctionT) -> FunctionT:
    """Keep torch.compile out of a function; torch's own way, which torch.optim uses, does not load the compiler."""
    return getattr(torch, "_disable_dynamo", cast("Any", torch.compiler.disable))(function)


def share_hooks(old: torch.optim.Optimizer, new: torch.optim.Optimizer) -> None:
    """Who listens to the steps of one optimizer listens to those of another; handles remove a hook from both."""
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))


def is_heard(optimizer: torch.optim.Optimizer) -> bool:
    """Whether anyone may listen to the steps of an optimizer: a hook of its own or of all, or the profiler."""
    return bool(
        getattr(optimizer, "_optimizer_step_pre_hooks", _SOMEONE)
        or getattr(optimizer, "_optimizer_step_post_hooks", _SOMEONE)
        or getattr(_SHARED, "_global_optimizer_pre_hooks", _SOMEONE)
        or getattr(_SHARED, "_global_optimizer_post_hooks", _SOMEONE)
        or getattr(torch.autograd, "_profiler_enabled", lambda: True)()
    )
