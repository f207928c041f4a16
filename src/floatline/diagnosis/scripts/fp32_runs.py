"""FP32Runs: what a script shows in FP32, or with some lines in FP32, or with changed texts. Without torch."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from floatline.diagnosis.fix_trials import FP32Run
from floatline.diagnosis.gaps import Shown
from floatline.plans.presets import resolve_plan
from floatline.running.command import Command, trial_environment
from floatline.running.quiet_runs import QuietRuns
from floatline.running.ranks import path_of

MAIN = "floatline.running.main"
SEED = 0
STEPS = 100
# A script of no more steps than these runs to its end, where it says what came of them; so does one that takes no more
# operations in all, on no more elements: seconds on one core.
WHOLE, MOST_STEPS, MOST_OPS, MOST_ELEMENTS = 250, 5000, 300_000, 3_000_000_000
LOSSES, READS = "losses.jsonl", "reads.json"  # beside the report of a run


class FP32Runs:
    """Runs a script in FP32 for some steps, from the same seed; what it writes is kept apart. Its own run is made once.

    Args:
        command: The script.
        quiet: Runs it.
        device: 'cuda' stands in for a GPU where there is none; '' does not.
        steps: After so many it is ended.
        say: Told before each run.
        search: Steps that its optimizers leave out, as the search of the script's own scaler did: see `LossLog.search`.
        rank: Of several processes, the one that is looked at.
        took: Seconds of the script as it is.
        sources: Changed texts, by path.
        is_last: Whether nothing follows the answer: then Ctrl-C ends a run, and what was seen before is still told.
    """

    def __init__(
        self,
        command: Command,
        quiet: QuietRuns,
        device: str,
        steps: int,
        say: Callable[[str], None],
        *,
        search: Sequence[Sequence[int]] = (),
        rank: int = 0,
        took: float | None = None,
        sources: Mapping[str, str] | None = None,
        is_last: bool = True,
    ) -> None:
        self._is_last = is_last
        self._rank, self._took, self._sources = rank, took, dict(sources or {})
        self._command, self._quiet, self._device = command, quiet, device
        self._steps, self._say, self._search = steps, say, [*search]
        self._nudged: dict[float, Shown | str] = {}
        self._changed: list[tuple[Mapping[str, str], Sequence[Sequence[int]], FP32Runs]] = []

    @property
    def source(self) -> str:
        """The script's file, as frames name it; '' of a module."""
        first = self._command.words[0] if self._command.words else ""
        return str(Path(first).absolute()) if first.endswith(".py") else ""

    def nudged(self, nudge: float) -> Shown | str:
        """The script as it is, its weights moved once by a share; 0 leaves them. A text says why there is no run."""
        if nudge not in self._nudged:
            how = "with weights that were moved once by as much as BF16 rounds" if nudge else ""
            self._nudged[nudge] = self._run(how, **({"nudge": nudge} if nudge else {}))
        return self._nudged[nudge]

    def in_part(self, lines: Sequence[tuple[str, int]]) -> Shown | str:
        """The script in its own precision, with some lines in FP32, by file and number; with none, as it is."""
        named = f"line {lines[0][1]}" if len(lines) == 1 else f"{len(lines)} lines"
        return self._run(f"with {named} in FP32" if lines else "", plan=None, lines=list(lines))

    def with_changes(self, sources: Mapping[str, str], search: Sequence[Sequence[int]] | None = None) -> FP32Runs:
        """The same runs with changed texts, each made once.

        Args:
            sources: The texts, by path.
            search: Steps that optimizers leave out; None: as without the change.
        """
        search = self._search if search is None else [*search]
        for known, left_out, runs in self._changed:
            if (known, left_out) == (sources, search):
                return runs
        runs = FP32Runs(
            self._command, self._quiet, self._device, self._steps, self._say,
            search=search, rank=self._rank, took=self._took, sources=sources, is_last=self._is_last,
        )  # fmt: skip
        self._changed.append((dict(sources), search, runs))
        return runs

    def changed(self, sources: Mapping[str, str]) -> FP32Run:
        """The losses with changed texts, by path; none are the script as it is."""
        seen = (self.with_changes(sources) if sources else self).nudged(0.0)
        if isinstance(seen, str):
            return FP32Run(problem=seen)
        return FP32Run((*seen.losses, math.nan) if seen.error else seen.losses)

    def _run(self, how: str, **given: Any) -> Shown | str:
        where = "again" if "plan" in given else "in FP32"
        last = "" if self._took is None else f"; the run before it took {self._took:.0f} s"
        how = ", ".join(one for one in ("with the change" if self._sources else "", how) if one)
        what = f"the script runs {where} for up to {self._steps} steps{how and f', {how}'}"
        self._say(f"{what}; its output is not shown{last}")
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="floatline-") as folder:
            names = ("report.json", "job.json", LOSSES, READS, "writes")
            report, task, log, reads, writes = (Path(folder, name) for name in names)
            writes.mkdir()
            job = {
                "plan": resolve_plan("fp32").as_given(), "steps": self._steps, "seed": SEED,
                "log": str(log), "reads": str(reads), "folder": str(writes), "device": self._device,
                "search": self._search, "sources": self._sources, "sizes": True, **given,
            }  # fmt: skip
            task.write_text(json.dumps(job), encoding="utf-8")
            try:
                with trial_environment(writes) as environment:
                    problem = self._quiet.run(MAIN, str(report), f"@{task}", env=environment)
            except KeyboardInterrupt:
                if not self._is_last:
                    raise
                return "it was stopped by Ctrl-C"
            report, log, reads = (path_of(path, self._rank) for path in (report, log, reads))
            seen: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
            found = Shown.read(log, reads, error=seen.get("error", ""), cut=seen.get("cut", False))
        self._took = time.monotonic() - began
        if "missing" in seen or (not seen and not found.losses):
            return problem or "the process ended without a word"
        if seen.get("refused"):
            return f"the script cannot run beside its own files, {seen['refused'][0]}"
        return found
