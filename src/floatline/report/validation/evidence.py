"""What a verdict rests on: the interval look by look, the paired curves, the gates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from floatline.report.document.detail import FULL, Detail
from floatline.report.document.document import Block, Curves, Drawing, Part, Table, Tone, Words, seven_digits
from floatline.report.validation.drawings import Bar, draw_line, intervals_svg
from floatline.report.validation.texts import TONES, show_count, show_ends, show_excess, show_value
from floatline.validation.verdict.curves import curve_excesses
from floatline.validation.verdict.pairs import ArmRun, pair_up

if TYPE_CHECKING:
    from floatline.validation.verdict.comparison import Comparison, Gate, Look
    from floatline.validation.verdict.pairs import Pair


_MOST_OPEN_SEEDS = 5


def interval_part(comparison: Comparison, runs: Sequence[ArmRun], *, brief: bool = False) -> Part:
    """Every look against the margins, and the seeds behind it.

    Args:
        comparison: One candidate against the reference.
        runs: Of all arms.
        brief: The last look alone, without the seeds.
    """
    terms = comparison.terms
    blocks: list[Block] = []
    if comparison.looks:
        looks = comparison.looks[-1:] if brief else comparison.looks
        blocks += [_looks_drawing(comparison, looks), _looks_table(comparison, looks)]
    else:
        blocks.append(Words("No look was taken, so that there is no interval.", "missing"))
    if comparison.noise is not None:
        noise = comparison.noise
        known = terms.size(noise.half_width) if math.isfinite(noise.half_width) else "nothing"
        mean = show_excess(noise.mean, terms)
        text = f"FP32 against FP32 with its start nudged by 1e-7 differs by {mean}, known to {known}"
        seen = noise.mean or noise.half_width
        if not seen:
            text = "FP32 with its start nudged by 1e-7 ends like FP32 in every seed, so that no noise was seen"
        less = " Nothing smaller can be seen here." if seen else ""
        blocks.append(Words(f"The noise floor: {text}, from {noise.num_seeds} seeds.{less}"))
    blocks += [] if brief else _seeds_table(comparison, runs)
    return Part("The interval against the margins", tuple(blocks))


def _looks_drawing(comparison: Comparison, looks: Sequence[Look]) -> Drawing:
    terms, what = comparison.terms, "seeds" if comparison.paired else "runs of each arm"
    bars = [
        Bar(
            f"{look.num_seeds} {what}: {terms.show(look.mean)}",
            look.verdict,
            TONES[look.verdict],
            look.mean,
            look.low,
            look.high,
        )
        for look in looks
    ]
    labels = (terms.size(terms.margins[0]), terms.size(terms.margins[1]))
    said = [
        f"after {look.num_seeds} {what} {terms.show(look.mean)}, interval {show_ends(look.low, look.high, terms)}, "
        f"{look.verdict}"
        for look in looks
    ]
    summary = f"Difference from {comparison.reference}: {'; '.join(said)}. PASS to {labels[0]}, FAIL from {labels[1]}."
    last = looks[-1]
    plain = draw_line(last.mean, last.low, last.high, margins=terms.margins, labels=labels)
    return Drawing(intervals_svg(bars, margins=terms.margins, labels=labels, summary=summary), summary, plain)


def _looks_table(comparison: Comparison, looks: Sequence[Look]) -> Table:
    terms = comparison.terms
    rows = tuple(
        (
            show_count(look.num_seeds),
            terms.show(look.mean),
            terms.size(look.sd),
            *(() if look.skew is None else (f"{round(look.skew, 1) + 0.0:.1f}",)),
            f"{look.factor:.2f}",
            show_ends(look.low, look.high, terms),
            look.verdict,
        )
        for look in looks
    )
    skewed = all(look.skew is not None for look in looks)
    caption = "Look by look; the interval is mean ∓ k · sd, its ends moved outwards for the skewness of noise"
    skewness = ("skewness",) if skewed else ()
    head = ("seeds", "mean", "sd", *skewness, "k", "interval", "says")
    if not comparison.paired:
        caption = "The interval is mean ∓ t · error, its ends moved outwards for the skewness of noise"
        head = ("runs of each arm", "mean", "error", *skewness, "t", "interval", "says")
    return Table(
        caption,
        head,
        rows,
        numeric=tuple(range(len(head) - 1)),
        tones=tuple(TONES[look.verdict] for look in looks),
        cards=True,
    )


def _seeds_table(comparison: Comparison, runs: Sequence[ArmRun]) -> list[Block]:
    """The end of every seed in both arms."""
    ours, theirs = (
        {run.seed: run for run in runs if run.arm == arm} for arm in (comparison.reference, comparison.candidate)
    )
    if not ours or not theirs:
        return []
    excesses = dict(zip(comparison.seeds, comparison.excesses, strict=False)) if comparison.paired else {}
    rows = tuple(
        (
            f"{seed}",
            show_value(ours[seed].metric) if seed in ours else "—",
            show_value(theirs[seed].metric) if seed in theirs else "—",
            show_excess(excesses.get(seed), comparison.terms),
            show_count(theirs[seed].skipped) if seed in theirs else "—",
        )
        for seed in comparison.seeds
    )
    head = ("seed", comparison.reference, comparison.candidate, "difference", "skipped updates")
    table = Table(
        f"{comparison.terms.metric} at the end, seed by seed",
        head,
        rows,
        numeric=(0, 1, 2, 3, 4),
        folded=len(rows) > _MOST_OPEN_SEEDS,
    )
    return [table]


def curve_part(comparison: Comparison, runs: Sequence[ArmRun], *, detail: Detail = FULL, brief: bool = False) -> Part:
    """Both arms over training, and the excess with its band.

    Args:
        comparison: One candidate against the reference.
        runs: Of all arms.
        detail: How many numbers the curves may have.
        brief: The means alone, without the seeds.
    """
    terms = comparison.terms
    data = curves_of(comparison, runs, most=detail.numbers // (4 if brief else 1), brief=brief)
    if data is None:
        return Part("The paired curves", (Words("No curves were recorded: only the ends were compared.", "missing"),))
    ours, theirs = data["arms"]
    last = max((k for k, value in enumerate(ours["mean"]) if value is not None), default=None)
    ends = (
        "." if last is None else f"; at step {data['steps'][last]:,} {ours['name']} is {show_value(ours['mean'][last])}"
    )
    if last is not None:
        ends += f" and {theirs['name']} {show_value(theirs['mean'][last])}, mean over the seeds."
    blocks: list[Block] = [Curves(data, f"{data['of']} over {data['steps'][-1]:,} steps{ends}")]
    if data["thinned"]:
        blocks.append(Words(f"{len(data['steps'])} of {data['num_steps']:,} recorded steps are drawn.", "note"))
    band = comparison.band
    if band is None:
        blocks.append(Words(f"No band could be drawn: {_why_no_band(comparison, runs)}.", "missing"))
    else:
        limit = terms.size(band.limit)
        words = f"The band is not shown to stay within the limit of {limit}."
        if band.holds:
            words = f"The whole band stays within the limit of {limit}, at all {len(band.steps)} checkpoints at once."
        if band.left:
            words = f"The curve leaves FP32's: at some checkpoint the whole band is above {limit}."
        rows = tuple(
            (show_count(step), show_excess(mean, terms), _band_ends(low, high, comparison))
            for step, mean, low, high in zip(band.steps, band.mean, band.low, band.high, strict=True)
        )
        blocks += [
            Words(words),
            Table("The band at its checkpoints", ("step", "difference", "band"), rows, numeric=(0, 1, 2), folded=True),
        ]
    if comparison.drift is not None:
        drift = comparison.drift
        head = "It falls behind as training goes on" if drift.found else "No drift is shown"
        blocks.append(
            Words(
                f"{head}: over the last half the line reaches {terms.show(drift.at_horizon)} at step "
                f"{drift.horizon:,}, against {terms.size(drift.limit)}."
            )
        )
    return Part("The paired curves", tuple(blocks))


def _why_no_band(comparison: Comparison, runs: Sequence[ArmRun]) -> str:
    pairs = [] if not comparison.paired else _pairs(comparison, runs)
    found = curve_excesses(pairs, terms=comparison.terms) if len(pairs) > 1 else ""
    return found if found and isinstance(found, str) else "it takes 2 paired seeds with curves late in training"


def _pairs(comparison: Comparison, runs: Sequence[ArmRun]) -> list[Pair]:
    """The pairs that the verdict rests on."""
    every = pair_up(runs, candidate=comparison.candidate, reference=comparison.reference)
    return [pair for pair in every if pair.seed in comparison.seeds]


def _band_ends(low: float, high: float, comparison: Comparison) -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return "diverged"
    return show_ends(low, high, comparison.terms)


def gate_part(comparison: Comparison, *, brief: bool = False) -> Part:
    """Every gate: what was checked, those that did not pass first, and what was not.

    Args:
        comparison: One candidate against the reference.
        brief: Only those that did not pass, and how many did.
    """
    if not comparison.gates:
        return Part("Gates", (Words("No gate was checked.", "missing"),))
    checked = sorted((gate for gate in comparison.gates if gate.passed is not None), key=lambda gate: bool(gate.passed))
    unchecked = [gate for gate in comparison.gates if gate.passed is None]
    shown = [gate for gate in checked if not (brief and gate.passed)]
    passed = sum(gate.passed is True for gate in checked)
    blocks: list[Block] = [Words(f"{passed} of {len(comparison.gates)} gates passed.")] if brief else []
    if shown:
        blocks.append(_gate_table("Without these no verdict means anything", shown))
    if unchecked:
        blocks.append(_gate_table("Not checked: here the verdict takes the runs to be in order", unchecked))
    return Part("Gates", tuple(blocks))


def _gate_table(caption: str, gates: Sequence[Gate]) -> Table:
    head, rows = ("gate", "result", "seen"), tuple((gate.name, _passed(gate), gate.seen) for gate in gates)
    if any(gate.advice for gate in gates):
        head, rows = (*head, "what to do"), tuple((*row, gate.advice) for row, gate in zip(rows, gates, strict=True))
    tones: dict[bool | None, Tone] = {False: "bad", None: "unsure", True: "good"}
    return Table(caption, head, rows, named=(0,), tones=tuple(tones[gate.passed] for gate in gates), cards=True)


def _passed(gate: Gate) -> str:
    if gate.passed is None:
        return "not checked"
    return "passed" if gate.passed else "not passed"


MOST_POINTS = 300
"""Points of one curve in the page; more cannot be told apart, and make it heavy."""
_LEAST_POINTS = 30

Values = list[float | None]


def curves_of(
    comparison: Comparison, runs: Sequence[ArmRun], *, most: int = FULL.numbers, brief: bool = False
) -> dict[str, Any] | None:
    """Numbers and names for the chart; None where no run of both arms has a curve.

    Args:
        comparison: One candidate against the reference.
        runs: Of all arms.
        most: Numbers of all curves together.
        brief: The means alone, without the seeds.

    Numerics:
        The mean of an arm stands where every run of it has a finite value. The excess is that of
        `validate.curves.curve_excesses`. Values keep 7 significant digits.
    """
    used = set(comparison.seeds)
    ours, theirs = (
        [run for run in runs if run.arm == arm and run.seed in used and run.curve]
        for arm in (comparison.reference, comparison.candidate)
    )
    if not ours or not theirs:
        return None
    steps = sorted({step for run in (*ours, *theirs) for step, _ in run.curve})
    seeds = [] if brief else sorted({run.seed for run in (*ours, *theirs)})
    if most < _LEAST_POINTS * (5 + 3 * len(seeds)):
        seeds = []  # the means alone
    points = min(MOST_POINTS, max(_LEAST_POINTS, most // (5 + 3 * len(seeds))))
    kept = _thin(steps, comparison.band.steps if comparison.band else (), most=points)
    return {
        "steps": kept,
        "thinned": len(kept) < len(steps),
        "num_steps": len(steps),
        "of": "training loss" if ours[0].curve_of == "loss" else comparison.terms.metric,
        "seeds": seeds,
        "arms": [_arm(arm, kept, seeds) for arm in (ours, theirs)],
        "excess": _excess(comparison, runs, kept, seeds),
    }


def _arm(runs: list[ArmRun], steps: list[int], seeds: list[int]) -> dict[str, Any]:
    rows = {run.seed: _row(dict(run.curve), steps) for run in runs}
    return {
        "name": runs[0].arm,
        "mean": _mean([rows[seed] for seed in rows]),
        "seeds": [rows.get(seed) for seed in seeds],
    }


def _excess(
    comparison: Comparison, runs: Sequence[ArmRun], steps: list[int], seeds: list[int]
) -> dict[str, Any] | None:
    """Excess of each seed and its mean, the band at its checkpoints, and what they are held against."""
    if not comparison.paired:
        return None
    pairs = _pairs(comparison, runs)
    found = curve_excesses(pairs, terms=comparison.terms)
    if isinstance(found, str):
        return None
    at, excesses = found
    rows = {
        pair.seed: _row(dict(zip(at, row.tolist(), strict=True)), steps)
        for pair, row in zip(pairs, excesses, strict=True)
    }
    band = comparison.band
    return {
        "mean": _mean(list(rows.values())),
        "seeds": [rows.get(seed) for seed in seeds],
        "low": _row(dict(zip(band.steps, band.low, strict=True)), steps) if band else None,
        "high": _row(dict(zip(band.steps, band.high, strict=True)), steps) if band else None,
        "limit": seven_digits(2 * comparison.terms.margins[1]),
        "unit": comparison.terms.unit,
    }


def _row(values: dict[int, float], steps: list[int]) -> Values:
    return [seven_digits(values[step]) if step in values else None for step in steps]


def _mean(rows: list[Values]) -> Values:
    columns = zip(*rows, strict=True)
    return [
        None
        if any(value is None for value in column)
        else seven_digits(math.fsum(v for v in column if v is not None) / len(column))
        for column in columns
    ]


def _thin(steps: list[int], checkpoints: Sequence[int], *, most: int) -> list[int]:
    """At most so many, evenly, the ends and the checkpoints always among them."""
    if len(steps) <= most:
        return steps
    stride = (len(steps) - 1) / (most - 1)
    chosen = {steps[round(place * stride)] for place in range(most)}
    return sorted(chosen | set(checkpoints))
