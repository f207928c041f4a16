"""What `torch.cuda` answers on a machine without a GPU, for code that is written for one."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.cuda import nvtx

from floatline.probe.watch.patches import Patches

_NAME = "CPU (as cuda)"
# A GPU with FP16's tensor cores and without BF16's, as `torch.cuda.is_bf16_supported` says here, too.
_CAPABILITY = (7, 5)
_MEMORY = 16 * 2**30
# Where there is one device, whose work is done when a call returns and whose memory nobody counts.
_NOTHING = (
    *("init", "synchronize", "ipc_collect", "set_device", "set_sync_debug_mode", "set_per_process_memory_fraction"),
    *("reset_peak_memory_stats", "reset_accumulated_memory_stats"),
    *("reset_max_memory_allocated", "reset_max_memory_cached"),
)
_RANGES = ("range_push", "range_pop", "range_start", "range_end", "mark")


def patch_cuda_functions(patches: Patches) -> None:
    """Let the functions of `torch.cuda` answer instead of raise; `is_available` keeps its answer, which is False."""
    for name in _NOTHING:
        patches.set(torch.cuda, name, _constant(None))
    for name in _RANGES:
        patches.set(nvtx, name, _constant(0))
    for name, value in _answers().items():
        patches.set(torch.cuda, name, value)
    for name in [name for name in vars(torch.cuda) if name.endswith("Tensor")]:  # FloatTensor and its like
        patches.set(torch.cuda, name, getattr(torch, name))
    patches.set(torch.Tensor, "record_stream", _constant(None))
    patches.set(torch.cuda.device, "__enter__", _constant(None))
    patches.set(torch.cuda.device, "__exit__", _constant(False))


def _answers() -> dict[str, Any]:
    properties = SimpleNamespace(
        name=_NAME, major=_CAPABILITY[0], minor=_CAPABILITY[1], total_memory=_MEMORY, multi_processor_count=1
    )
    return {
        "Event": EventOnCPU,
        "Stream": Stream,
        "current_device": _constant(0),
        "current_stream": Stream,
        "default_stream": Stream,
        "get_device_capability": _constant(_CAPABILITY),
        "get_device_name": _constant(_NAME),
        "get_device_properties": _constant(properties),
        "get_rng_state": lambda *_: torch.get_rng_state(),  # pyright: ignore[reportUnknownLambdaType]
        "get_sync_debug_mode": _constant(0),
        "initial_seed": torch.initial_seed,
        "is_current_stream_capturing": _constant(False),
        "mem_get_info": _constant((_MEMORY, _MEMORY)),
        "memory_summary": _constant(""),
    }


def _constant(value: Any) -> Callable[..., Any]:
    def answer(*_: Any, **__: Any) -> Any:
        return value

    return answer


class EventOnCPU:
    """Stands in for `torch.cuda.Event`: work is done when its call returns, so an event is a point in time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.seconds = 0.0

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        del stream
        self.seconds = time.perf_counter()

    def elapsed_time(self, end_event: EventOnCPU) -> float:
        """Milliseconds to another event."""
        return (end_event.seconds - self.seconds) * 1e3

    def query(self) -> bool:
        """Whether it has happened."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Nothing is left to wait for."""

    def synchronize(self) -> None:
        """Nothing is left to wait for."""


class Stream:
    """Stands in for `torch.cuda.Stream`: calls are made in their order, one after the other."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")
        self.cuda_stream = 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def record_event(self, event: EventOnCPU | None = None) -> EventOnCPU:
        """An event that happened now."""
        event = event or EventOnCPU()
        event.record()
        return event

    def query(self) -> bool:
        """Whether all work is done."""
        return True

    def synchronize(self) -> None:
        """Nothing is left to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing is left to wait for."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing is left to wait for."""
