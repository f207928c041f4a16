"""cuda_on_cpu: code that is written for a GPU runs on the CPU, with a GPU's autocast and 16-bit arithmetic."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _device

from floatline.numerics.cuda_autocast import cuda_autocast_lists
from floatline.numerics.half_on_cpu import HalfOnCPU
from floatline.probe.runs.cuda_functions import patch_cuda_functions
from floatline.probe.watch.patches import Patches

_Call = Callable[..., Any]


@contextlib.contextmanager
def as_cuda() -> Generator[str]:
    """Run what is inside as on a GPU; gives a sentence that says what was done for it.

    On a machine with a GPU nothing is changed.
    """
    if torch.cuda.is_available():
        yield f"--as cuda was not needed: there is a GPU, {torch.cuda.get_device_name()}"
        return
    with cuda_on_cpu():
        yield "--as cuda, without a GPU: cuda is the CPU, with CUDA's autocast lists and a GPU's 16-bit products"


@contextlib.contextmanager
def cuda_on_cpu() -> Generator[None]:
    """Let code that names the device 'cuda' run on the CPU.

    - `torch.autocast("cuda")`, `GradScaler("cuda")` and their older spellings work on CPU tensors. Autocast follows
      CUDA's lists, and its dtype is float16 where none is given, as on a GPU.
    - 16-bit products are computed as `HalfOnCPU` does.
    - Tensors and modules that are made on or sent to 'cuda' are on the CPU. What is sent anywhere by name is a copy,
      as between two devices, so that changing it in place leaves the original alone; only a tensor that requires
      gradients and is sent to 'cuda' stays the one it was, as one that is there already does.
    - `torch.cuda.synchronize` and its like do nothing; `torch.load` puts everything on the CPU.
    - `torch.cuda.is_available()` stays False: code that chooses its device chooses the CPU.

    It holds for the thread that enters it, for threads that are started inside, and for forks of the process.
    """
    patches = Patches()
    try:
        _patch_autocast(patches)
        _patch_devices(patches)
        patch_cuda_functions(patches)
        patches.wrap(threading.Thread, "start", _start_inside)
        with cuda_autocast_lists(), _in_this_thread():
            yield
    finally:
        patches.undo()


@contextlib.contextmanager
def _in_this_thread() -> Generator[None]:
    dtype = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        with HalfOnCPU(), _CudaNamesCPU():
            yield
    finally:
        torch.set_autocast_dtype("cpu", dtype)


def _start_inside(start: _Call) -> _Call:
    def started(thread: threading.Thread) -> None:
        run = thread.run

        def run_inside() -> None:
            with _in_this_thread():
                run()

        thread.run = run_inside
        start(thread)

    return started


class _CudaNamesCPU(TorchFunctionMode):
    """Takes 'cuda' for 'cpu' wherever a call of torch names a device."""

    def __torch_function__(
        self, func: _Call, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make one call; torch calls this."""
        if func in _MOVES:
            return _MOVES[func](*args, **(kwargs or {}))
        if not kwargs:
            return func(*args)
        if _names_cuda(kwargs.get("device")):
            kwargs = kwargs | {"device": "cpu"}
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        return func(*args, **kwargs)


def _names_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _to_cpu(device: Any) -> Any:
    return "cpu" if _names_cuda(device) else device


def _send(x: Any, *args: Any, **kwargs: Any) -> Any:
    device = args[0] if args else kwargs.get("device")
    if not _names_cuda(device) and device != "cpu":  # torch.device('cpu') may be another tensor's, where x is already
        return x.to(*args, **kwargs)
    if len(args) < 4 and not (x.requires_grad and _names_cuda(device)):
        kwargs["copy"] = True
    return x.to("cpu", *args[1:], **kwargs) if args else x.to(**kwargs | {"device": "cpu"})


def _send_to_cuda(x: Tensor, *_: Any, memory_format: Any = torch.preserve_format, **__: Any) -> Tensor:
    return _send(x, "cuda", memory_format=memory_format)


def _send_to_cpu(x: Tensor, memory_format: Any = torch.preserve_format) -> Tensor:
    return _send(x, "cpu", memory_format=memory_format)


def _cast(x: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    return x.type(_without_cuda(dtype), *args, **kwargs)


def _without_cuda(kind: Any) -> Any:
    """'torch.cuda.FloatTensor' as 'torch.FloatTensor'."""
    return kind.replace("torch.cuda.", "torch.") if isinstance(kind, str) else kind


def _pin(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


_MOVES: dict[Any, _Call] = {
    Tensor.to: _send,
    Tensor.cuda: _send_to_cuda,
    Tensor.cpu: _send_to_cpu,
    Tensor.type: _cast,
    Tensor.pin_memory: _pin,
}


def _patch_devices(patches: Patches) -> None:
    """What takes a device, and what a TorchFunctionMode does not see."""
    patches.wrap(nn.Module, "to", _name_cpu(1))
    patches.wrap(torch, "set_default_tensor_type", _name_cpu_types)
    patches.wrap(torch, "load", _load_to_cpu)
    patches.set(torch, "Generator", _make_generators(torch.Generator))
    # What `with torch.device("cuda"):` and torch.set_default_device enter.
    patches.wrap(_device.DeviceContext, "__init__", _name_cpu(1))
    # Tensor.backward is one call of torch: without this, what runs inside it would not be seen.
    patches.wrap(torch.autograd, "_engine_run_backward", _run_inside)


def _name_cpu(place: int, name: str = "device", default: str | None = None) -> Callable[[_Call], _Call]:
    """For calls that take a device at a place, or by name; the default is what they take where none is given."""

    def wrap(call: _Call) -> _Call:
        def called(*args: Any, **kwargs: Any) -> Any:
            if len(args) > place:
                args = (*args[:place], _to_cpu(args[place]), *args[place + 1 :])
            elif name in kwargs or default is not None:
                kwargs[name] = _to_cpu(kwargs.get(name, default))
            return call(*args, **kwargs)

        return called

    return wrap


def _name_cpu_types(change: _Call) -> _Call:
    def changed(kind: Any) -> None:
        change(_without_cuda(kind))

    return changed


def _load_to_cpu(load: _Call) -> _Call:
    def loaded(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        named = isinstance(map_location, (str, torch.device)) and not _names_cuda(map_location)
        return load(f, map_location if named else "cpu", *args, **kwargs)

    return loaded


def _run_inside(run: _Call) -> _Call:
    def running(*args: Any, **kwargs: Any) -> Any:
        with _CudaNamesCPU():
            return run(*args, **kwargs)

    return running


def _make_generators(kind: type[torch.Generator]) -> type:
    class Kind(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, kind)

        def __call__(cls, device: Any = "cpu") -> torch.Generator:
            return kind(_to_cpu(device))

    return Kind("Generator", (), {"__doc__": kind.__doc__, "__module__": kind.__module__})


def _patch_autocast(patches: Patches) -> None:
    """Autocast and scalers of 'cuda' are those of the CPU."""
    patches.wrap(torch.autocast, "__init__", _name_cpu(1, "device_type"))
    patches.wrap(torch.amp.GradScaler, "__init__", _name_cpu(1, default="cuda"))
    for name in ("custom_fwd", "custom_bwd"):
        patches.wrap(torch.amp, name, _name_cpu(1, "device_type"))
    patches.wrap(torch, "is_autocast_enabled", _ask_cpu)
    patches.wrap(torch, "get_autocast_dtype", _name_cpu(0, "device_type"))
    patches.wrap(torch, "set_autocast_enabled", _set_on_cpu)
    patches.wrap(torch, "set_autocast_dtype", _name_cpu(0, "device_type"))
    get_dtype, set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
    patches.set(torch, "get_autocast_gpu_dtype", functools.partial(get_dtype, "cpu"))
    patches.set(torch, "set_autocast_gpu_dtype", functools.partial(set_dtype, "cpu"))


def _ask_cpu(ask: _Call) -> _Call:
    def asked(device_type: str = "cuda") -> bool:
        return ask(_to_cpu(device_type))

    return asked


def _set_on_cpu(change: _Call) -> _Call:
    def changed(*args: Any) -> None:
        # torch.set_autocast_enabled(True), an older spelling, means CUDA.
        change("cpu", *args) if len(args) == 1 else change(_to_cpu(args[0]), *args[1:])

    return changed
