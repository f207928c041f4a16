"""What floatline raises.

FloatlineError
├── FormatError      a number format that does not exist, or a name that fits several
├── PlanError        a plan that cannot be read, or that does not fit the model
├── HardwareError    a device that is not known or not there
├── TargetError      a target that cannot be found, loaded or built
├── CauseError       a cause that is not in the catalogue
├── LintError        a lint setting, rule, path or baseline that cannot be used
├── OptimizerError   an optimizer setting, parameter or checkpoint that cannot be used
├── ScalerError      a loss scaler's setting or state that cannot be used, or FP16 gradients it would lose
├── GuardError       a guard's setting, closure or checkpoint that cannot be used
├── GuardStop        a run that the guard has ended, with its finding: in `findings`
├── TraceError       a trace that cannot be written or read
├── ParityError      two computations that cannot be compared, or a file of log-probs that cannot be read
├── ReplayError      a step that cannot be replayed, or a replay bundle that cannot be written or read
├── FoldError        a model that cannot be folded, or a checkpoint's folder that cannot be read or written
├── RescueError      a rescue's folder or stage that cannot be used
├── LedgerError      a ledger that cannot be written, read or locked, or a record it cannot hold
├── ComparisonError  a comparison's setting, run or result that cannot be used
├── ManifestError    a manifest that cannot be measured, read or written, or that is not what was expected
├── ApprovalError    a sign-off that cannot be given, found, read or written
└── TensorError      a tensor that cannot be measured or rounded

Every message says what is wrong, with the value, then what to do. The command line prints it as one
line and exits with 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FloatlineError(Exception):
    """The root of everything floatline raises on purpose."""


class FormatError(FloatlineError, ValueError):
    """A number format that does not exist, or a name that fits several."""


class PlanError(FloatlineError, ValueError):
    """A plan that cannot be read, or that does not fit the model."""


class HardwareError(FloatlineError, ValueError):
    """A device that is not known or not there."""


class TargetError(FloatlineError):
    """A target that cannot be found, loaded or built."""


class CauseError(FloatlineError, LookupError):
    """A cause that is not in the catalogue."""


class LintError(FloatlineError, ValueError):
    """A lint setting, rule, path or baseline that cannot be used."""


class OptimizerError(FloatlineError, ValueError):
    """An optimizer setting, parameter or checkpoint that cannot be used."""


class ScalerError(FloatlineError, ValueError):
    """A loss scaler's setting or state that cannot be used, or FP16 gradients it would lose."""


class GuardError(FloatlineError, ValueError):
    """A guard's setting, closure or checkpoint that cannot be used."""


class LedgerError(FloatlineError, ValueError):
    """A ledger that cannot be written, read or locked, or a record it cannot hold."""


class TraceError(FloatlineError, ValueError):
    """A trace that cannot be written or read."""


class ComparisonError(FloatlineError, ValueError):
    """A comparison's setting, run or result that cannot be used."""


class ApprovalError(FloatlineError):
    """A sign-off that cannot be given, found, read or written."""


class ManifestError(FloatlineError, AssertionError):
    """A manifest that cannot be measured, read or written, or that is not what was expected."""


class ParityError(FloatlineError, ValueError):
    """Two computations that cannot be compared, or a file of log-probs that cannot be read."""


class ReplayError(FloatlineError, ValueError):
    """A step that cannot be replayed, or a replay bundle that cannot be written or read."""


class FoldError(FloatlineError, ValueError):
    """A model that cannot be folded, or a checkpoint's folder that cannot be read or written."""


class RescueError(FloatlineError, ValueError):
    """A rescue's folder or stage that cannot be used."""


class TensorError(FloatlineError, TypeError):
    """A tensor that cannot be measured or rounded."""


def suggest(wrong: str, known: Iterable[str], *, lists: bool = True) -> str:
    """Say "Did you mean 'a' or 'b'?", three names at most.

    Args:
        wrong: What was written.
        known: What could have been.
        lists: Whether all that is known is listed where nothing is near; else the nearest are.
    """
    known = list(known)
    near = difflib.get_close_matches(wrong, known, n=3, cutoff=0.5)
    if near:
        return f"Did you mean {' or '.join(repr(name) for name in near)}?"
    if lists:
        return f"Known: {', '.join(known)}."
    return f"The nearest of {len(known)}: {', '.join(difflib.get_close_matches(wrong, known, n=3, cutoff=0.0))}."
