"""uncompiled: keeps torch.compile out of a function, and does not load the compiler for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def uncompiled(function: FunctionT) -> FunctionT:
    """The function as torch.compile leaves it alone; torch's own way, which torch.optim uses, where there is one.

    `torch.compiler.disable` loads the compiler where it decorates: half of what importing a guard took.
    """
    return getattr(torch, "_disable_dynamo", cast("Any", torch.compiler.disable))(function)
