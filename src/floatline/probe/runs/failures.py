"""Failure: the exception that ended a run, with the user's line, the module and the operation it came from."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from torch._ops import OpOverload

from floatline.precision.user_frames import find_raiser, find_raising_line, find_wording
from floatline.probe.watch.loop import Watch


@dataclass(frozen=True, slots=True)
class Failure:
    """What the user would have seen.

    Args:
        kind: Name of the exception's class.
        message: Its text.
        file: The user's innermost source file in the traceback; '' where there is none.
        line: Line in it.
        function: Function it is in.
        module: Qualified name of the innermost module that was running; '' is the root, or none.
        in_module: Whether a module was running at all.
        in_backward: Whether a backward pass was running.
        op: The operation that raised, such as 'aten.mm'; '' where it is not known.
        in_disabled_region: Whether it came from inside autocast(enabled=False), within an enabled region.
        step: Number of the step, from 0.
    """

    kind: str
    message: str
    file: str
    line: int
    function: str
    module: str
    in_module: bool
    in_backward: bool
    op: str
    in_disabled_region: bool
    step: int


def describe_failure(error: BaseException, seen: Watch) -> Failure:
    """Put together what the traceback and the watch know about an exception."""
    module = seen.modules.failed[1] if seen.modules.failed and seen.modules.failed[0] is error else None
    # A model of a package may be at fault itself; a loop of one does what the script told it.
    spot = (find_raising_line if module is None else find_raiser)(error.__traceback__)
    worded = find_wording(error.__traceback__, str(error))
    spot = worded if worded.file else spot
    region = seen.regions.failed if seen.regions.failed and seen.regions.failed[0] is error else None
    return Failure(
        kind=type(error).__name__,
        message=str(error),
        file=spot.file,
        line=spot.line,
        function=spot.function,
        module=module or "",
        in_module=module is not None,
        in_backward=_passes_through(error.__traceback__, "_engine_run_backward"),
        op=_find_op(error.__traceback__),
        in_disabled_region=region is not None and not region[1] and region[2],
        step=seen.step,
    )


def _passes_through(trace: TracebackType | None, function: str) -> bool:
    while trace is not None:
        if trace.tb_frame.f_code.co_name == function:
            return True
        trace = trace.tb_next
    return False


def _find_op(trace: TracebackType | None) -> str:
    """The innermost operation that a dispatch mode was running when it raised."""
    found = ""
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "__torch_dispatch__":
            func = trace.tb_frame.f_locals.get("func")
            if isinstance(func, OpOverload):
                found = str(func.overloadpacket)
        trace = trace.tb_next
    return found
