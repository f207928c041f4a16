"""Stopwatch: how long a device works."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Times what runs inside it: on a GPU between two events in its stream, elsewhere by the clock.

    Args:
        device: Where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._began = self._seconds = 0.0

    def __enter__(self) -> Stopwatch:
        if self._events:
            self._events[0].record(torch.cuda.current_stream(self._device))
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._seconds = time.perf_counter() - self._began
        if self._events:
            self._events[1].record(torch.cuda.current_stream(self._device))

    def read(self) -> float:
        """Seconds; waits for the device."""
        if not self._events:
            return self._seconds
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1]) / 1e3
