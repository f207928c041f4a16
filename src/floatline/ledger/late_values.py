"""Late values: numbers taken from a tensor now and read later, once the device has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeAlias, Union

from floatline.errors import LedgerError

if TYPE_CHECKING:
    from torch import Tensor

Number: TypeAlias = Union[SupportsFloat, "Tensor"]
Vector: TypeAlias = "tuple[Sequence[str], Tensor]"


class LateValues:
    """Named numbers as they are at this moment.

    A CUDA tensor is copied to pinned memory in the order of its stream, behind an event: no host sync here, and
    what the stream writes into the tensor afterwards does not change the copy. `read` waits for the event.
    Tensors of other devices are read at once.

    Numerics:
        Exact: every dtype that fits into a Python float is converted, never rounded again.

    Args:
        numbers: Plain numbers and one-element tensors by name; None is left out.
        vectors: Names and a 1-D tensor with one value for each, copied at once.
    """

    __slots__ = ("_events", "_numbers", "_vectors")

    def __init__(self, numbers: Mapping[str, Number | None], vectors: Sequence[Vector] = ()) -> None:
        devices: set[Any] = set()
        self._numbers = {
            name: _take(name, value, None, devices) for name, value in numbers.items() if value is not None
        }
        self._vectors = [
            (tuple(names), _take(", ".join(names), tensor, len(names), devices)) for names, tensor in vectors
        ]
        self._events = [_record_event(device) for device in devices]

    def read(self) -> dict[str, float]:
        """The numbers by name; waits for the device."""
        for event in self._events:
            event.synchronize()
        values = {name: float(value) for name, value in self._numbers.items()}
        for names, tensor in self._vectors:
            values.update(zip(names, map(float, tensor.tolist()), strict=True))
        return values


def _take(name: str, value: Any, size: int | None, devices: set[Any]) -> Any:
    """The value, held so that nothing done to the tensor later changes it."""
    if not hasattr(value, "detach"):
        if size is not None or isinstance(value, str | bytes):
            raise LedgerError(f"{name} is {value!r:.60}. Give a number or a tensor.")
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            raise LedgerError(f"{name} is {value!r:.60}, which is no float. Give a number or a tensor.") from None
    shape = tuple(value.shape)
    if value.is_complex() or (value.numel() != 1 if size is None else shape != (size,)):
        wanted = "one element" if size is None else f"shape ({size},)"
        raise LedgerError(f"{name} is a {value.dtype} tensor of shape {shape}. Give a real tensor of {wanted}.")
    value = value.detach()
    if value.device.type != "cuda":
        return value.item() if size is None else value.to("cpu", copy=True)
    import torch

    devices.add(value.device)
    host = torch.empty(shape, dtype=value.dtype, device="cpu", pin_memory=True)  # a copy to other memory would wait
    return host.copy_(value, non_blocking=True)


def _record_event(device: Any) -> Any:
    """An event behind everything that the current stream of the device holds."""
    import torch

    # A blocking event puts the reading thread to sleep; the default one spins on a core.
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event
