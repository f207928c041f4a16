"""StudyProgress: what a study does, on stderr: a bar on a terminal, elsewhere a line for each run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from floatline.validation.verdict.comparison import Comparison
    from floatline.validation.verdict.pairs import ArmRun


class StudyProgress:
    """Hears of what a study does, and shows it on stderr: as a bar on a terminal, elsewhere a line for each run."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._console = Console(stderr=True, highlight=False)
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(),
        )  # fmt: skip
        self._bar = Bar(*columns, console=self._console, disable=not self._console.is_terminal, transient=True)
        self._task = self._bar.add_task("looking at the target", total=None)
        self._done = 0

    def plan(self, text: str) -> None:
        """Print what to expect."""
        self._say(text)
        self._bar.update(self._task, description="running")

    def ran(self, run: ArmRun, *, left: int, seconds: float | None) -> None:
        """Move on by one run."""
        self._done += 1
        what = f"{run.arm}, seed {run.seed}"
        self._bar.update(self._task, description=f"done: {what}", completed=self._done, total=self._done + left)
        if run.error:
            self._say(f"{what} failed: {run.error}")
        elif not self._console.is_terminal:
            from floatline.validation.verdict.power import say_left, show_seconds

            took = "" if run.seconds is None else f" in {show_seconds(run.seconds)}"
            self._say(f"{what}: {run.metric:.6g}{took}; {say_left(left, seconds)}")

    def looked(self, comparison: Comparison) -> None:
        """Draw the interval of a candidate against the margins."""
        from floatline.report.validation.drawings import draw_line

        terms, num = comparison.terms, len(comparison.seeds)
        head = f"{comparison.candidate} after {num} {'seed' if num == 1 else 'seeds'}: {comparison.verdict}"
        if comparison.difference is None or comparison.interval is None:
            self._say(f"{head}, {comparison.reason}")
            return
        first, second = (terms.size(margin) for margin in terms.margins)
        low, high = comparison.interval
        line = draw_line(comparison.difference, low, high, margins=terms.margins, labels=(first, second))
        self._say(f"{head}\n  {line}")

    def measuring(self, what: str) -> None:
        """Say what is measured."""
        self._bar.update(self._task, description=f"measuring {what}", total=None)
        if not self._console.is_terminal:
            self._say(f"measuring {what}")

    def _say(self, text: str) -> None:
        name = "" if self._console.is_terminal else "floatline: "
        self._console.print(f"{name}{text}", markup=False, soft_wrap=True)

    def __enter__(self) -> StudyProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
