"""Study: arms over seeds, look by look, until every candidate is decided."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Protocol

from floatline.validation.running.jobs import Job
from floatline.validation.running.processes import Runner
from floatline.validation.study.arms import Arm
from floatline.validation.study.store import Store
from floatline.validation.verdict.comparison import Comparison, Gate, PowerPlan
from floatline.validation.verdict.pairs import BROKEN, NUDGED, REFERENCE, ArmRun
from floatline.validation.verdict.power import USUAL_SPREADS, describe_plans, plan_seeds
from floatline.validation.verdict.terms import MARGINS, Terms
from floatline.validation.verdict.verdict import decide, next_look


class Watcher(Protocol):
    """Hears of what a study does, as it does it."""

    def plan(self, text: str) -> None:
        """What to expect, before the start, and again once the time of a seed is known."""
        ...

    def ran(self, run: ArmRun, *, left: int, seconds: float | None) -> None:
        """An arm has come to its end; so many jobs are left up to the next look, which take about so long."""
        ...

    def looked(self, comparison: Comparison) -> None:
        """Another look at a candidate was taken, or it was decided without one."""
        ...

    def measuring(self, what: str) -> None:
        """The arms are done, and this is measured now."""
        ...


class Silence:
    """Hears of everything, and says nothing."""

    def plan(self, text: str) -> None:
        """Nothing."""

    def ran(self, run: ArmRun, *, left: int, seconds: float | None) -> None:
        """Nothing."""

    def looked(self, comparison: Comparison) -> None:
        """Nothing."""

    def measuring(self, what: str) -> None:
        """Nothing."""


@dataclass
class Study:
    """Arms over seeds.

    The seeds are trained in their order, up to the next look, and the arms of each in an order drawn at random, so that
    a machine that gets slower or hotter does so to all of them. The looks take the first 3, 5, 8 … seeds whose arms are
    all done. A candidate that is decided is trained no more. The broken arm is trained up to the first look only.

    Args:
        arms: The reference, and whatever is trained beside it. 'fp32-nudged' and 'broken' may be among them.
        candidates: Names of the arms that are judged.
        terms: What is asked of them.
        seeds: As many as the last look, in their order.
        runner: Where the jobs run.
        store: Where the runs are kept; those that are there already are not run again.
        watcher: Hears of what happens.
        reference: Name of the arm that the candidates are compared with.
    """

    arms: Sequence[Arm]
    candidates: Sequence[str]
    terms: Terms
    seeds: Sequence[int]
    runner: Runner
    store: Store
    watcher: Watcher = field(default_factory=Silence)
    reference: str = REFERENCE

    def __post_init__(self) -> None:
        self._runs = self.store.runs()
        self._open = list(self.candidates)
        self._seen: dict[str, int] = {}
        self._timed: PowerPlan | None = None

    @property
    def runs(self) -> tuple[ArmRun, ...]:
        """All runs so far, seed by seed, in the order of the arms."""
        names = [arm.name for arm in self.arms]
        return tuple(self._runs[name, seed] for seed in self.seeds for name in names if (name, seed) in self._runs)

    def run(self) -> tuple[Comparison, ...]:
        """Train until every candidate is decided, or no look is left; the comparisons in the candidates' order."""
        plans = [plan_seeds(spread, terms=self.terms) for spread in self._spreads()]
        self.watcher.plan(describe_plans(plans, terms=self.terms))
        self._judge()
        while self._open:
            jobs = self._jobs()
            if not jobs:
                break
            self._train(jobs)
        return tuple(self.compare(name) for name in self.candidates)

    def compare(self, candidate: str) -> Comparison:
        """The comparison of a candidate, from the runs that there are."""
        runs = self._complete(candidate)
        comparison = decide(
            runs, candidate=candidate, terms=self.terms, reference=self.reference, plan=self._timed or self._guess()
        )
        return refuse_equal_seeds(comparison, runs)

    def _train(self, jobs: list[Job]) -> None:
        left, at_once = len(jobs), self._num_at_once(jobs)
        with closing(self.runner.run(jobs, wanted=self._wants)) as results:
            for run in results:
                left -= 1
                self._runs[run.arm, run.seed] = run
                self.store.add(run)
                self.watcher.ran(run, left=left, seconds=self._time_to_go(left, at_once))
                self._estimate()
                self._judge()
                if not self._open:
                    return

    def _num_at_once(self, jobs: Sequence[Job]) -> int:
        """Jobs that run side by side; functions run in this process, one after another."""
        return 1 if all(job.function is not None for job in jobs) else max(1, self.runner.num_at_once)

    def _time_to_go(self, left: int, at_once: int) -> float | None:
        """Seconds that so many jobs take, by the runs that are done: a process that starts once is in none of them."""
        times = [run.seconds for run in self._runs.values() if run.seconds is not None and not run.error]
        return math.ceil(left / at_once) * sum(times) / len(times) if times else None

    def _jobs(self) -> list[Job]:
        """What is missing up to the next look of any open candidate."""
        looks = [look for name in self._open if (look := self._next(name)) is not None]
        if not looks:
            return []
        return [
            job
            for seed in self.seeds[: min(looks)]
            for arm in _shuffled(self._arms_at(seed), seed)
            if (arm.name, seed) not in self._runs and self._wants(job := arm.job(seed))
        ]

    def _wants(self, job: Job) -> bool:
        """Whether a job is still of use: that of a candidate that was decided in the meantime is not.

        The nudged arm shows everyone's noise, also where it has been a candidate itself.
        """
        return job.arm in self._open or job.arm == NUDGED or job.arm not in self.candidates

    def _arms_at(self, seed: int) -> list[Arm]:
        first = self.seeds[: self.terms.looks[0]]
        return [arm for arm in self.arms if arm.name != BROKEN or seed in first]

    def _complete(self, candidate: str) -> list[ArmRun]:
        """The runs of the first seeds for which everything that the verdict looks at is there, in their order."""
        others = (self.reference, NUDGED, BROKEN, candidate)
        found: list[ArmRun] = []
        for seed in self.seeds:
            names = [arm.name for arm in self._arms_at(seed) if arm.name in others]
            if any((name, seed) not in self._runs for name in names):
                break
            found += [self._runs[name, seed] for name in names]
        return found

    def _next(self, candidate: str) -> int | None:
        runs = self._complete(candidate)
        if not runs:
            return self.terms.looks[0]
        if equal_seeds(runs, self.reference) is not None:
            return None
        return next_look(runs, candidate=candidate, terms=self.terms, reference=self.reference)

    def _judge(self) -> None:
        """Look at the open candidates that have more seeds than before, and close those that are decided."""
        for name in list(self._open):
            num = len({run.seed for run in self._complete(name)})
            if num <= self._seen.get(name, 0):
                continue
            self._seen[name] = num
            decided = self._next(name) is None
            if decided:
                self._open.remove(name)
            if decided or num in self.terms.looks:
                self.watcher.looked(self.compare(name))

    def _spreads(self) -> tuple[float, ...]:
        """Usual spreads, in proportion to the margin that is asked for."""
        return tuple(spread * self.terms.margins[0] / MARGINS[0] for spread in USUAL_SPREADS)

    def _guess(self, seconds: float | None = None) -> PowerPlan:
        """The plan for a spread of half the margin, which is common."""
        at_once = max(1, self.runner.num_at_once)
        sd = 0.5 * self.terms.margins[0]
        return plan_seeds(sd, terms=self.terms, seconds_per_seed=seconds, num_at_once=at_once)

    def _estimate(self) -> None:
        """Tell the expected time, once all arms of a seed have been timed."""
        if self._timed is not None:
            return
        for seed in self.seeds:
            own = [self._runs.get((arm.name, seed)) for arm in self._arms_at(seed)]
            times = [run.seconds for run in own if run is not None and run.seconds is not None]
            if len(times) == len(own):
                self._timed = self._guess(sum(times))
                self.watcher.plan(describe_plans([self._timed], terms=self.terms).splitlines()[-1].strip())
                return


def equal_seeds(runs: Sequence[ArmRun], reference: str) -> tuple[int, int] | None:
    """Two seeds whose reference runs are the same to the last bit: the seed changes nothing, and n seeds are one."""
    seen: dict[tuple[float, ...], int] = {}
    for run in runs:
        # A curve tells as much as the first losses; one point of it may be equal by chance.
        trail = run.first_losses or (tuple(value for _, value in run.curve) if len(run.curve) > 1 else ())
        if run.arm != reference or not trail:
            continue
        key = (run.metric, *trail)
        if key in seen:
            return seen[key], run.seed
        seen[key] = run.seed
    return None


def refuse_equal_seeds(comparison: Comparison, runs: Sequence[ArmRun]) -> Comparison:
    """The comparison with the gate on the seeds; REFUSED where two of them are one and the same training."""
    same = equal_seeds(runs, comparison.reference)
    if same is None:
        text = "no two seeds give the same training"
        return replace(comparison, gates=(*comparison.gates, Gate("seeds-differ", True, text)))
    text = f"seeds {same[0]} and {same[1]} give the same training, bit by bit"
    advice = "Let the seed decide the weights and the order of the data, as build(seed) or in the script."
    gate = Gate("seeds-differ", False, text, advice)
    return replace(
        comparison, verdict="REFUSED", reason=text, gates=(gate, *comparison.gates), flags=()
    )  # one run, told several times, has no spread


def _shuffled(arms: list[Arm], seed: int) -> list[Arm]:
    """The arms in an order that the seed decides, so that a study that goes on has the same one."""
    return random.Random(seed).sample(arms, len(arms))  # noqa: S311 - nothing is kept secret
