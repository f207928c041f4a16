"""find_island: the smallest set of modules that must compute in FP32, found on replays of captured steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from floatline.diagnosis.islands.errors import Tolerance, name_end
from floatline.diagnosis.islands.island import Island, LineAlternative, Member
from floatline.diagnosis.islands.judge import BudgetUsed, ErrorSpread, IslandJudge, find_update_fault
from floatline.diagnosis.islands.log import SearchLog
from floatline.diagnosis.islands.module_sets import ModuleTree, covers, is_inside, minimize
from floatline.diagnosis.islands.suspects import Suspect, count_operations, find_suspects, narrow_operations
from floatline.errors import ReplayError
from floatline.plans.plan import name_all_modules
from floatline.precision.islands import Line
from floatline.probe.steps.capture import CapturedStep
from floatline.probe.steps.captured_forward import CapturedForward
from floatline.probe.trace.trace import Trace

__all__ = ["Island", "Tolerance", "find_island"]

# So many modules are added one after the other by what the trace shows, before the search bisects.
_MOST_GUIDED = 6
# So many lines are tried alone, and so many together are still a place in the code.
_MOST_ALONE = 8
_MOST_TOGETHER = 12


def find_island(
    steps: Sequence[CapturedStep],
    *,
    tolerance: Tolerance | None = None,
    budget: float = 180.0,
    on_progress: Callable[[str], None] | None = None,
    folder: str | Path | None = None,
    spread: ErrorSpread | None = None,
) -> Island:
    """The smallest set of modules in FP32 with which every captured step is finite and agrees with FP32.

    First the trace of a failing step accuses a module, that one computes in FP32, and the step is traced again, until
    all steps pass. Where that leads nowhere, all modules compute in FP32, and halves of them are given up. Then what
    is not needed is dropped, and a container makes way for those of its children that suffice with fewer parameters.
    At the end no single member can be left out. That is a smallest set, not always the only one.

    Numerics:
        A step passes if loss and gradients are finite and within the tolerance of the same step in FP32, at its own
        loss scale or at the one that its FP32 gradients leave room for. See `Tolerance` and `IslandJudge`.
        The same steps give the same island on a CPU, and on a GPU whose kernels are deterministic.
        Checked by tests/diagnosis/islands/test_search.py.

    Args:
        steps: Captured steps of one model, best from several points of training.
        tolerance: How near to FP32; None is `Tolerance()`.
        budget: Seconds. When they are used up, the smallest set that has passed so far is returned.
        on_progress: Called with a short text before every replay.
        folder: Where answers are kept, so that a search that was ended goes on; None keeps nothing.
        spread: Replays steps elsewhere, side by side; None replays all of them here.

    Raises:
        ReplayError: There is no step, or the steps are of models with different modules.
    """
    if not steps:
        raise ReplayError("There is no step to search on. Capture one with capture_step or capture_points.")
    names = [[name for name, _ in name_all_modules(step.model)] for step in steps]
    if any(row != names[0] for row in names):
        raise ReplayError("The steps are of different models. Give steps of one model.")
    # Weights that are not finite any more say nothing about the step: the update of one before it has made them so.
    sound = [step for step in steps if all(bool(t.isfinite().all()) for t in step.state.captured.values())]
    notes = [
        f"{_say(step)} begins with weights that are not finite, and was left out" for step in steps if step not in sound
    ]
    if not sound:
        raise ReplayError("All steps begin with weights that are not finite. Capture steps from before.")
    return _Search(sound, tolerance or Tolerance(), budget, on_progress, SearchLog(folder), notes, spread).run()


class _Search:
    def __init__(
        self,
        steps: Sequence[CapturedStep],
        tolerance: Tolerance,
        budget: float,
        on_progress: Callable[[str], None] | None,
        log: SearchLog,
        notes: Sequence[str],
        spread: ErrorSpread | None,
    ) -> None:
        self._began = time.perf_counter()
        self._progress = on_progress
        self._notes = notes
        self._tree = ModuleTree(
            {n: sum(p.numel() for p in m.parameters()) for n, m in name_all_modules(steps[0].model)}
        )
        self._judge = IslandJudge(
            steps,
            tolerance=tolerance,
            log=log,
            budget=budget,
            on_replay=self._report,
            spread=spread,
        )
        self._best: tuple[str, ...] | None = None
        self._failing: list[int] = []
        self._suspects: list[Suspect] = []

    def run(self) -> Island:
        try:
            return self._run()
        except BudgetUsed:
            reason = "" if self._best else "the budget was used up before a set passed"
            return self._finish(self._best or (), reason, complete=False)

    def _run(self) -> Island:
        judge = self._judge
        for i, step in enumerate(judge.steps):
            fault = _find_fp32_fault(judge, i)
            if fault:
                return self._finish((), f"{_say(step)} fails in FP32 too ({fault}): it is in the data or in the code")
        self._failing = [i for i in range(len(judge.steps)) if not judge.outcome(i).passes]
        if not self._failing:
            return self._finish((), self._say_healthy())
        found = self._follow_traces()
        if found is None:
            found = self._start_from_all()
        if isinstance(found, str):
            lines = _find_lines(judge, judge.trace(self._failing[0]), self._suspects, ())
            return self._finish((), found, lines=lines)
        modules = self._reduce(found)
        lines = _find_lines(judge, judge.trace(self._failing[0]), self._suspects, modules)
        return self._finish(modules, "", lines=lines)

    def _passes(self, names: Sequence[str]) -> bool:
        modules = self._tree.normalize(names)
        passed = self._judge.passes(modules)
        smaller = self._best is None or self._tree.cost(modules) < self._tree.cost(self._best)
        if passed and smaller and "" not in modules:
            self._best = modules
        return passed

    def _follow_traces(self) -> tuple[str, ...] | None:
        """Modules that the traces accuse, one after the other, until all steps pass; None where that leads nowhere."""
        kept: tuple[str, ...] = ()
        for _ in range(_MOST_GUIDED):
            i = next((i for i in self._failing if not self._judge.outcome(i, kept).passes), None)
            if i is None:
                if self._passes(kept):
                    return kept
                return None
            suspects = find_suspects(self._judge.trace(i, kept))
            self._suspects += [s for s in suspects if s not in self._suspects]
            module = next((s.module for s in suspects if s.module and not covers(kept, s.module)), None)
            if module is None:
                return None
            kept = self._tree.normalize([*kept, module])
        return kept if self._passes(kept) else None

    def _start_from_all(self) -> tuple[str, ...] | str:
        """All modules of the model, if they suffice; else why not."""
        top = self._tree.children("")
        if top and self._passes(top):
            return top
        if not self._judge.passes(("",)):
            why = next(o.why for i in self._failing if not (o := self._judge.outcome(i, ("",))).passes)
            forward = isinstance(self._judge.steps[0], CapturedForward)
            where = (
                "what weights or inputs lose in the cast" if forward else "the loss function, outside of all modules"
            )
            return f"even with every module in FP32 {why}: it is in {where}"
        return "only the whole model in FP32 helps: it is in the code of its own forward, outside of its submodules"

    def _reduce(self, modules: Sequence[str]) -> tuple[str, ...]:
        """Drop, take apart and join, until nothing changes."""
        kept = self._tree.normalize(modules)
        while True:
            before = kept
            kept = self._tree.normalize(minimize(self._rank(kept), self._passes))
            for name in kept:
                kept = self._take_apart(name, kept)
            kept = self._join(kept)
            if kept == before:
                return kept

    def _rank(self, modules: Sequence[str]) -> list[str]:
        """Those with evidence first."""
        accused = [suspect.module for suspect in self._suspects]
        return sorted(modules, key=lambda name: not any(covers((name,), module) for module in accused))

    def _take_apart(self, name: str, kept: tuple[str, ...]) -> tuple[str, ...]:
        """The set with the fewest children instead of a container, where they suffice and cost less."""
        rest = [other for other in kept if other != name]
        children = self._rank(self._tree.children(name))
        if not children or name not in kept or not self._passes([*rest, *children]):
            return kept
        fewest = minimize(children, lambda some: self._passes([*rest, *some]))
        smaller = self._tree.normalize([*rest, *fewest])
        if len(fewest) > 1 and self._tree.cost(fewest)[0] >= self._tree.cost([name])[0]:
            return kept  # all that costs anything: the container says it in one word
        for child in fewest:
            smaller = self._take_apart(child, smaller)
        return smaller

    def _join(self, kept: tuple[str, ...]) -> tuple[str, ...]:
        """A container instead of several members in it, where it costs no more."""
        for parent in dict.fromkeys(name.rpartition(".")[0] for name in kept):
            inside = [name for name in kept if is_inside(name, parent)]
            joined = self._tree.normalize([*(name for name in kept if name not in inside), parent])
            if (
                parent
                and len(inside) > 1
                and self._tree.cost(joined)[0] <= self._tree.cost(kept)[0]
                and self._passes(joined)
            ):
                return self._join(joined)
        return kept

    def _finish(
        self, modules: tuple[str, ...], reason: str, *, lines: LineAlternative | None = None, complete: bool = True
    ) -> Island:
        judge, first = self._judge, self._failing[0] if self._failing else None
        after, fault, tf32 = None, None, False
        notes = [*self._notes]
        try:
            if modules and first is not None:
                after = judge.outcome(first, modules)
                tf32 = judge.passes_in_tf32(modules)
            if complete and (modules or not self._failing) and "FP32 too" not in reason:
                fault = find_update_fault(judge, modules)
        except BudgetUsed:
            complete = False
        if fault is not None and fault.text:
            if modules:
                notes.append(fault.text)
            else:
                reason = f"{reason}; but {fault.text}"
        return Island(
            members=tuple(self._describe(name, modules) for name in modules),
            lines=lines,
            tf32=tf32,
            reason=reason,
            needed=bool(self._failing),
            complete=complete,
            before=None if first is None else judge.outcome(first),
            after=after,
            update_error=None if fault is None else fault.error,
            num_tried=len(judge.tried),
            num_replays=judge.num_replays,
            seconds=time.perf_counter() - self._began,
            notes=tuple(notes),
            ends=name_end(judge.steps[0]),
        )

    def _describe(self, name: str, modules: Sequence[str]) -> Member:
        accused = [s for s in self._suspects if covers((name,), s.module)]
        accused += [s for s in self._suspects if s.module and is_inside(name, s.module)]  # the code that calls it
        accused += self._suspects  # what it feeds
        seen = accused[0].seen if accused else ""
        rest = self._tree.normalize(other for other in modules if other != name)
        if self._judge.tried.get(rest) is not False and rest:
            return Member(name, seen, "")
        outcomes = [self._judge.known(i, rest) for i in range(len(self._judge.steps))]
        return Member(name, seen, next((o.why for o in outcomes if o is not None and not o.passes), ""))

    def _say_healthy(self) -> str:
        outcomes = [self._judge.outcome(i) for i in range(len(self._judge.steps))]
        error = max(outcome.error for outcome in outcomes)
        end = name_end(self._judge.steps[0]).removeprefix("the ")
        text = f"every step is finite as it is, and its {end} at most {100 * error:.2g} % off FP32"
        moved = [(s, o) for s, o in zip(self._judge.steps, outcomes, strict=True) if o.scale != s.scale]
        if moved:
            step, outcome = moved[0]
            text += f"; {_say(step)} needs a loss scale of {outcome.scale:g} in place of {step.scale:g}"
        return text

    def _report(self) -> None:
        if self._progress is None:
            return
        smallest = f", smallest that passes: {', '.join(self._best)}" if self._best else ""
        num = len(self._judge.tried)
        self._progress(f"searching the FP32 island: {num} set{'s' * (num != 1)} tried{smallest}")


def _find_lines(
    judge: IslandJudge, trace: Trace, suspects: Sequence[Suspect], modules: Sequence[str]
) -> LineAlternative | None:
    """Lines that suffice without any module in FP32: one if possible, else the fewest; None where none were found.

    Args:
        judge: Tries them.
        trace: A failing step as it was.
        suspects: What it accuses.
        modules: The island; none looks at the code outside of all modules.
    """
    own = [op for op in narrow_operations(trace) if (covers(modules, op.module) if modules else not op.module)]
    accused = [s.line for s in suspects if covers(modules, s.module) or not s.module]
    rows = _known_lines([*accused, *((op.file, op.line) for op in own)])
    for line in rows[:_MOST_ALONE]:
        if judge.passes((), (line,)):
            return _describe_lines((line,), trace, len(own) if modules else 0)
    together = rows[:_MOST_TOGETHER]
    if len(together) < 2 or not judge.passes((), together):
        return None
    fewest = minimize(together, lambda some: judge.passes((), some))
    return _describe_lines(tuple(fewest), trace, len(own) if modules else 0)


def _known_lines(lines: Iterable[Line]) -> list[Line]:
    return list(dict.fromkeys(line for line in lines if line[0] and line[1]))


def _describe_lines(lines: tuple[Line, ...], trace: Trace, of_island: int) -> LineAlternative:
    return LineAlternative(lines, count_operations(trace, lines=frozenset(lines)), of_island)


def _find_fp32_fault(judge: IslandJudge, i: int) -> str:
    """What is wrong with a step in FP32; '' where nothing is."""
    try:
        reference = judge.reference(i)
    except BudgetUsed:
        raise
    except Exception as error:  # the user's code
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    if reference.finite:
        return ""
    end = name_end(judge.steps[i]).removeprefix("the ")
    bad = f"{'an' if end[0] in 'aeiou' else 'a'} {end} is not finite"
    what = f"its loss is {reference.loss:g}" if not math.isfinite(reference.loss) else bad
    narrow = judge.steps[i].plan.weights != "fp32"
    return f"{what}, with weights, buffers and inputs as they were rounded before" if narrow else what


def _say(step: CapturedStep) -> str:
    return f"step {step.origin.step}"
