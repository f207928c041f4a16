"""OuterCalls: modules that a script calls compute in a plan's format, whether the script uses autocast or not."""

# torch shows how it reads the arguments of Module.to, and what its engine does, under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from floatline.plans import Plan
from floatline.precision.dtypes import DTYPES, NARROW
from floatline.precision.fp32_call import widen
from floatline.precision.nested import map_tensors
from floatline.probe.watch.patches import Patches

_Call = Callable[..., Any]
# A GPU's autocast computes them in FP32, and lets FP32 inputs meet 16-bit weights; a CPU's raises.
_NORMS = ("layer_norm", "group_norm", "rms_norm", "instance_norm")
_parse_to: _Call = getattr(torch._C, "_nn")._parse_to  # noqa: B009 (its stubs do not know it)


class OuterCalls:
    """Puts a plan's format into force around the outermost calls of modules.

    A script that uses autocast says itself where: its regions get the plan's format. In any other script, each module
    with parameters that is called from outside of all modules runs under autocast, and its 16-bit outputs are widened,
    so that the loss is computed in FP32. Where the script casts a module to 16 bits, it gets the format of the plan's
    weights, FP32 among them, and outputs have the plan's 16 bits, as the script's targets do. What a method other than
    a module's call computes, outside of modules, stays as it is. A script whose only regions lie inside of its modules
    is known by them after its first call.

    Nothing is written into a module: copies of models and files of them stay what they are. A compiled function breaks
    its graph where it calls a module from outside of all modules; `fullgraph` is not insisted on.

    Args:
        plan: Of 16 bits.
        before: Called before an outermost call, with the module.
        wide_loss: Whether what is computed behind a model's outputs is computed in FP32.
    """

    def __init__(self, plan: Plan, before: Callable[[nn.Module], None], *, wide_loss: bool) -> None:
        self._dtype, self._before, self._wide_loss = DTYPES[plan.compute], before, wide_loss
        self._weights = DTYPES[plan.weights]
        self._thread = threading.local()
        self._inside = False  # the same for Dynamo, which cannot read what is a thread's own
        self._own: set[str] = set()  # devices whose autocast this object turned off behind a model
        self._regions: list[set[str]] = []  # the same around each region of autocast that the script is in
        self._narrows = False  # whether the script casts modules itself
        self.script_casts = False

    def patch(self, patches: Patches) -> None:
        """Put it into force."""
        patches.wrap(torch, "compile", self._compiling(patches))
        patches.wrap(nn.Module, "__call__", self._calling)
        patches.wrap(torch.autocast, "__enter__", self._entering)
        patches.wrap(torch.autocast, "__exit__", self._leaving)
        patches.wrap(torch, "set_autocast_dtype", self._naming)
        patches.wrap(torch, "set_autocast_enabled", self._switching)
        patches.wrap(torch, "set_default_dtype", self._defaulting)
        patches.wrap(nn.Module, "half", self._casting)
        patches.wrap(nn.Module, "bfloat16", self._casting)
        patches.wrap(nn.Module, "to", self._moving)
        for name in _NORMS if self._weights in NARROW else ():
            patches.wrap(nn.functional, name, _norming)

    def _defaulting(self, original: _Call) -> _Call:
        def set_default_dtype(dtype: torch.dtype) -> None:
            self._narrows = self._narrows or dtype in NARROW
            original(self._weights if dtype in NARROW else dtype)

        return set_default_dtype

    def _casting(self, _original: _Call) -> _Call:
        def cast(module: nn.Module) -> nn.Module:
            self._narrows = True
            return module.to(self._weights)

        return cast

    def _moving(self, original: _Call) -> _Call:
        def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            device, dtype, wait, layout = _parse_to(*args, **kwargs)
            self._narrows = self._narrows or (dtype in NARROW)
            if dtype not in NARROW or self._weights == dtype:
                return original(module, *args, **kwargs)
            others: dict[str, Any] = {"device": device, "non_blocking": wait, "memory_format": layout}
            return original(module, dtype=self._weights, **{k: v for k, v in others.items() if v is not None})

        return to

    def _naming(self, original: _Call) -> _Call:
        def set_autocast_dtype(device: str, dtype: torch.dtype) -> None:
            original(device, self._dtype if dtype in NARROW else dtype)

        return set_autocast_dtype

    def _entering(self, original: _Call) -> _Call:
        def enter(region: torch.autocast) -> Any:
            if not self._is_own():
                self.script_casts = self.script_casts or (region._enabled and _is_training())
                self._regions.append(set(self._own))
                self._own.clear()
            return original(region)

        return enter

    def _leaving(self, original: _Call) -> _Call:
        def leave(region: torch.autocast, *error: Any) -> Any:
            if not self._is_own():
                self._own = self._regions.pop() if self._regions else set()
            return original(region, *error)

        return leave

    def _switching(self, original: _Call) -> _Call:
        def set_autocast_enabled(*arguments: Any) -> None:  # (device, enabled), or (enabled) in old code
            caller: str = sys._getframe(1).f_globals.get("__name__", "")
            # torch's own calls begin and end regions, and its compiler goes back to what was before.
            if caller.partition(".")[0] not in ("torch", "floatline"):
                self.script_casts = self.script_casts or (arguments[-1] is True and _is_training())
                self._own.clear()
            original(*arguments)

        return set_autocast_enabled

    def _compiling(self, patches: Patches) -> Callable[[_Call], _Call]:
        def wrap(original: _Call) -> _Call:
            def compile_(*args: Any, **kwargs: Any) -> Any:
                if "torch._dynamo" not in sys.modules:
                    patches.lift()  # it keeps how modules are called, as it finds it
                    importlib.import_module("torch._dynamo")
                    patches.put_on()
                # A graph that must be one would not let a call or an FP32 module of it start over.
                return original(*args, **{k: v for k, v in kwargs.items() if k != "fullgraph"})

            return compile_

        return wrap

    def _calling(self, original: _Call) -> _Call:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                # Dynamo reads this. A function that is compiled breaks off where it calls a model.
                return original(module, *args, **kwargs) if self._inside else uncompiled(module, args, kwargs)
            return call_now(module, args, kwargs)

        def call_now(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            device = "" if getattr(self._thread, "inside", False) else self._device_of(module)
            if not device:
                return original(module, *args, **kwargs)
            self._thread.inside = self._inside = True
            try:
                self._before(module)
                return self._call(device, original, module, args, kwargs)
            finally:
                self._thread.inside = self._inside = False

        uncompiled: _Call = getattr(torch, "_disable_dynamo")(call_now, recursive=False)  # noqa: B009
        return call

    def _call(self, device: str, original: _Call, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        enters = device in self._own or not (self.script_casts or torch.is_autocast_enabled(device))
        if not enters:
            result = original(module, *args, **kwargs)
        else:
            with self._autocast(device):
                result = original(module, *args, **kwargs)
        wide = self._wide_loss and module.training
        if wide and torch.is_autocast_enabled(device):
            self._turn_off(device)
        if enters and self._narrows and not wide:
            return map_tensors(self._narrow, result)
        return map_tensors(widen, result) if enters or wide else result

    def _narrow(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.dtype in (torch.float32, *NARROW) else tensor

    def _autocast(self, device: str) -> _OwnAutocast:
        return _OwnAutocast(self._thread, torch.autocast(device, dtype=self._dtype))

    def _turn_off(self, device: str) -> None:
        with _OwnAutocast(self._thread, None):
            torch.set_autocast_enabled(device, False)
        self._own.add(device)

    def _is_own(self) -> bool:
        return getattr(self._thread, "own", False)

    @staticmethod
    def _device_of(module: nn.Module) -> str:
        """The kind of device that it is on; '' for one without parameters, such as a loss."""
        first = next(module.parameters(), None)
        kind = "" if first is None else first.device.type
        return kind if torch.amp.is_autocast_available(kind or "cpu") else ""


class _OwnAutocast:
    """Autocast that this object switches; calls of torch's switches in here are not the script's."""

    def __init__(self, thread: threading.local, autocast: torch.autocast | None) -> None:
        self._thread, self._autocast = thread, autocast

    def __enter__(self) -> None:
        self._thread.own = True
        if self._autocast is not None:
            self._autocast.__enter__()
            self._thread.own = False

    def __exit__(self, *error: Any) -> None:
        self._thread.own = True
        if self._autocast is not None:
            self._autocast.__exit__(*error)
        self._thread.own = False


def _norming(original: _Call) -> _Call:
    def norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002 (torch's name)
        if input.dtype != torch.float32:
            return original(input, *args, **kwargs)
        return original(input, *map_tensors(widen, args), **map_tensors(widen, kwargs))

    return norm


def _is_training() -> bool:
    """Whether autocast is for a forward pass that is trained: not for an evaluation, nor a checkpoint's second run."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
