"""ArmRun: one training of one seed; Pair: the two arms of a seed, and how much worse the candidate is."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from floatline.base.plain_records import from_plain, to_plain
from floatline.errors import ComparisonError
from floatline.validation.verdict.terms import Terms

# Names of metrics that are better when higher. Comparing one the wrong way round would pass what is worse.
HIGHER = re.compile(
    r"acc(uracy)?|au(ro)?c|m?ap|m?iou|dice|f1|f_?score|hmean|bleu|rouge|meteor|cider|recall|precision|ndcg|mrr|hits?|hr|"
    r"psnr|ssim|r2|rewards?|score|top\d|em|correct|spearman|pearson|kappa|mcc"
)
LOWER = re.compile(r"loss|err(or)?|wer|cer|mse|mae|rmse|nll|ppl|perplexity|fid")


def settle_direction(metric: str, higher_is_better: bool | None) -> bool:
    """Whether higher is better; a name that reads like such a metric is not decided for the user.

    Raises:
        ComparisonError: Nothing was said, and the name reads like a metric that is better when higher.
    """
    if higher_is_better is not None:
        return higher_is_better
    words = re.split(r"[^a-z0-9]+", metric.lower())
    if any(map(HIGHER.fullmatch, words)) and not any(map(LOWER.fullmatch, words)):
        raise ComparisonError(
            f"Metric '{metric}' reads like one that is better when higher. Say --higher-is-better or --lower-is-better."
        )
    return False


REFERENCE = "fp32"
NUDGED = "fp32-nudged"
"""FP32 again, its start nudged by 1e-7: what it differs by from FP32 is the noise floor."""
BROKEN = "broken"
"""A candidate that is wrong on purpose: it must not pass."""

NUM_FIRST_LOSSES = 20


@dataclass(frozen=True)
class ArmRun:
    """One training of one seed under one plan. What was not recorded is None or empty, and is not checked.

    Args:
        arm: 'fp32', 'fp32-nudged', 'broken', or the name of the candidate's plan.
        seed: The seed of start and data order; the arms of one seed are a pair.
        metric: Its final value, evaluated as in every other arm; NaN or inf where the training diverged.
        diverged: The training ended non-finite, or was given up as lost. A metric that is not finite says the
            same, and `lost` reads both.
        start: The metric before the first step, evaluated in the same way.
        curve: (step, value) pairs in rising order of step, at the same steps in every arm.
        curve_of: What the curve holds: the metric, or the training loss where the metric is known at the end only.
        first_losses: Training losses of the first 20 steps, as they were, without rounding.
        steps: Steps attempted.
        applied: Steps whose update reached the weights.
        skipped: Steps whose update was left out, such as by a loss scaler.
        peak: The highest training loss after the first 30 % of the steps, which a spike raises.
        weights_changed: Whether any weight differs from its start.
        seconds: Wall-clock time of the whole arm.
        memory: Bytes by part, such as 'peak', 'weights', 'states'.
        error: The exception of a run that raised, as one line; '' where it came to its end.
    """

    arm: str
    seed: int
    metric: float
    diverged: bool = False
    start: float | None = None
    curve: tuple[tuple[int, float], ...] = ()
    curve_of: Literal["metric", "loss"] = "metric"
    first_losses: tuple[float, ...] = ()
    steps: int | None = None
    applied: int | None = None
    skipped: int | None = None
    peak: float | None = None
    weights_changed: bool | None = None
    seconds: float | None = None
    memory: dict[str, int] = field(default_factory=dict[str, int])
    error: str = ""

    def __post_init__(self) -> None:
        if not self.arm:
            raise ComparisonError("An arm run has no name. Give 'fp32' or the name of its plan.")
        for name in ("steps", "applied", "skipped"):
            count = getattr(self, name)
            if count is not None and count < 0:
                raise ComparisonError(f"{name} is {count} in arm {self.arm!r}, seed {self.seed}. Give 0 or more.")
        steps = [step for step, _ in self.curve]
        if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
            raise ComparisonError(f"The curve of arm {self.arm!r}, seed {self.seed} goes back. Order it by step.")

    @property
    def lost(self) -> bool:
        """It diverged: by its own word, or by a final metric that is not finite. A run that raised is not lost."""
        return self.diverged or (not self.error and not math.isfinite(self.metric))

    @property
    def last_step(self) -> int | None:
        """How far the training went: the steps attempted, else the last step of the curve."""
        if self.steps is not None:
            return self.steps
        return self.curve[-1][0] if self.curve else None

    def as_json(self) -> dict[str, Any]:
        """Plain data, fit for strict JSON; NaN and the infinities are strings."""
        return to_plain(self)

    @classmethod
    def from_json(cls, data: Any) -> ArmRun:
        """The run that `as_json` wrote; ComparisonError for anything else."""
        return from_plain(cls, data)


@dataclass(frozen=True)
class Pair:
    """The reference and another arm of the same seed."""

    reference: ArmRun
    candidate: ArmRun

    @property
    def seed(self) -> int:
        """The seed of both arms."""
        return self.reference.seed

    @property
    def diverged(self) -> bool:
        """The candidate diverged where the reference did not."""
        return self.candidate.lost and not self.reference.lost

    def ruined(self, terms: Terms) -> bool:
        """Worse than any number: the candidate diverged, or has nothing left of a metric that the reference has."""
        if self.candidate.error or self.reference.lost or nothing_left(self.reference.metric, terms):
            return self.diverged
        return self.diverged or nothing_left(self.candidate.metric, terms)

    def excess(self, terms: Terms) -> float:
        """How much worse the candidate ended: r of the protocol; +inf where it diverged."""
        if self.diverged:
            return math.inf
        return excess(self.reference.metric, self.candidate.metric, terms)


def excess(reference: float, candidate: float, terms: Terms) -> float:
    """How much worse one value is than the other: positive is worse.

    Numerics:
        The difference of two `badness` values. 'log' gives ln(candidate / reference) where lower is better;
        +0.01 is then 1.005 % worse. A candidate that is NaN or infinite gives +inf, whatever its sign, and so does
        one that `nothing_left` is true of.
        Checked by tests/validation/verdict/test_pairs.py.

    Args:
        reference: The value in FP32.
        candidate: The value in the other arm.
        terms: Scale and direction.

    Raises:
        ComparisonError: The reference is not finite, or a value has no logarithm on this scale.
    """
    if not math.isfinite(reference):
        raise ComparisonError(f"The reference's {terms.metric} is {reference}. Compare with a run that ended finite.")
    base = badness(reference, terms)
    if not math.isfinite(candidate) or nothing_left(candidate, terms):
        return math.inf
    return badness(candidate, terms) - base


def nothing_left(value: float, terms: Terms) -> bool:
    """On the 'log' scale of a higher-is-better metric zero is infinitely bad, and a reason to fail, not to refuse."""
    return terms.scale == "log" and terms.higher_is_better and value <= 0


def badness(value: float, terms: Terms) -> float:
    """One value on the scale of the comparison, turned so that more is worse.

    Numerics:
        'log': ln(value); 'log-error': ln(1 - value); 'difference': the value. The first and the last have the
        sign turned where higher is better; 1 - value is an error, and needs no turning.

    Raises:
        ComparisonError: The value has no logarithm on this scale.
    """
    sign = -1.0 if terms.higher_is_better else 1.0
    if terms.scale == "difference":
        return sign * value
    if terms.scale == "log-error":
        sign, value = 1.0, 1.0 - value
    if not value > 0:
        what = f"1 - {terms.metric}" if terms.scale == "log-error" else terms.metric
        raise ComparisonError(
            f"{what} is {value:g}, which has no logarithm. "
            "Use scale 'difference', with margins in the unit of the metric."
        )
    return sign * math.log(value)


def pair_up(runs: Iterable[ArmRun], *, candidate: str, reference: str = REFERENCE) -> tuple[Pair, ...]:
    """The seeds that both arms have, in the order in which the reference's runs were given.

    The order is part of the protocol: the looks take the first 3, 5, 8 … pairs. Give the runs in the order in
    which the seeds were planned, not in the order of their results. A seed that only one arm has is left out.

    Raises:
        ComparisonError: An arm has the same seed twice.
    """
    runs = tuple(runs)
    theirs = _by_seed(runs, candidate)
    return tuple(Pair(run, theirs[seed]) for seed, run in _by_seed(runs, reference).items() if seed in theirs)


def unpaired_seeds(runs: Iterable[ArmRun], *, candidate: str, reference: str = REFERENCE) -> tuple[int, ...]:
    """Seeds that only one of the two arms has, in rising order."""
    runs = tuple(runs)
    return tuple(sorted(set(_by_seed(runs, reference)) ^ set(_by_seed(runs, candidate))))


def _by_seed(runs: tuple[ArmRun, ...], arm: str) -> dict[int, ArmRun]:
    found: dict[int, ArmRun] = {}
    for run in runs:
        if run.arm != arm:
            continue
        if run.seed in found:
            raise ComparisonError(f"Arm {arm!r} has seed {run.seed} twice. Give each seed once.")
        found[run.seed] = run
    return found
