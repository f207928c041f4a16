"""SpanRecorder: the exponents of what some operations of a step read, by operation."""

# torch shows its dispatcher to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from floatline.diagnosis.kinds import base_name
from floatline.numerics.ranges import Ranges, measure_ranges
from floatline.probe.aside import Aside
from floatline.probe.schemas import Call
from floatline.probe.trace import Op
from floatline.probe.whereabouts import Whereabouts


class SpanRecorder(TorchDispatchMode):
    """Counts the exponents of the operands of some operations, forward and backward, without changing a bit.

    Args:
        model: Gives modules their names.
        kinds: Names of the operations, such as 'mm'.
    """

    def __init__(self, model: nn.Module, *, kinds: Collection[str]) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._kinds = frozenset(kinds)
        self._whereabouts = Whereabouts(model, on_update=lambda _: None)
        self._found: list[tuple[Op, list[Ranges]]] = []

    def __enter__(self) -> SpanRecorder:
        self._whereabouts.__enter__()
        super().__enter__()  # pyright: ignore[reportUnknownMemberType]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # pyright: ignore[reportUnknownMemberType]
        self._whereabouts.__exit__()

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: tuple[Any, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operation, and count what it reads; torch calls this."""
        del types
        call = Call(func, args, kwargs or {})
        origin = self._whereabouts.locate(tracked=any(a.tensor.requires_grad for a in call.tensors))
        index = len(self._found)
        self._whereabouts.remember(index, origin, in_place=bool(call.schema.writes))
        name = base_name(call.schema.name).removesuffix("_backward")
        if name in self._kinds:
            op = Op(index, call.schema.name, origin.phase, origin.module, origin.file, origin.line, origin.function)
            with Aside():
                self._found.append((op, [measure_ranges(t) for a in call.tensors if _is_measured(t := a.tensor)]))
        return call.run()

    def spans(self) -> list[tuple[Op, list[dict[int, int]]]]:
        """For each operation, how many numbers of each operand lie in [2**k, 2**(k+1)), by k."""
        return [(op, [ranges.exponents for ranges in operands]) for op, operands in self._found]


def _is_measured(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() > 1 and tensor.numel() > 1
