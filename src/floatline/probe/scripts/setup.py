"""SetupRecorder: what a script computes in 16 bits before it trains: tables, schedules, statistics, cached data."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch._ops import OpOverload

from floatline.probe.trace.recorder import Recorder
from floatline.probe.trace.schemas import tensors_of
from floatline.probe.trace.triton_start import begin_triton
from floatline.probe.trace.twin_rules import LOW
from floatline.probe.watch.patches import is_tracing

# Operations that are recorded, and elements that they may have in all: twins of these take 256 MiB.
_MOST_OPS, _MOST_ELEMENTS = 4096, 2**26


class SetupRecorder(Recorder):
    """Records the operations that make or read 16-bit numbers; others, and those on parameters, run as they are.

    A loop over data may take long: after 4,096 operations or 64 million elements no more is recorded, and
    `trace.meta["left_out"]` counts what was not. `trace.meta["kept"]` holds the operations whose results are alive at
    the end: what training can read. All of it is told as a forward pass, since it leads to one.

    Attributes:
        paused: Whether operations run as they are for now.
    """

    def __init__(self) -> None:
        super().__init__(nn.Module())
        self._elements = self._left_out = 0
        self._meets_gpu = False
        self.paused = False

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: tuple[Any, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operation, and record it where it is of interest; torch calls this."""
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if not self._meets_gpu and "cuda" in str(kwargs.get("device")):
            self._meets_gpu = True
            begin_triton()
        tensors = [t for t in tensors_of([*args, *kwargs.values()]) if t is not None]
        if not self._concerns(tensors, kwargs) or is_tracing():
            return func(*args, **kwargs)
        if self._left_out or len(self.trace.ops) >= _MOST_OPS or self._elements >= _MOST_ELEMENTS:
            self._left_out += 1
            return func(*args, **kwargs)
        self._elements += max((t.numel() for t in tensors), default=0)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _concerns(self, tensors: list[Tensor], kwargs: dict[str, Any]) -> bool:
        if any(isinstance(t, nn.Parameter) for t in tensors):
            return False
        if kwargs.get("dtype") in LOW or any(t.dtype in LOW for t in tensors):
            return True
        known = (self._storages.find(t) for t in tensors if t.is_floating_point())
        return any(memory is not None and memory.twin is not None for memory in known)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.trace.meta["kept"] = self._storages.alive_makers()
        self.trace.meta["left_out"] = self._left_out
        for op in self.trace.ops:
            op.phase = "forward"
