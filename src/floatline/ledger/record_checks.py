"""What a record may say: checks on the training thread, before anything is taken."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex

from floatline.errors import LedgerError, suggest
from floatline.ledger.lines import NUMBERS, REASONS

if TYPE_CHECKING:
    from torch import Tensor

    from floatline.ledger.late_values import Number


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
