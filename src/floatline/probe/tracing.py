"""Whether torch is at work on a program instead of numbers: nothing of the watch may touch its tensors then."""

# torch shows what it traces to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import _symbolic_trace

_functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009 (its stubs do not know it)
_is_functional: Any = getattr(torch, "_is_functional_tensor")  # noqa: B009
_MODES = tuple(
    getattr(torch._C._TorchDispatchModeKey, name)
    for name in ("FAKE", "PROXY", "FUNCTIONAL")
    if hasattr(torch._C._TorchDispatchModeKey, name)
)


def is_tracing() -> bool:
    """Whether Dynamo, AOT autograd, torch.export, a functorch transform, FX or torch.jit is at work on this thread."""
    if torch._C._len_torch_dispatch_stack() and any(torch._C._get_dispatch_mode(mode) is not None for mode in _MODES):
        return True
    return (
        _functorch.peek_interpreter_stack() is not None
        or TracingContext.try_get() is not None
        or torch.compiler.is_compiling()
        or getattr(_symbolic_trace, "_is_fx_tracing_flag", False)
        or bool(torch._C._is_tracing())
    )


def holds_numbers(tensor: Tensor) -> bool:
    """Whether a tensor has numbers that can be looked at: not fake, functional, wrapped by functorch, or meta."""
    return not (
        tensor.is_meta
        or isinstance(tensor, (FakeTensor, FunctionalTensor))
        or _is_functional(tensor)
        or _functorch.is_functorch_wrapped_tensor(tensor)
    )
