"""Trace: what every operation of one step did to the numbers, and its file of columns. Plain data, without torch."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from floatline.errors import TraceError

Phase = Literal["forward", "backward", "update", "outside"]
SCHEMA_VERSION = 1

_COUNTS = ("numel", "zeros", "pos_inf", "neg_inf", "nan", "twin_nonfinite", "lost", "blown")
_SIZES = ("largest", "smallest", "twin_largest", "error")
_TEXTS = ("name", "phase", "module", "file", "function", "node")
_NUMBERS = ("line", "forward", "recomputed", "moved", "stuck")
_NONE = -1
_MOST_BYTES = 256 << 20  # unpacked; an operation takes some hundreds


@dataclass(slots=True)
class Values:
    """What one tensor held.

    The last five compare it with its FP32 twin and are None where it has none.

    Args:
        dtype: "float16", "int64", …
        shape: Its shape.
        numel: How many elements it has.
        zeros: Elements that are 0.
        pos_inf: Elements that are +inf.
        neg_inf: Elements that are -inf.
        nan: Elements that are NaN.
        largest: Largest finite magnitude; 0 where there is none.
        smallest: Smallest finite magnitude above 0; inf where there is none.
        twin_largest: Largest finite magnitude of the twin.
        twin_nonfinite: Elements of the twin that are inf or NaN.
        lost: Elements that are 0 here and not in the twin.
        blown: Elements that are inf or NaN here and finite in the twin.
        error: ||x - twin|| / ||twin|| over the elements finite in both; inf where only the twin is all 0. Of integers
            and truth values that were chosen by the size of numbers: the share that FP32 would choose otherwise.
    """

    dtype: str
    shape: tuple[int, ...]
    numel: int
    zeros: int = 0
    pos_inf: int = 0
    neg_inf: int = 0
    nan: int = 0
    largest: float = 0.0
    smallest: float = math.inf
    twin_largest: float | None = None
    twin_nonfinite: int | None = None
    lost: int | None = None
    blown: int | None = None
    error: float | None = None

    @property
    def nonfinite(self) -> int:
        """Elements that are inf or NaN."""
        return self.pos_inf + self.neg_inf + self.nan


@dataclass(slots=True)
class Operand:
    """One tensor that an operation read.

    Args:
        value: What it held when it was read.
        made_by: Index of the operation that last wrote its memory; None: it came from outside the step.
        role: "param:NAME", "buffer:NAME", "inputs[0]", "targets[1]", "grad:NAME", "state:NAME.KEY", or ''.
        shared: Whether another operand of the same operation is the same tensor, as in `x * x`.
    """

    value: Values
    made_by: int | None = None
    role: str = ""
    shared: bool = False


@dataclass(slots=True)
class Op:
    """One operation. Views are none: an operand is traced through them to the operation that made its numbers.

    Args:
        index: Its place in the order of execution.
        name: "aten.mm"; in place: "aten.add_".
        phase: "forward"; "backward"; "update" (inside `optimizer.step`); or "outside" of all three.
        module: Qualified name of the innermost module; '' for the root and for code outside of it.
        file: File of the innermost frame of the user's code; '' where there is none.
        line: Line in it; 0 where there is none.
        function: Function in it.
        inputs: Tensors it read, lists flattened.
        scalars: Python numbers among its arguments, `alpha`, `value`, `min` and `max` included.
        outputs: Tensors it made or wrote to. Empty where it raised.
        node: Name of the autograd node in backward, as "MulBackward0"; else ''.
        forward: In backward, the index of the operation that made the node; module, file and line are its.
        recomputed: Whether it is a forward operation run again in backward by activation checkpointing.
        moved: For sums with a 16-bit result: elements of an operand that the exact sum of what the operation
            read changes; None where it was not counted.
        stuck: Of these, elements that come out unchanged: `a + b == a` while b is not 0. Of two operands, the
            one that stands still the most is counted.
    """

    index: int
    name: str
    phase: Phase
    module: str = ""
    file: str = ""
    line: int = 0
    function: str = ""
    inputs: list[Operand] = field(default_factory=list[Operand])
    scalars: tuple[float, ...] = ()
    outputs: list[Values] = field(default_factory=list[Values])
    node: str = ""
    forward: int | None = None
    recomputed: bool = False
    moved: int | None = None
    stuck: int | None = None


@dataclass(slots=True)
class Trace:
    """The operations of one step, in their order.

    Args:
        ops: The operations.
        gradients: For each parameter with a gradient at the end of the last backward: that gradient
            (still scaled), against its twin. Of a forward pass alone: what it gives, by name.
        meta: What else is known: "twin_failures" and "failures" (operations whose twin could not be computed,
            or that could not be measured, with their count), "exception" (where one raised), "kernels" (results
            beyond their bounds, see `kernel_checks`), "zeroed" (NaN and inf that met a 0, see `zero_products`), and
            what the caller adds, such as "precision", "scale", "step".
        arguments: Of operations in "kernels", by index, what they were called with; not part of the file.
    """

    ops: list[Op] = field(default_factory=list[Op])
    gradients: dict[str, Operand] = field(default_factory=dict[str, Operand])
    meta: dict[str, Any] = field(default_factory=dict[str, Any])
    arguments: dict[int, Any] = field(default_factory=dict[int, Any], compare=False, repr=False)

    def save(self, path: str | Path) -> None:
        """Write the trace as columns (`.npz`, no pickle)."""
        write_trace(Path(path), self.ops, self.gradients, self.meta)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace; raises `TraceError` where the file is none."""
        return cls(*read_trace(Path(path)))


# The file: columns in an `.npz`, strings and the rest in JSON. Nothing in it can run code.

Parts = tuple[list[Op], dict[str, Operand], dict[str, Any]]


def write_trace(path: Path, ops: Sequence[Op], gradients: Mapping[str, Operand], meta: Mapping[str, Any]) -> None:
    """Write the parts of a trace to a file, replacing what was there."""
    values = _Table()
    operands = [*(o for op in ops for o in op.inputs), *gradients.values()]
    rows = [values.row(o.value) for o in operands]
    outputs = [[values.row(v) for v in op.outputs] for op in ops]
    words = _Words()
    columns: dict[str, Any] = {
        **values.columns(words),
        "operand_value": _ints(rows),
        "operand_made_by": _ints([_NONE if o.made_by is None else o.made_by for o in operands]),
        "operand_role": _ints([words.number(o.role) for o in operands]),
        "operand_shared": _ints([int(o.shared) for o in operands]),
        **{f"op_{name}": _ints([words.number(getattr(op, name)) for op in ops]) for name in _TEXTS},
        **{f"op_{name}": _ints([_whole(getattr(op, name)) for op in ops]) for name in _NUMBERS},
        **_ragged("inputs", [[0] * len(op.inputs) for op in ops]),
        **_ragged("outputs", outputs),
        **_ragged("scalars", [list(op.scalars) for op in ops], dtype=np.float64),
    }
    note = {
        "schema": SCHEMA_VERSION,
        "words": words.all,
        "gradients": list(gradients),
        "meta": dict(meta),
    }
    columns["json"] = np.frombuffer(json.dumps(note).encode(), dtype=np.uint8)
    with path.open("wb") as file:
        np.savez_compressed(file, **columns)


def read_trace(path: Path) -> Parts:
    """Read the parts of a trace from a file."""
    try:
        columns = _read_columns(path)
        note = json.loads(columns["json"].tobytes())
        version = note["schema"]
        if version != SCHEMA_VERSION:
            raise TraceError(
                f"'{path}' has schema {version!r:.40}; this floatline reads {SCHEMA_VERSION}. Record it again."
            )
        return _assemble(columns, note)
    except FileNotFoundError:
        raise TraceError(f"There is no trace at '{path}'. Record one with `--trace`.") from None
    except TraceError:
        raise
    # Whatever a damaged or hostile file makes zipfile, zlib and numpy raise; none of it is a fault of this program.
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise TraceError(f"'{path}' is not a trace ({reason}). Record one with `--trace`.") from None


def _read_columns(path: Path) -> dict[str, Any]:
    """The arrays of an `.npz`, none larger than what the file holds of it, all together within bounds."""
    if path.is_file() and path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB")
    columns: dict[str, Any] = {}
    with path.open("rb") if path.is_file() else _refuse(path) as opened, zipfile.ZipFile(opened) as archive:
        members = archive.infolist()
        if sum(member.file_size for member in members) > _MOST_BYTES:
            raise ValueError(f"unpacked it has more than {_MOST_BYTES >> 20} MiB")
        for member in members:
            with archive.open(member) as file:
                columns[member.filename.removesuffix(".npy")] = _read_array(file, member.file_size)
    return columns


def _refuse(path: Path) -> Any:
    raise FileNotFoundError if not path.exists() else ValueError("it is no plain file")


def _read_array(file: Any, size: int) -> Any:
    """A flat array of numbers; numpy would make room for whatever size the header claims."""
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("an array is of another version")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if len(shape) != 1 or dtype.kind not in "iuf" or not 0 <= shape[0] * dtype.itemsize <= size:
        raise ValueError("an array is not as large as it says")
    return np.frombuffer(file.read(shape[0] * dtype.itemsize), dtype=dtype, count=shape[0])


def _assemble(columns: dict[str, Any], note: dict[str, Any]) -> Parts:
    words: list[str] = note["words"]
    if not isinstance(words, list) or not all(isinstance(word, str) for word in [*words, *note["gradients"]]):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError("its words are no texts")
    meta: dict[str, Any] = note["meta"]
    if not isinstance(meta, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError("its notes are no object")
    values = _Table.read(columns, words)
    table: list[list[int]] = [columns[f"operand_{name}"].tolist() for name in ("value", "made_by", "role", "shared")]
    operands = [
        Operand(values[value], None if made_by == _NONE else made_by, words[role], bool(shared))
        for value, made_by, role, shared in zip(table[0], table[1], table[2], table[3], strict=True)
    ]
    inputs, outputs, scalars = (_split(columns, name) for name in ("inputs", "outputs", "scalars"))
    texts: dict[str, list[Any]] = {name: [words[i] for i in columns[f"op_{name}"].tolist()] for name in _TEXTS}
    numbers: dict[str, list[int]] = {name: columns[f"op_{name}"].tolist() for name in _NUMBERS}
    ops: list[Op] = []
    start = 0
    for i in range(len(inputs)):
        op = Op(i, texts["name"][i], texts["phase"][i], scalars=tuple(scalars[i]))
        op.module, op.file, op.function, op.node = (texts[name][i] for name in ("module", "file", "function", "node"))
        op.line, op.recomputed = numbers["line"][i], bool(numbers["recomputed"][i])
        op.forward, op.moved, op.stuck = (
            None if numbers[name][i] == _NONE else numbers[name][i] for name in ("forward", "moved", "stuck")
        )
        op.inputs = operands[start : start + len(inputs[i])]
        op.outputs = [values[row] for row in outputs[i]]
        start += len(inputs[i])
        ops.append(op)
    gradients = dict(zip(note["gradients"], operands[start:], strict=True))
    return ops, gradients, meta


class _Table:
    """The figures of all tensors; those that several operations share stand in it once."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self._all: list[Values] = []

    def row(self, values: Values) -> int:
        if id(values) not in self._rows:
            self._rows[id(values)] = len(self._all)
            self._all.append(values)
        return self._rows[id(values)]

    def columns(self, words: _Words) -> dict[str, Any]:
        return {
            "value_dtype": _ints([words.number(v.dtype) for v in self._all]),
            **{f"value_{name}": _ints([_whole(getattr(v, name)) for v in self._all]) for name in _COUNTS},
            **{f"value_{name}": _floats([getattr(v, name) for v in self._all]) for name in _SIZES},
            **_ragged("shape", [list(v.shape) for v in self._all]),
        }

    @staticmethod
    def read(columns: dict[str, Any], words: list[str]) -> list[Values]:
        shapes = _split(columns, "shape")
        dtypes: list[str] = [words[i] for i in columns["value_dtype"].tolist()]
        counts = [[None if n == _NONE else n for n in columns[f"value_{name}"].tolist()] for name in _COUNTS]
        sizes = [[None if math.isnan(x) else x for x in columns[f"value_{name}"].tolist()] for name in _SIZES]
        names = (*_COUNTS, *_SIZES)
        return [
            Values(dtype, tuple(shape), **dict(zip(names, row, strict=True)))
            for dtype, shape, row in zip(dtypes, shapes, zip(*counts, *sizes, strict=True), strict=True)
        ]


class _Words:
    """Strings, each once, by number."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._known: dict[str, int] = {}

    def number(self, word: str) -> int:
        if word not in self._known:
            self._known[word] = len(self.all)
            self.all.append(word)
        return self._known[word]


def _ints(numbers: Sequence[int]) -> Any:
    return np.array(numbers, dtype=np.int64)


def _floats(numbers: Sequence[float | None]) -> Any:
    return np.array([math.nan if x is None else x for x in numbers], dtype=np.float64)


def _whole(number: int | None) -> int:
    return _NONE if number is None else int(number)


def _ragged(name: str, rows: Sequence[Sequence[Any]], dtype: Any = np.int64) -> dict[str, Any]:
    """Rows of several lengths as their items and their lengths."""
    items = [item for row in rows for item in row]
    return {f"{name}_items": np.array(items, dtype=dtype), f"{name}_lengths": _ints([len(row) for row in rows])}


def _split(columns: dict[str, Any], name: str) -> list[list[Any]]:
    items = columns[f"{name}_items"].tolist()
    rows: list[list[Any]] = []
    start = 0
    for length in columns[f"{name}_lengths"].tolist():
        if not 0 <= length <= len(items) - start:
            raise ValueError(f"its {name} have other lengths than they say")
        rows.append(items[start : start + length])
        start += length
    return rows
