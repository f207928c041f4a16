"""The same training code in FP32 or BF16: autocast, scaler and casts overruled for a while; and autocast as it was."""

# torch shows its dispatcher and the scaler's switch to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from floatline.precision.dtypes import NARROW
from floatline.probe.watch.patches import Patches

_HALF = (torch.float16,)
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
        self.restore()
        try:
            yield
        finally:
            torch.clear_autocast_cache()
            now.restore()

    def restore(self) -> None:
        """Go back to it."""
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


@contextlib.contextmanager
def as_fp32() -> Generator[None]:
    """Any training code inside computes in FP32.

    Autocast stays off whatever its arguments, as a context manager, a decorator or under custom_fwd. Every
    GradScaler acts as one that is disabled: its scale is 1 and it skips nothing. Casts to float16 and bfloat16, and
    tensors made in them, give float32; 16-bit tensors that exist already are widened where an operation reads them.

    Numerics:
        A value that the code itself rounds to 16 bits is not rounded. Tensors that were 16-bit before keep their
        rounded values, and stay 16-bit where an operation writes into them.
        Checked by tests/probe/steps/test_precision.py.
    """
    with _overruled(NARROW, torch.float32):
        yield


@contextlib.contextmanager
def as_bf16() -> Generator[None]:
    """Any training code inside computes in BF16 where it would in FP16, without a loss scale.

    Numerics:
        FP16 autocast becomes BF16 autocast; casts to float16 and tensors made in it are bfloat16. FP32 and BF16 stay
        what they are. Checked by tests/probe/steps/test_precision.py.
    """
    with _overruled(_HALF, torch.bfloat16):
        yield


@contextlib.contextmanager
def as_fp16() -> Generator[None]:
    """Any training code inside computes in FP16 where it would in BF16, without a loss scale of its own.

    Numerics:
        As `as_bf16`, the other way round. Checked by tests/probe/steps/test_replay.py.
    """
    with _overruled((torch.bfloat16,), torch.float16):
        yield


@contextlib.contextmanager
def _overruled(old: tuple[torch.dtype, ...], new: torch.dtype) -> Generator[None]:
    patches = Patches()
    # A data descriptor of the class comes before the attribute of an instance: scalers made earlier obey as well.
    patches.set(torch.amp.GradScaler, "_enabled", property(lambda _: False, keep_switch))

    def rename(original: Any) -> Any:
        return lambda *values: original(*(new if value in old else value for value in values))  # pyright: ignore[reportUnknownLambdaType, reportUnknownVariableType]

    patches.wrap(torch, "set_default_dtype", rename)
    if new == torch.float32:
        patches.wrap(torch, "set_autocast_enabled", _never_on)
    else:
        patches.wrap(torch, "set_autocast_dtype", rename)
    before = AutocastState.now()
    try:
        before.restore()  # through the patches
        with _Recast(old, new):
            yield
    finally:
        patches.undo()
        before.restore()


def keep_switch(scaler: Any, value: bool) -> None:
    """Note whether a scaler is asked to be on, and do nothing else."""
    scaler.__dict__["_enabled"] = value


def _never_on(original: Any) -> Any:
    def set_autocast_enabled(*arguments: Any) -> None:  # (device, enabled), or (enabled) in old code
        original(*(False if argument is True else argument for argument in arguments))

    return set_autocast_enabled


class _Recast(TorchDispatchMode):
    """Operations that would make a tensor of an old dtype make one of the new."""

    def __init__(self, old: tuple[torch.dtype, ...], new: torch.dtype) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.old, self.new = old, new

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: tuple[Any, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operation; torch calls this."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.view.dtype:  # bits that are read as a dtype, as from a file, are not a cast
            return func(*args, **kwargs)
        names_old, reads_old = self._scan((*args, *kwargs.values()))
        if names_old:
            args = cast("tuple[Any, ...]", tree_map(self._rename, args))
            kwargs = cast("dict[str, Any]", tree_map(self._rename, kwargs))
        if not reads_old:
            return func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(..., dtype=torch.float16)
            return args[0].to(self.new)
        if func._schema.is_mutable or any(result.alias_info for result in func._schema.returns):
            return func(*args, **kwargs)
        args = cast("tuple[Any, ...]", tree_map(self._widen, args))
        return func(*args, **cast("dict[str, Any]", tree_map(self._widen, kwargs)))

    def _scan(self, values: Iterable[Any]) -> tuple[bool, bool]:
        """Whether an old dtype is among the values, and whether a tensor of one is. Called for every operation."""
        names_old = reads_old = False
        for value in values:
            if isinstance(value, Tensor):
                reads_old = reads_old or value.dtype in self.old
            elif isinstance(value, torch.dtype):
                names_old = names_old or value in self.old
            elif isinstance(value, (list, tuple)):
                inner = cast("Sequence[Any]", value)
                reads_old = reads_old or any(isinstance(item, Tensor) and item.dtype in self.old for item in inner)
        return names_old, reads_old

    def _rename(self, value: Any) -> Any:
        return self.new if isinstance(value, torch.dtype) and value in self.old else value

    def _widen(self, value: Any) -> Any:
        return value.to(self.new) if isinstance(value, Tensor) and value.dtype in self.old else value
