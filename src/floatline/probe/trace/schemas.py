"""What an operation's schema says: what it writes, which arguments are numbers, whether it draws random numbers."""
# torch shows its dispatcher to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._ops import OpOverload

# Memory without meaning: nothing to measure until it is written.
_EMPTY = ("empty", "new_empty", "resize_")
# They only look at a tensor, or hand its value to Python.
_SILENT = ("is_same_size", "_local_scalar_dense", "equal", "is_nonzero", "record_stream", "set_", "item")
# They write their running statistics and do not say so.
_UNDECLARED = {f"{kind}_batch_norm": ("running_mean", "running_var") for kind in ("native", "cudnn", "miopen")}


@dataclass(frozen=True)
class Schema:
    """Facts about one operation.

    Args:
        name: "aten.add_".
        base: "add": the name without namespace and underscore at the end.
        writes: Names of the arguments it writes to.
        outs: Those of them that are `out=` arguments: written without being read.
        numbers: Names of the arguments that hold numbers to calculate with, not dimensions or flags.
        names: Names of the positional arguments.
        random: Whether it draws random numbers.
        silent: Whether it makes no numbers.
        empty: Whether it makes memory without meaning.
        view: Whether it only looks at memory in another way.
        pointwise: Whether it computes each element for itself, without products of matrices.
    """

    name: str
    base: str
    writes: frozenset[str]
    outs: frozenset[str]
    numbers: frozenset[str]
    names: tuple[str, ...]
    random: bool
    silent: bool
    empty: bool
    view: bool
    pointwise: bool


_SCHEMAS: dict[int, tuple[OpOverload[..., Any], Schema]] = {}


def schema_of(func: OpOverload[..., Any]) -> Schema:
    """The facts about an operation, looked up once; by its identity, since torch hashes operations in Python."""
    known = _SCHEMAS.get(id(func))
    if known is None:
        known = _SCHEMAS[id(func)] = (func, _read_schema(func))
    return known[1]


def _read_schema(func: OpOverload[..., Any]) -> Schema:
    schema = func._schema
    arguments = schema.arguments
    namespace, _, name = schema.name.partition("::")
    written = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    base = name.removesuffix("_") if written else name
    returned = [r.alias_info for r in schema.returns]
    return Schema(
        name=f"{namespace}.{name}",
        base=base,
        writes=frozenset((*(a.name for a in written), *_UNDECLARED.get(name, ()))),
        outs=frozenset(a.name for a in written if a.kwarg_only),
        numbers=frozenset(a.name for a in arguments if any(t in str(a.type) for t in ("number", "float", "Tensor"))),
        names=tuple(a.name for a in arguments),
        random=torch.Tag.nondeterministic_seeded in func.tags,
        silent=name in _SILENT,
        empty=name.startswith(_EMPTY),
        view=not written and bool(returned) and all(alias is not None for alias in returned),
        pointwise=torch.Tag.pointwise in func.tags,
    )


class Argument(NamedTuple):
    """One tensor among the arguments: its name and the tensor."""

    name: str
    tensor: Tensor


class TracedCall:
    """One call of an operation.

    Attributes:
        tensors: The tensors among the arguments, lists flattened.
        floats: Those of them that hold floating-point numbers.
        written: Those that the operation changes; `out=` arguments are not read and not among them.
    """

    def __init__(self, func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.schema = schema_of(func)
        self.named: list[tuple[str, Any]] = [*zip(self.schema.names, args, strict=False), *kwargs.items()]
        self.tensors: list[Argument] = []
        for name, value in self.named:
            if isinstance(value, Tensor):
                self.tensors.append(Argument(name, value))
            elif isinstance(value, (list, tuple)):
                self.tensors += [Argument(name, t) for t in tensors_of(value) if t is not None]
        self.floats = [a.tensor for a in self.tensors if has_twin(a.tensor)]
        written = self.schema.writes - self.schema.outs if self.schema.writes else ()
        self.written = [a.tensor for a in self.tensors if a.name in written] if written else []

    def run(self) -> Any:
        """Run the operation."""
        return self.func(*self.args, **self.kwargs)

    def numbers(self) -> tuple[float, ...]:
        """The Python numbers among the arguments."""
        found: list[float] = []
        for name, value in self.named:
            if isinstance(value, Tensor) or name not in self.schema.numbers:
                continue
            several = cast("Sequence[Any]", value) if isinstance(value, (list, tuple)) else (value,)
            found += [float(n) for n in several if isinstance(n, (int, float)) and not isinstance(n, bool)]
        return tuple(found)


_WITH_TWIN = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
)


def has_twin(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers that FP32 would hold otherwise."""
    return tensor.dtype in _WITH_TWIN


def tensors_of(result: Any) -> list[Tensor | None]:
    """The tensors of a result, in order; None for an entry that is no tensor."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (list, tuple)):
        return [tensor for item in result for tensor in tensors_of(item)]  # pyright: ignore[reportUnknownVariableType]
    return [None]


_PREFIXES = ("_foreach_", "_fused_", "_amp_foreach_")


def count_parts(call: TracedCall) -> int:
    """How many tensors an operation treats alike, each for itself; 1 for one that is not over a list."""
    first = call.named[0][1] if call.named else None
    if not call.schema.base.startswith(_PREFIXES) or not isinstance(first, (list, tuple)):
        return 1
    return len(first)  # pyright: ignore[reportUnknownArgumentType]


def find_places(names: Sequence[str], num_parts: int) -> list[int | None]:
    """For each tensor, given the name of its argument, its place in the list; None: it belongs to all of them."""
    if num_parts <= 1:
        return [None] * len(names)
    count, sizes = Counter[str](), Counter(names)
    places: list[int | None] = []
    for name in names:
        places.append(count[name] if sizes[name] == num_parts else None)
        count[name] += 1
    return places
