"""Half arithmetic around a framework's forward passes: autocast and dtypes of a plan, on a CPU as a GPU computes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator
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


def products(device: torch.device, plan: Plan) -> contextlib.AbstractContextManager[Any]:
    """On a CPU: 16-bit products as a GPU computes them. Nothing elsewhere."""
    return HalfOnCPU() if needs_emulation(device, plan) else contextlib.nullcontext()


def autocast_lists(device: torch.device, plan: Plan) -> contextlib.AbstractContextManager[Any]:
    """On a CPU: CUDA's autocast lists, for the whole process; entering takes a tenth of a second. Nothing elsewhere."""
    return cuda_autocast_lists() if needs_emulation(device, plan) else contextlib.nullcontext()


def keep_autocast_lists(owner: object, device: torch.device, plan: Plan) -> Callable[[], Any]:
    """Take the lists until the function that this returns is called, or nobody holds the owner any more."""
    stack = contextlib.ExitStack()
    stack.enter_context(autocast_lists(device, plan))
    # The lists belong to the whole process, and a loop or a script may end without closing anything.
    return weakref.finalize(owner, stack.close)


def convert(data: Any, dtype: torch.dtype | None) -> Any:
    """The same structure with floating-point tensors in the dtype; None leaves it as it is."""
    if dtype is None:
        return data
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, data)


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


class Arithmetic:
    """Autocast and dtypes of a plan; on a CPU 16-bit products as a GPU computes them, with CUDA's autocast lists.

    Args:
        plan: The plan that the run begins with.
        cache_casts: Let autocast keep casted weights for the length of a forward pass.
    """

    def __init__(self, plan: Plan, *, cache_casts: bool) -> None:
        self._plan = plan
        self._cache_casts = cache_casts
        self._device = torch.device("cpu")
        self._depth = 0
        self._lists: Callable[[], Any] | None = None

    @property
    def dtype(self) -> torch.dtype | None:
        """Format of weights and inputs, where it is not FP32."""
        return None if self._plan.weights == "fp32" else DTYPES[self._plan.weights]

    def begin(self, device: torch.device) -> None:
        """Compute on this device from here on."""
        self.end()
        self._device = device
        self._lists = keep_autocast_lists(self, device, self._plan)

    def end(self) -> None:
        """Give the process its own lists back."""
        lists, self._lists = self._lists, None
        if lists is not None:
            lists()

    @contextlib.contextmanager
    def products(self) -> Generator[None]:
        """Around everything that multiplies; may be entered again inside."""
        if self._depth:
            yield
            return
        self._depth += 1
        try:
            with products(self._device, self._plan):
                yield
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def forward(self, plan: Plan) -> Generator[None]:
        """Around a forward pass: autocast, or the weights' dtype for tensors that are made inside.

        Args:
            plan: The one that the run has now; precision may have been raised on the way.
        """
        with self.products():
            if plan.compute in ("fp32", plan.weights):
                with self.defaults():
                    yield
                return
            with torch.autocast(self._device.type, dtype=DTYPES[plan.compute], cache_enabled=self._cache_casts):
                yield

    @contextlib.contextmanager
    def defaults(self) -> Generator[None]:
        """Make tensors in the format of the weights."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype or before)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
