"""run_script: a script or module runs as Python would run it, watched from inside its process."""

from __future__ import annotations

import contextlib
import math
import runpy
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch

from floatline.base.patched_sources import read_source
from floatline.optim.mesh import local_part
from floatline.precision.user_frames import find_script_line, point_warnings_at_users
from floatline.probe.runs.failures import describe_failure
from floatline.probe.runs.records import OptimizerRecord, RunRecord, fill_record
from floatline.probe.scripts.steps import StepCapture
from floatline.probe.scripts.weight_digest import digest_weights, is_part
from floatline.probe.watch.events import AutocastEvent, BackwardEvent, ForwardEvent, ScalerStepEvent, StepEvent
from floatline.probe.watch.loop import Watch
from floatline.probe.watch.patches import Aside, Patches
from floatline.probe.watch.watch import watch

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def name_precision(record: RunRecord) -> str:
    """'fp16-true' for 16-bit weights, 'fp16-mixed' for autocast or a scaler, else 'fp32'; '' without a model."""
    if record.model is None:
        return ""
    parameters = list(record.model.parameters())
    # Weights that torch.func takes gradients of need not ask for any.
    dtypes = Counter(p.dtype for p in [p for p in parameters if p.requires_grad] or parameters)
    usual = dtypes.most_common(1)[0][0] if dtypes else torch.float32
    if usual in _NAMES:
        return f"{_NAMES[usual]}-true"
    regions = Counter(e.dtype for e in record.of(AutocastEvent) if e.enabled)
    if regions:
        name = regions.most_common(1)[0][0].removeprefix("torch.")
        return {"float16": "fp16-mixed", "bfloat16": "bf16-mixed"}.get(name, f"{name}-mixed")
    return "fp32"


@dataclass
class ScriptRun:
    """What a script did.

    Args:
        record: Of its loop.
        capture: The steps that were recorded.
        exit_code: What the script ends with.
        motion: How far the weights went from their start, against their size; None where it is not known.
        compiled: Whether the script compiles something.
        last_line: The last line that the script wrote to stderr.
        digests: Of what its optimizers trained: when it was first called, and at the end.
    """

    record: RunRecord
    capture: StepCapture
    exit_code: int
    motion: float | None = None
    compiled: bool = False
    last_line: str = ""
    digests: tuple[str, str] = ("", "")


class _EnoughSteps(BaseException):
    """Ends a script that has made as many steps as were asked for."""


@dataclass(frozen=True)
class ScriptEnd:
    """How a script ended.

    Args:
        exit_code: What it ends with.
        error: What it raised, or what it ended for with an exit code; None where it came to its end.
    """

    exit_code: int = 0
    error: BaseException | None = None


def run_prepared(words: list[str], *, begin: Callable[[], None] | None = None) -> ScriptEnd:
    """Run a script in this process; what it raises is printed as Python would.

    Args:
        words: The script's file, or `-m` and a module, and its arguments.
        begin: Called when its code is about to run.
    """
    try:
        run = prepare_script(words)
        if begin is not None:
            begin()
        run()
    except SystemExit as end:
        code = read_exit_code(end)
        return ScriptEnd(code, end.__context__ if code else None)
    except _EnoughSteps:
        return ScriptEnd()
    except KeyboardInterrupt:
        return ScriptEnd(130)
    except BaseException as error:
        kind, trace = type(error), skip_own_frames(error.__traceback__)
        sys.excepthook(kind, error.with_traceback(trace), trace)
        return ScriptEnd(1, error)
    return ScriptEnd()


class _LimitedCapture(StepCapture):
    """Ends the script after a number of steps; None lets it run."""

    def __init__(self, seen: Watch, most: int | None, asked: int | None, planned: Collection[int] | None) -> None:
        super().__init__(seen, asked, planned)
        self._most = most

    def end_step(self, *, late: bool = False) -> None:
        """A step is over."""
        super().end_step(late=late)
        if self._most is not None and self._seen.step + 1 >= self._most:
            raise _EnoughSteps


class ScriptWatch:
    """A script under watch. `run` runs it to its end; `sum_up` says what was seen, at any time.

    Args:
        words: The script's file, or `-m` and a module, and its arguments.
        ends_after: Steps after which the script is ended; None lets it run.
        records: A step that is recorded besides those that always are.
        planned: Steps that are recorded, and no other, whatever is seen; None leaves it to what is seen.
    """

    def __init__(
        self,
        words: list[str],
        *,
        ends_after: int | None = None,
        records: int | None = None,
        planned: Collection[int] | None = None,
    ) -> None:
        self._words, self._ends_after, self._records, self._planned = words, ends_after, records, planned
        self._seen: Watch | None = None
        self._capture: StepCapture | None = None
        self._error: BaseException | None = None
        self._began = time.perf_counter()
        self._last_line = LastLine()
        self.exit_code = 0

    def run(self) -> None:
        """Run the script. What it raises is printed as Python would, and kept."""
        with watch(light=True) as seen, self._last_line:
            self._seen = seen
            self._capture = capture = _LimitedCapture(seen, self._ends_after, self._records, self._planned)
            seen.listener, seen.locate = capture, find_script_line
            try:
                ended = run_prepared(self._words, begin=capture.begin_setup)
                self.exit_code, self._error = ended.exit_code, ended.error
            finally:
                capture.finish()
        sys.stdout.flush()

    def sum_up(self) -> ScriptRun:
        """What was seen so far."""
        seen, capture = self._seen, self._capture
        if seen is None or capture is None:  # a signal before the first line
            seen = Watch(light=True)
            capture = StepCapture(seen)
        capture.finish()
        record = RunRecord(kind="train", entry="", precision="", file=_file_of(self._words))
        if self._error is not None:
            record.exception = describe_failure(self._error, seen)
        seen.settle()
        fill_record(record, seen)
        record.precision = name_precision(record)
        record.optimizers = [_place(made, capture) for made in record.optimizers]
        record.seconds = time.perf_counter() - self._began
        in_model = record.exception is not None and record.exception.in_module
        stopped = record.first_bad_step is None and not in_model and (self.exit_code or _ends_forward(record))
        if stopped or capture.has_untried:
            try:
                if capture.replay_last_forward() and stopped:
                    record.bad_loss = record.num_steps - 1
            except Exception as error:
                capture.errors.append(f"the last forward pass could not be run again: {type(error).__name__}")
        motion = _measure_motion(seen, capture)
        digests = ("", "") if self._planned is None else _digest(seen)
        return ScriptRun(record, capture, self.exit_code, motion, seen.compiled, self._last_line.text, digests)


def _place(made: OptimizerRecord, capture: StepCapture) -> OptimizerRecord:
    """An optimizer; where it stands for lines of the script, at the first of these that a recorded step shows."""
    if not made.by_hand:
        return made
    ops = (op for one in capture.steps for op in one.trace.ops if op.phase == "update" and op.file)
    first = next(ops, None)
    return made if first is None else replace(made, file=first.file, line=first.line)


class LastLine:
    """Keeps the last line that is written to stderr, such as argparse's, while it is entered.

    Attributes:
        text: That line.
    """

    def __init__(self) -> None:
        self.text = ""

    def __enter__(self) -> None:
        self._stream = sys.stderr
        write = self._stream.write

        def keep(text: str) -> int:
            self.text = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), self.text)
            return write(text)

        with contextlib.suppress(AttributeError):  # a stream that lets nobody listen
            self._stream.write = keep  # type: ignore[method-assign]

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(AttributeError):
            del self._stream.write


def _ends_forward(record: RunRecord) -> bool:
    """Whether the script left a step after its forward pass: it may have seen a loss that it did not like."""
    events = record.of(ForwardEvent, BackwardEvent, StepEvent, ScalerStepEvent)
    return bool(events) and isinstance(events[-1], ForwardEvent)


def prepare_script(words: list[str]) -> Callable[[], object]:
    """Set sys.argv and sys.path as Python would; gives what runs the code. Its warnings name its own lines."""
    point_warnings_at_users()
    run = _prepare(words)

    def run_with_groups() -> object:
        patches = Patches()
        if torch.distributed.is_available():
            patches.wrap(torch.distributed, "init_process_group", _keeping_group)
        try:
            return run()
        finally:
            patches.undo()

    return run_with_groups


_GROUPS: list[Any] = []


def _keeping_group(original: Callable[..., None]) -> Callable[..., None]:
    """Keep the group of processes until this one ends.

    Work that it sent off remembers the modes that torch was in, floatline's among them. The group's own thread takes
    the GIL to forget them, and whoever destroys the group holds the GIL and waits for that thread: for ever, where the
    script destroys it right after its last step.
    """

    def begin(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        _GROUPS.append(torch.distributed.group.WORLD)

    return begin


def _prepare(words: list[str]) -> Callable[[], object]:
    safe = getattr(sys.flags, "safe_path", False) or sys.flags.isolated
    if words[0] == "-m":
        sys.argv[:] = ["-m", *words[2:]]
        if not safe:
            sys.path.insert(0, str(Path.cwd()))
        return lambda: runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    sys.argv[:] = words
    if not safe:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
    path = Path(words[0])
    if not path.is_file() or zipfile.is_zipfile(path):  # a folder or archive with a __main__.py
        return lambda: runpy.run_path(words[0], run_name="__main__")
    return lambda: _run_file(path.absolute())


def _run_file(path: Path) -> None:
    """Run a file as Python does: `__file__` and names of its frames are absolute, sys.argv[0] is as it was typed."""
    main = ModuleType("__main__")
    main.__file__ = str(path)
    former, sys.modules["__main__"] = sys.modules["__main__"], main
    try:
        exec(compile(read_source(path), str(path), "exec"), main.__dict__)  # noqa: S102 - it is what the user asked for
    finally:
        sys.modules["__main__"] = former


def _file_of(words: list[str]) -> str:
    return "" if words[0] == "-m" else str(Path(words[0]).resolve())


def read_exit_code(end: SystemExit) -> int:
    """The exit code, as Python takes it from SystemExit."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    sys.stderr.write(f"{end.code}\n")
    return 1


def skip_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first frame on."""
    own = (str(Path(__file__).parents[1]), "runpy", "<frozen runpy>")
    first = trace
    while first is not None and (
        first.tb_frame.f_code.co_filename.startswith(own) or first.tb_frame.f_code.co_filename.endswith("runpy.py")
    ):
        first = first.tb_next
    return first or trace


def _digest(seen: Watch) -> tuple[str, str]:
    """Digests of what optimizers hold, when the modules were first called, and now."""
    held = {id(p): p.detach() for made in seen.optimizers.values() for p in made.parameters if not is_part(p)}
    start, numbered = seen.weights.start, [*enumerate(held.items())]
    before = [(str(number), start[key]) for number, (key, _) in numbered if key in start]
    with Aside():
        return digest_weights(before), digest_weights((str(number), p) for number, (_, p) in numbered)


def _measure_motion(seen: Watch, capture: StepCapture) -> float | None:
    """How far the weights of the optimizers are from their start, against their size; None where it is not known."""
    held = {id(p): local_part(p).detach() for made in seen.optimizers.values() for p in made.parameters}
    if capture.retries.before is not None:
        kept = capture.retries.before
        held |= {id(p): copy for p, copy in zip(kept.tensors, kept.copies, strict=True) if id(p) in held}
    start = seen.weights.start
    pairs = [(start[key].to(p.device).double(), p.double()) for key, p in held.items() if key in start]
    if not pairs:
        return None
    moved = sum(float((new - old).square().sum()) for old, new in pairs)
    size = sum(float(old.square().sum()) for old, _ in pairs)
    return math.sqrt(moved / max(size, 1e-30)) if math.isfinite(moved) else None
