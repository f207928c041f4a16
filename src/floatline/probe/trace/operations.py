"""Op, Operand, Values: one operation of a step and its numbers. Plain data, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["forward", "backward", "update", "outside"]


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
        error: ||x - twin|| / ||twin|| over the elements finite in both; inf where only the twin is all 0.
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
