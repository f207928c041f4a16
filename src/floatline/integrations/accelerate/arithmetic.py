"""16 bits on a CPU as on a GPU, for a model whose forward pass a framework calls; and inputs of the weights' dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any, cast

import torch
from torch import Tensor, nn

from floatline.numerics.cuda_autocast import cuda_autocast_lists
from floatline.numerics.half_on_cpu import HalfOnCPU
from floatline.plans import Plan
from floatline.precision.dtypes import DTYPES
from floatline.precision.nested import map_tensors


def needs_emulation(device: torch.device, plan: Plan) -> bool:
    """Whether 16-bit products of this plan would run on a CPU."""
    return device.type == "cpu" and plan.compute != "fp32"


@contextlib.contextmanager
def products(device: torch.device, plan: Plan) -> Generator[None]:
    """On a CPU: 16-bit products as a GPU computes them. Nothing elsewhere."""
    if not needs_emulation(device, plan):
        yield
        return
    with HalfOnCPU():
        yield


@contextlib.contextmanager
def autocast_lists(device: torch.device, plan: Plan) -> Generator[None]:
    """On a CPU: CUDA's autocast lists, for the whole process; entering takes a tenth of a second. Nothing elsewhere."""
    if not needs_emulation(device, plan):
        yield
        return
    with cuda_autocast_lists():
        yield


class ForwardHooks:
    """Around every forward pass of a model: 16-bit products on a CPU, and inputs of the dtype the weights have.

    Hooks, and not another `forward`, because frameworks put theirs there and look for the original.

    Args:
        model: The model, not wrapped.
        device: Where it trains.
        plan: Its weights and compute.
    """

    def __init__(self, model: nn.Module, device: torch.device, plan: Plan) -> None:
        self._device, self._plan = device, plan
        self._entered: list[contextlib.ExitStack] = []
        self._dtype = None if plan.mixed or plan.weights == "fp32" else DTYPES[plan.weights]
        self._handles: list[Any] = []
        if self._dtype is not None:
            self._handles.append(model.register_forward_pre_hook(self._cast, with_kwargs=True))
        if needs_emulation(device, plan):
            self._handles.append(model.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(model.register_forward_hook(self._leave, always_call=True))

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, _module: nn.Module, _args: Any, _kwargs: Any) -> None:
        stack = contextlib.ExitStack()
        stack.enter_context(products(self._device, self._plan))
        self._entered.append(stack)

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._entered.pop().close()

    def _cast(self, _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def narrow(tensor: Tensor) -> Tensor:
            return tensor.to(self._dtype) if tensor.dtype == torch.float32 else tensor

        return cast("tuple[Any, Any]", map_tensors(narrow, (args, kwargs)))
