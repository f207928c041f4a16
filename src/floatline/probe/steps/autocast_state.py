"""AutocastState: whether autocast is on, in which format and with a cache, by device; to JSON and back."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_FORMATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class AutocastState:
    """Autocast around a step.

    Args:
        devices: Whether it is on and its format, by kind of device.
        cache: Whether casts of weights are kept.
    """

    devices: dict[str, tuple[bool, torch.dtype]]
    cache: bool

    @classmethod
    def now(cls) -> AutocastState:
        """As it is."""
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        devices = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
        return cls(devices, torch.is_autocast_cache_enabled())

    @contextlib.contextmanager
    def replayed(self) -> Generator[None]:
        """Autocast as it was, with a cache of its own: the casts in it are those of other weights."""
        now = AutocastState.now()
        torch.clear_autocast_cache()
        self._set()
        try:
            yield
        finally:
            torch.clear_autocast_cache()
            now._set()

    def _set(self) -> None:
        for kind, (enabled, dtype) in self.devices.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.cache)

    def as_json(self) -> dict[str, Any]:
        """Texts, numbers and lists."""
        devices = {kind: [on, str(dtype).removeprefix("torch.")] for kind, (on, dtype) in self.devices.items()}
        return {"devices": devices, "cache": self.cache}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> AutocastState:
        """What `as_json` was called on, for the devices there are; KeyError or ValueError for anything else."""
        here = cls.now().devices
        known = {kind: (bool(on), _FORMATS[name]) for kind, (on, name) in fields["devices"].items() if kind in here}
        return cls(known, bool(fields["cache"]))
