"""What a verdict rests on: the interval look by look, the paired curves, the gates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from floatline.report.document.document import Block, Curves, Drawing, Part, Table, Tone, Words
from floatline.report.validation.curves import curves_of
from floatline.report.validation.drawings import Bar, intervals_svg
from floatline.report.validation.interval_line import draw_line
from floatline.report.validation.texts import TONES, show_count, show_ends, show_excess, show_value

if TYPE_CHECKING:
    from floatline.validation.verdict.comparison import Comparison, Gate
    from floatline.validation.verdict.pairs import ArmRun

_MOST_OPEN_SEEDS = 5


def interval_part(comparison: Comparison, runs: Sequence[ArmRun]) -> Part:
    """Every look against the margins, and the seeds behind it."""
    terms = comparison.terms
    blocks: list[Block] = []
    if comparison.looks:
        blocks += [_looks_drawing(comparison), _looks_table(comparison)]
    else:
        blocks.append(Words("No look was taken, so that there is no interval.", "missing"))
    if comparison.noise is not None:
        noise = comparison.noise
        known = terms.show(noise.half_width).lstrip("+") if math.isfinite(noise.half_width) else "nothing"
        mean = show_excess(noise.mean, terms)
        blocks.append(
            Words(
                f"The noise floor: FP32 against FP32 with its start nudged by 1e-7 differs by {mean}, known to "
                f"{known}, from {noise.num_seeds} seeds. Nothing smaller can be seen here."
            )
        )
    blocks += _seeds_table(comparison, runs)
    return Part("The interval against the margins", tuple(blocks))


def _looks_drawing(comparison: Comparison) -> Drawing:
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
        for look in comparison.looks
    ]
    labels = (terms.show(terms.margins[0]), terms.show(terms.margins[1]))
    said = [
        f"after {look.num_seeds} {what} {terms.show(look.mean)}, interval {show_ends(look.low, look.high, terms)}, "
        f"{look.verdict}"
        for look in comparison.looks
    ]
    summary = f"Difference from {comparison.reference}: {'; '.join(said)}. PASS to {labels[0]}, FAIL from {labels[1]}."
    last = comparison.looks[-1]
    plain = draw_line(last.mean, last.low, last.high, margins=terms.margins, labels=labels)
    return Drawing(intervals_svg(bars, margins=terms.margins, labels=labels, summary=summary), summary, plain)


def _looks_table(comparison: Comparison) -> Table:
    terms = comparison.terms
    rows = tuple(
        (
            show_count(look.num_seeds),
            terms.show(look.mean),
            terms.show(look.sd).lstrip("+"),
            f"{look.factor:.2f}",
            show_ends(look.low, look.high, terms),
            look.verdict,
        )
        for look in comparison.looks
    )
    return Table(
        "Look by look; the interval is mean ∓ k · sd" if comparison.paired else "The interval is mean ∓ t · error",
        (
            "seeds",
            "mean",
            "sd" if comparison.paired else "error",
            "k" if comparison.paired else "t",
            "interval",
            "says",
        ),
        rows,
        numeric=(0, 1, 2, 3, 4),
        tones=tuple(TONES[look.verdict] for look in comparison.looks),
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


def curve_part(comparison: Comparison, runs: Sequence[ArmRun]) -> Part:
    """Both arms over training, and the excess with its band."""
    terms = comparison.terms
    data = curves_of(comparison, runs)
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
        blocks.append(Words("No band could be drawn: it takes 2 paired seeds with curves.", "missing"))
    else:
        limit = terms.show(band.limit)
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
                f"{drift.horizon:,}, against {terms.show(drift.limit)}."
            )
        )
    return Part("The paired curves", tuple(blocks))


def _band_ends(low: float, high: float, comparison: Comparison) -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return "diverged"
    return show_ends(low, high, comparison.terms)


def gate_part(comparison: Comparison) -> Part:
    """Every gate, those that did not pass first."""
    if not comparison.gates:
        return Part("Gates", (Words("No gate was checked.", "missing"),))
    order: dict[bool | None, int] = {False: 0, None: 1, True: 2}
    gates = sorted(comparison.gates, key=lambda gate: order[gate.passed])
    head, rows = ("gate", "result", "seen"), tuple((gate.name, _passed(gate), gate.seen) for gate in gates)
    if any(gate.advice for gate in gates):
        head, rows = (*head, "what to do"), tuple((*row, gate.advice) for row, gate in zip(rows, gates, strict=True))
    tones: dict[bool | None, Tone] = {False: "bad", None: "unsure", True: "good"}
    table = Table(
        "Without these no verdict means anything",
        head,
        rows,
        named=(0,),
        tones=tuple(tones[gate.passed] for gate in gates),
        cards=True,
    )
    return Part("Gates", (table,))


def _passed(gate: Gate) -> str:
    if gate.passed is None:
        return "not checked"
    return "passed" if gate.passed else "not passed"
