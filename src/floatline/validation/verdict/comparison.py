"""Comparison: the verdict on one candidate, with everything that it rests on; and which of several to take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from floatline.base.plain_records import from_plain, to_plain
from floatline.validation.verdict.terms import Terms

Verdict = Literal["PASS", "MARGINAL", "FAIL", "INCONCLUSIVE", "REFUSED"]


@dataclass(frozen=True)
class Look:
    """The result after so many seeds.

    Args:
        num_seeds: n, the pairs looked at.
        mean: Mean of the pairs' excess; positive is worse.
        sd: Their standard deviation, with n - 1.
        factor: k of this look; of noise without any skewness the interval would be mean -+ k * sd.
        low: Lower end of the interval, L.
        high: Upper end of the interval, U.
        verdict: What this look decides; INCONCLUSIVE means: go on, if seeds are left.
        skew: Skewness of the excesses, by which the ends are moved outwards; None where that is not done.
    """

    num_seeds: int
    mean: float
    sd: float
    factor: float
    low: float
    high: float
    verdict: Verdict
    skew: float | None = None


@dataclass(frozen=True)
class Gate:
    """One condition without which no verdict means anything.

    Args:
        name: Short and stable, such as 'reference-learned'.
        passed: None where what it needs was not recorded, so that it was not checked.
        seen: The numbers, as they were.
        advice: What to do where it did not pass; '' where it did.
    """

    name: str
    passed: bool | None
    seen: str
    advice: str = ""


@dataclass(frozen=True)
class Band:
    """The paired curves at a few checkpoints, with a simultaneous band.

    Args:
        steps: The checkpoints, at most 7, all after 30 % of training.
        mean: Mean excess at each.
        low: Lower end of the band at each.
        high: Upper end of the band at each.
        limit: What the upper end must not exceed, 2 * delta2.
        curve_of: 'metric' or 'loss'.
    """

    steps: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    limit: float
    curve_of: str

    @property
    def holds(self) -> bool:
        """The whole upper end stays within the limit."""
        return all(high <= self.limit for high in self.high)

    @property
    def left(self) -> bool:
        """At some checkpoint even the lower end is above the limit: the curve is shown to leave FP32's."""
        return any(low > self.limit for low in self.low)


@dataclass(frozen=True)
class Drift:
    """Whether the candidate falls behind as training goes on.

    Args:
        slope: Mean slope of the excess over ln(step) in the last half of training.
        slope_low: Its lower bound.
        horizon: Planned steps.
        at_horizon: The excess that the fitted line reaches there.
        limit: delta1.
        steps: The checkpoints used.
    """

    slope: float
    slope_low: float
    horizon: int
    at_horizon: float
    limit: float
    steps: tuple[int, ...]

    @property
    def found(self) -> bool:
        """The slope is above zero beyond doubt, and its line ends above delta1."""
        return self.slope_low > 0 and self.at_horizon > self.limit


@dataclass(frozen=True)
class NoiseFloor:
    """FP32 against FP32 with its start nudged by 1e-7.

    Args:
        num_seeds: Pairs of the two.
        mean: Mean excess of the nudged arm.
        half_width: Half-width of its interval: no comparison here can see less than about this.
    """

    num_seeds: int
    mean: float
    half_width: float


@dataclass(frozen=True)
class PowerPlan:
    """What to expect before starting, for one guess of the paired spread.

    Args:
        sd: The paired standard deviation that was assumed or seen.
        seeds_needed: Pairs for 90 % power in a test of fixed size; None where it is over 1,000.
        pass_rate: Share of simulated studies that end in PASS where the candidate is as good as FP32.
        expected_seeds: Mean number of seeds at which those studies stop.
        most_seeds: The last look.
        seconds: Expected time of all arms; None where the time of an arm is not known.
        most_seconds: The same if every look is needed.
    """

    sd: float
    seeds_needed: int | None
    pass_rate: float
    expected_seeds: float
    most_seeds: int
    seconds: float | None = None
    most_seconds: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Candidate against reference over paired seeds: the verdict, and everything that it rests on.

    Args:
        verdict: PASS, MARGINAL, FAIL, INCONCLUSIVE or REFUSED.
        reason: One sentence: what decided it.
        reference: Name of the reference arm.
        candidate: Name of the candidate arm.
        terms: What was asked: metric, scale, margins, looks.
        difference: Mean excess at the last look that was taken; None before the smallest look.
        interval: (L, U) of that look; None before the smallest look.
        seeds: The seeds it rests on, in order.
        excesses: r of each of these seeds; +inf where the candidate diverged; empty where r cannot be formed.
        looks: Every look taken, in order.
        gates: Every gate, passed or not.
        band: The curve band; None where no curves were recorded.
        drift: The drift test; None where no curves were recorded.
        noise: The noise floor; None without the nudged arm.
        flags: What a reader must see beside the verdict, such as 'suspiciously better'.
        notes: What is worth knowing, and changes nothing.
        plan: What was expected before the start.
        paired: False where the seeds of the two arms are not the same, so that the interval is the wider one.
        means: The metric of the reference and of the candidate, mean over their runs; None where it was not asked for.
    """

    verdict: Verdict
    reason: str
    reference: str
    candidate: str
    terms: Terms
    difference: float | None
    interval: tuple[float, float] | None
    seeds: tuple[int, ...]
    excesses: tuple[float, ...] = ()
    looks: tuple[Look, ...] = ()
    gates: tuple[Gate, ...] = ()
    band: Band | None = None
    drift: Drift | None = None
    noise: NoiseFloor | None = None
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    plan: PowerPlan | None = None
    paired: bool = True
    means: tuple[float, float] | None = None

    @property
    def failed_gates(self) -> tuple[Gate, ...]:
        """Gates that did not pass; one that was not checked is not among them."""
        return tuple(gate for gate in self.gates if gate.passed is False)

    @property
    def suspicious(self) -> bool:
        """The candidate is better than FP32 by more than the margin, which precision does not explain."""
        return self.interval is not None and self.interval[1] < -self.terms.margins[0]

    def as_json(self) -> dict[str, Any]:
        """Every field, and the two of the command-line contract that are read from the terms."""
        return {"metric": self.terms.metric, "margin": self.terms.margins[0], **to_plain(self)}

    @classmethod
    def from_json(cls, data: Any) -> Comparison:
        """The comparison that `as_json` wrote; ComparisonError for anything else."""
        if isinstance(data, dict):
            data = {key: value for key, value in data.items() if key not in ("metric", "margin")}  # pyright: ignore[reportUnknownVariableType]
        return from_plain(cls, data)

    def __str__(self) -> str:
        """A few lines for people."""
        head = f"{self.candidate} vs {self.reference} on {self.terms.metric}: {self.verdict}\n  {self.reason}"
        lines = [head]
        if self.means is not None:
            first, second = (format(mean, ".6g").replace("nan", "NaN") for mean in self.means)
            lines.append(
                f"  values     {first} in {self.reference}, {second} in {self.candidate}: mean {self.terms.metric}"
            )
        if self.difference is not None and self.interval is not None:
            low, high = (self.terms.show(end) for end in self.interval)
            lines.append(f"  difference {self.terms.show(self.difference)}, interval [{low}, {high}]")
        first, second = (self.terms.size(margin) for margin in self.terms.margins)
        seeds = f"{len(self.seeds)} {'paired' if self.paired else 'unpaired'} seed{'s' * (len(self.seeds) != 1)}"
        lines.append(f"  margins    {first} and {second}, {seeds}")
        if self.verdict == "REFUSED":
            lines += [f"  gate {gate.name}: {gate.seen}. {gate.advice}" for gate in self.failed_gates]
        lines += [f"  but: {flag}" for flag in self.flags]
        return "\n".join(lines)


ORDER: tuple[Verdict, ...] = ("PASS", "MARGINAL", "INCONCLUSIVE", "REFUSED", "FAIL")


def rank(
    comparisons: Sequence[Comparison],
    *,
    time_ratios: Mapping[str, float] | None = None,
    memory_ratios: Mapping[str, float] | None = None,
) -> tuple[Comparison, ...]:
    """The candidates, the one to take first.

    By verdict; then a PASS that is not suspiciously better; then, where they are known, time and memory; then the
    upper end of the interval. Quality beyond PASS buys nothing, so that speed goes before it.

    Args:
        comparisons: One for each candidate.
        time_ratios: Seconds of the candidate over seconds of FP32, by its name.
        memory_ratios: Bytes likewise.
    """
    times, memories = time_ratios or {}, memory_ratios or {}

    def place(comparison: Comparison) -> tuple[int, bool, float, float, float]:
        return (
            ORDER.index(comparison.verdict),
            comparison.verdict == "PASS" and comparison.suspicious,
            times.get(comparison.candidate, math.inf),
            memories.get(comparison.candidate, math.inf),
            comparison.interval[1] if comparison.interval else math.inf,
        )

    return tuple(sorted(comparisons, key=place))


def describe_several(num_candidates: int, *, alpha: float = 0.05) -> str:
    """What several candidates do to the error; '' for one."""
    if num_candidates < 2:
        return ""
    most = min(1.0, num_candidates * alpha)
    return (
        f"{num_candidates} candidates were judged, each with its own {100 * alpha:.0f} % chance of a false PASS; "
        f"the chance that any is false is at most {100 * most:.0f} %"
    )
