"""Arithmetic: how forward and backward passes of a plan compute, also on a CPU."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator
from typing import Any

import torch

from floatline.numerics.cuda_autocast import cuda_autocast_lists
from floatline.numerics.half_on_cpu import HalfOnCPU
from floatline.plans import Plan
from floatline.precision.dtypes import DTYPES
from floatline.precision.nested import map_tensors


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

    @property
    def _emulated(self) -> bool:
        return self._device.type == "cpu" and self._plan.compute != "fp32"

    def begin(self, device: torch.device) -> None:
        """Compute on this device from here on."""
        self.end()
        self._device = device
        if self._emulated:
            lists = contextlib.ExitStack()
            lists.enter_context(cuda_autocast_lists())
            # They are one for the process, and a Fabric loop may end without a word.
            self._lists = weakref.finalize(self, lists.close)

    def end(self) -> None:
        """Give the process its own lists back."""
        lists, self._lists = self._lists, None
        if lists is not None:
            lists()

    @contextlib.contextmanager
    def products(self) -> Generator[None]:
        """Around everything that multiplies; may be entered again inside."""
        if not self._emulated or self._depth:
            yield
            return
        self._depth += 1
        try:
            with HalfOnCPU():
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


def convert(data: Any, dtype: torch.dtype | None) -> Any:
    """The same structure with floating-point tensors in the dtype; None leaves it as it is."""
    if dtype is None:
        return data
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, data)
