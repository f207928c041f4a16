"""One record of the ledger: its fields and their checks, numbers read late, and its line in JSON and back."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, SupportsFloat, SupportsIndex, TypeAlias, Union, cast

from floatline.base.json_values import decode_number, encode_number
from floatline.errors import LedgerError, suggest

if TYPE_CHECKING:
    from torch import Tensor


SCHEMA = 1
MAX_LINE = 4 << 20  # bytes; room for the norms of 40,000 layers

REASONS = ("overflow", "forward-nonfinite", "outlier", "requested")
"""Why a step was not applied. A reason that is read late is its place here, counted from 1; 0 is 'applied'."""

EVENTS = {
    "rollback": True,
    "escalation": True,
    "stop": True,
    "lr-cut": True,
    "regime-change": True,
    "diagnosis": True,
    "evaluation": False,
    "scale-change": False,
    "note": False,
}
"""What can happen besides steps, and whether its line is synced to the disk at once."""

COUNTS = {
    "epoch": "epoch, as the caller counts it",
    "batch": "batch within the epoch, as the caller counts it",
    "micro_batches": "batches whose gradients were summed into this step",
}
NUMBERS = {
    "loss": "unscaled loss as it was: never masked, NaN stays NaN",
    "scale": "loss scale this step used",
    "grad_norm": "global norm of the unscaled gradients, before clipping",
    "lost_share": "share of gradient elements that rounded to zero, 0 to 1",
    "lr": "learning rate of the first parameter group",
    "loss_score": "outlier score of the loss",
    "norm_score": "outlier score of the gradient norm",
}
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, slots=True)
class Step:
    """One attempted step."""

    attempt: int
    time: float
    applied: bool
    reason: str | None = None
    cause: str | None = None
    counts: dict[str, int] = field(default_factory=dict[str, int])
    numbers: dict[str, float] = field(default_factory=dict[str, float])
    layer_norms: dict[str, float] | None = None
    ranks: tuple[int, ...] = ()


TO_FIND = ". To find the cause: "
"""In the message of an event: what follows is a command, and what is before it says where steps fail."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened besides a step; `attempt` is the last step before it."""

    event: str
    attempt: int
    time: float
    message: str = ""
    epoch: int | None = None
    batch: int | None = None
    values: dict[str, float] = field(default_factory=dict[str, float])

    def __str__(self) -> str:
        """One line, safe for a terminal whatever the message holds."""
        place = [
            f"{name} {value}" for name, value in (("epoch", self.epoch), ("batch", self.batch)) if value is not None
        ]
        values = [f"{name} {value:g}" for name, value in self.values.items()]
        text = f"{self.event} after step {self.attempt:,}"
        text += f" ({', '.join(place)})" if place else ""
        text += f": {self.message}" if self.message else ""
        if self.event == "stop" and self.message.startswith("Stopped at step"):
            text = self.message  # it has the place
        text += f" [{', '.join(values)}]" if values else ""
        return "".join(letter if letter.isprintable() else " " for letter in text[:300])


@dataclass(frozen=True, slots=True)
class Mark:
    """Where writing ended in order ('end'), or began again ('resume') after `dropped_bytes` of a torn line."""

    kind: str
    time: float
    dropped_bytes: int = 0


Record = Step | Event | Mark


def encode_line(fields: dict[str, Any]) -> bytes:
    """One JSON line, newline included; ValueError where it would be too long to read back."""
    line = _ENCODER.encode(fields).encode() + b"\n"
    if len(line) > MAX_LINE:
        raise ValueError(f"its line would have {len(line):,} bytes, and {MAX_LINE:,} is the limit")
    return line


def decode_line(line: bytes) -> dict[str, Any]:
    """The fields of one line; ValueError where it is not a JSON object."""
    try:
        fields = json.loads(line, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    return cast("dict[str, Any]", fields)


def encode_record(record: Record) -> dict[str, Any]:
    """The fields of a line; what is not known has no field."""
    if isinstance(record, Mark):
        fields: dict[str, Any] = {"kind": record.kind, "time": record.time}
        return fields if record.kind == "end" else {**fields, "dropped_bytes": record.dropped_bytes}
    if isinstance(record, Event):
        fields = {"kind": "event", "event": record.event, "attempt": record.attempt, "time": record.time}
        optional = {"message": record.message or None, "epoch": record.epoch, "batch": record.batch}
        fields |= {name: value for name, value in optional.items() if value is not None}
        return {**fields, "values": _encode_numbers(record.values)} if record.values else fields
    fields = {"kind": "step", "attempt": record.attempt, "time": record.time, "applied": record.applied}
    fields |= {name: text for name, text in (("reason", record.reason), ("cause", record.cause)) if text is not None}
    fields |= record.counts
    if record.ranks:
        fields["ranks"] = list(record.ranks)
    fields |= _encode_numbers(record.numbers)
    return fields if record.layer_norms is None else {**fields, "layer_norms": _encode_numbers(record.layer_norms)}


def decode_record(fields: dict[str, Any]) -> Record:
    """What `encode_record` was given; ValueError for a line that it never writes."""
    left = dict(fields)
    kind = left.pop("kind", None)
    time = decode_number(left.pop("time", None))
    if kind == "step":
        record = _decode_step(left, time)
    elif kind == "event":
        record = _decode_event(left, time)
    elif kind == "resume":
        record = Mark(kind, time, take_count(left, "dropped_bytes"))
    elif kind == "end":
        record = Mark(kind, time)
    else:
        raise ValueError(f"the kind of the line is {kind!r:.40}, not step, event, resume or end")
    if left:
        raise ValueError(f"unknown field {next(iter(left))!r:.40}")
    return record


def take_count(fields: dict[str, Any], name: str) -> int:
    """Remove and return a whole number; ValueError where it is none."""
    value = fields.pop(name, None)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r:.40}, not a whole number")
    return value


def take_numbers(fields: dict[str, Any], name: str) -> dict[str, float]:
    """Remove and return an object of numbers; ValueError where it is none."""
    values = fields.pop(name)
    if not isinstance(values, dict):
        raise ValueError(f"{name} is not an object")
    return {key: decode_number(value) for key, value in cast("dict[str, Any]", values).items()}


def _decode_step(left: dict[str, Any], time: float) -> Step:
    """A step line; the fields that it knows are removed from `left`."""
    attempt = take_count(left, "attempt")
    applied, reason, cause = left.pop("applied", None), left.pop("reason", None), left.pop("cause", None)
    if not isinstance(applied, bool) or (reason not in REASONS if not applied else reason is not None):
        raise ValueError(f"applied is {applied!r:.40} and the reason {reason!r:.40}, which do not fit")
    if cause is not None and not isinstance(cause, str):
        raise ValueError(f"the cause is {cause!r:.40}, not a text")
    counts = {name: take_count(left, name) for name in COUNTS if name in left}
    numbers = {name: decode_number(left.pop(name)) for name in NUMBERS if name in left}
    layer_norms = take_numbers(left, "layer_norms") if "layer_norms" in left else None
    return Step(attempt, time, applied, reason, cause, counts, numbers, layer_norms, _take_ranks(left))


def _take_ranks(fields: dict[str, Any]) -> tuple[int, ...]:
    """Remove and return the processes for which a step was skipped; ValueError where they are none."""
    ranks = fields.pop("ranks", [])
    if not isinstance(ranks, list) or any(type(rank) is not int or rank < 0 for rank in cast("list[Any]", ranks)):
        raise ValueError(f"ranks is {ranks!r:.40}, not a list of numbers")
    return tuple(cast("list[int]", ranks))


def _decode_event(left: dict[str, Any], time: float) -> Event:
    """An event line; the fields that it knows are removed from `left`."""
    event, message = left.pop("event", None), left.pop("message", "")
    if not isinstance(event, str) or event not in EVENTS:
        raise ValueError(f"unknown event {event!r:.40}")
    if not isinstance(message, str):
        raise ValueError(f"the message is {message!r:.40}, not a text")
    attempt = take_count(left, "attempt")
    epoch, batch = (take_count(left, name) if name in left else None for name in ("epoch", "batch"))
    values = take_numbers(left, "values") if "values" in left else {}
    return Event(event, attempt, time, message, epoch, batch, values)


def _encode_numbers(values: dict[str, float]) -> dict[str, float | str]:
    return {name: encode_number(value) for name, value in values.items()}


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def take_outcome(
    applied: bool | Tensor | None,
    reason: str | Tensor | None,
    late: Any,
    numbers: dict[str, Number | None],
) -> str | None:
    """The reason that is known now; tensors join the numbers. LedgerError where the two do not fit."""
    if reason is not None and not isinstance(reason, str):
        if applied is not None:
            raise LedgerError("A reason that is a tensor already says whether the step was applied. Leave out applied.")
        numbers["reason"] = reason
        return None
    if reason is not None and reason not in REASONS:
        raise LedgerError(f"Reason {reason!r} is not known. {suggest(reason, REASONS)}")
    if "reason" in late:
        return None
    decided = applied is None or isinstance(applied, bool)
    if applied is not None and not isinstance(applied, bool):
        numbers["applied"] = applied
    if (applied is False or not decided or "applied" in late) and reason is None:
        raise LedgerError(f"A step that may not be applied needs a reason. Known: {', '.join(REASONS)}.")
    if applied is True and reason is not None:
        raise LedgerError(f"A step that was applied has no reason, and {reason!r} was given. Leave out one of them.")
    return reason


def check_packed(names: Any, numbers: Mapping[str, object], applied: object, reason: object) -> None:
    """Every packed name is known and given once."""
    for name in names:
        if name not in NUMBERS and name not in ("applied", "reason"):
            raise LedgerError(f"Packed value {name!r} is not known. {suggest(name, [*NUMBERS, 'applied', 'reason'])}")
        if numbers.get(name) is not None or list(names).count(name) > 1:
            raise LedgerError(f"{name} is given twice. Give it once.")
    if applied is not None and ("applied" in names or "reason" in names):
        raise LedgerError("Whether the step was applied is given twice. Leave out applied, or the packed value.")
    if "reason" in names and (reason is not None or "applied" in names):
        raise LedgerError("The reason is given twice. A packed reason says whether the step was applied, too.")


def whole(name: str, value: object) -> int:
    """A count; LedgerError for anything else."""
    # Not a tensor: turning it into an int would wait for the device.
    if isinstance(value, bool) or hasattr(value, "detach") or not isinstance(value, SupportsIndex):
        raise LedgerError(f"{name} is {value!r:.60}. Give a whole number.")
    return operator.index(value)


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
