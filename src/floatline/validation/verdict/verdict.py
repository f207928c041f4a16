"""The verdict: look by look, with the gates, the curves and the noise floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from floatline.errors import ComparisonError
from floatline.validation.verdict.comparison import Band, Comparison, Drift, Gate, Look, NoiseFloor, PowerPlan, Verdict
from floatline.validation.verdict.curves import curve_excesses, fit_drift, simultaneous_band
from floatline.validation.verdict.gates import (
    check_broken,
    check_completed,
    check_noise,
    check_scale,
    evidence_gates,
    setup_gates,
)
from floatline.validation.verdict.notes import flags_of, notes_of
from floatline.validation.verdict.pairs import BROKEN, NUDGED, REFERENCE, ArmRun, Pair, pair_up
from floatline.validation.verdict.power import is_futile, judge_interval, judge_look, measure_noise
from floatline.validation.verdict.rare_seeds import find_early_signs, find_far_worse
from floatline.validation.verdict.resolution import least_spread
from floatline.validation.verdict.terms import Terms, seeds_to_bound

NO_SPREAD = "every pair differs by the same: the metric is too coarse, or say by --resolution in which steps it moves"


def decide(
    runs: Sequence[ArmRun],
    *,
    candidate: str,
    terms: Terms,
    reference: str = REFERENCE,
    plan: PowerPlan | None = None,
) -> Comparison:
    """The verdict on one candidate, from all runs that there are.

    The looks are taken in order, and the first one that decides is the last: seeds beyond it change nothing, unless
    one of them diverged or shows that the arms themselves are wrong.
    What decides, in this order:

    1. A gate on the arms themselves (`gates.setup_gates`): REFUSED, at any number of seeds.
    2. The candidate diverged where the reference did not, or lost all of the metric: FAIL, at any number of seeds.
    3. Any other gate (`gates.evidence_gates`, a broken candidate that passes): REFUSED.
    4. The interval of the look: PASS, FAIL, MARGINAL, or go on; from 5 seeds on also an end where the last look
       cannot decide.
    5. A noise floor above half the margin holds everything but a FAIL back: go on, and REFUSED where no look is left.
    6. A PASS whose drift or departure from FP32's curve is shown becomes MARGINAL; one whose curve is not shown
       to stay near goes on, and is INCONCLUSIVE where no look is left.
    7. Where a share of bad seeds is to be ruled out: a PASS with a spike or left-out updates in a seed, unlike the
       others, becomes MARGINAL.

    Args:
        runs: Every arm of every seed, in the order in which the seeds were planned; arms of other candidates are
            not looked at. 'fp32-nudged' and 'broken' are used where they are there.
        candidate: Name of the arm that is judged.
        terms: Metric, margins, looks.
        reference: Name of the arm that it is compared with.
        plan: What was expected before the start, for the report.
    """
    return _judge(runs, candidate, terms, reference, plan)[0]


def next_look(runs: Sequence[ArmRun], *, candidate: str, terms: Terms, reference: str = REFERENCE) -> int | None:
    """How many seeds to have before looking again; None where it is decided, or no look is left."""
    comparison, final = _judge(runs, candidate, terms, reference, None)
    if final:
        return None
    taken = comparison.looks[-1].num_seeds if comparison.looks else 0
    return next((look for look in terms.looks if look > taken), None)


@dataclass(frozen=True)
class _Evidence:
    """Everything about the first n pairs."""

    pairs: tuple[Pair, ...]
    gates: tuple[Gate, ...]
    noise: NoiseFloor | None = None
    band: Band | None = None
    drift: Drift | None = None
    no_curves: str = ""
    far_worse: Mapping[int, str] = field(default_factory=dict[int, str])
    early_signs: Mapping[int, str] = field(default_factory=dict[int, str])
    least_sd: float = 0.0


def _judge(
    runs: Sequence[ArmRun], candidate: str, terms: Terms, reference: str, plan: PowerPlan | None
) -> tuple[Comparison, bool]:
    """The comparison so far, and whether it is final, so that no more seeds could change it."""
    known = {run.arm for run in runs}
    for arm in (reference, candidate):
        if arm not in known:
            raise ComparisonError(
                f"No run of arm {arm!r} was given. There is: {', '.join(sorted(known)) or 'nothing'}."
            )
    everything = pair_up(runs, candidate=candidate, reference=reference)[: terms.looks[-1]]
    blank = Comparison(
        "INCONCLUSIVE", "", reference, candidate, terms, None, None, tuple(p.seed for p in everything), plan=plan
    )
    setup = setup_gates(everything, terms)
    looks = [look for look in terms.looks if look <= len(everything)]
    comparison, final = blank, False
    if any(gate.passed is False for gate in setup) or any(pair.ruined(terms) for pair in everything) or not looks:
        evidence = _gather(runs, everything, terms, reference, candidate)
        comparison, final = _without_look(blank, evidence)
        return _finished(comparison, runs, evidence), final
    taken: tuple[Look, ...] = ()
    evidence = _Evidence((), ())
    for num in looks:
        evidence = _gather(runs, everything[:num], terms, reference, candidate)
        comparison, final = _at_look(replace(blank, looks=taken), evidence)
        taken = comparison.looks
        if final:
            break
    return _finished(comparison, runs, evidence), final or len(taken) == len(terms.looks)


def _gather(runs: Sequence[ArmRun], pairs: tuple[Pair, ...], terms: Terms, reference: str, candidate: str) -> _Evidence:
    """Gates, noise floor and curves of these pairs."""
    gates = (*setup_gates(pairs, terms), *evidence_gates(pairs, terms))
    sound = all(
        gate.passed is not False for gate in gates if gate.name in ("reference-finite", "scale-fits", "completed")
    )
    noise, broken, far_worse, early_signs, least_sd = None, None, {}, {}, 0.0
    if sound:
        seeds = {pair.seed for pair in pairs}
        nudged = [pair for pair in pair_up(runs, candidate=NUDGED, reference=reference) if pair.seed in seeds]
        if check_completed(nudged).passed and check_scale(nudged, terms).passed:
            noise = measure_noise(nudged, terms=terms)
        else:
            nudged = []
        if not any(pair.ruined(terms) for pair in pairs):
            ends = [run.metric for pair in pairs for run in (pair.reference, pair.candidate)]
            far_worse, least_sd = find_far_worse(pairs, nudged, terms), least_spread(ends, terms)
            early_signs = find_early_signs(pairs, nudged)
        if candidate != BROKEN:
            wrong = [pair for pair in pair_up(runs, candidate=BROKEN, reference=reference) if pair.seed in seeds]
            broken = _verdict_on_broken(wrong, terms)
    gates = (*gates, check_noise(noise, terms), check_broken(broken))
    curves = curve_excesses(pairs, terms=terms) if sound else "the arms cannot be compared"
    evidence = _Evidence(pairs, gates, noise, far_worse=far_worse, early_signs=early_signs, least_sd=least_sd)
    if isinstance(curves, str):
        return replace(evidence, no_curves=curves)
    steps, excesses = curves
    band = simultaneous_band(steps, excesses, terms=terms, curve_of=pairs[0].reference.curve_of)
    return replace(evidence, band=band, drift=fit_drift(steps, excesses, terms=terms))


def _verdict_on_broken(pairs: Sequence[Pair], terms: Terms) -> Verdict | None:
    """What the interval says of the broken arm; None where it raised, or on too few seeds."""
    if not check_completed(pairs).passed or not check_scale(pairs, terms).passed:
        return None
    if any(pair.ruined(terms) for pair in pairs):
        return "FAIL"
    verdict: Verdict | None = None
    for num in terms.looks:
        if num > len(pairs):
            return verdict
        look = judge_look([pair.excess(terms) for pair in pairs[:num]], terms=terms)
        # One that is equal to FP32 without any spread passes, too.
        verdict = judge_interval(look.low, look.high, terms=terms, last=num == terms.looks[-1])
        if verdict != "INCONCLUSIVE":
            return verdict
    return verdict


def _without_look(blank: Comparison, evidence: _Evidence) -> tuple[Comparison, bool]:
    """Setup gates, divergence, and too few seeds: what is decided without an interval."""
    terms = blank.terms
    ruined = [pair for pair in evidence.pairs if pair.ruined(terms)]
    wrong = any(gate.passed is False for gate in setup_gates(evidence.pairs, terms))
    if wrong or not ruined:
        return _refused(replace(blank, gates=evidence.gates)), wrong
    excesses = ()
    if check_scale(evidence.pairs, terms).passed:
        excesses = tuple(pair.excess(terms) for pair in evidence.pairs)
    seeds = ", ".join(str(pair.seed) for pair in ruined)
    what = "diverged" if any(pair.diverged for pair in ruined) else f"lost all of its {terms.metric}"
    reason = f"it {what} in {len(ruined)} of {len(evidence.pairs)} seeds (seed {seeds}), where the reference did not"
    failed = replace(blank, verdict="FAIL", reason=reason, gates=evidence.gates, excesses=excesses)
    return replace(failed, noise=evidence.noise, band=evidence.band), True


def _at_look(blank: Comparison, evidence: _Evidence) -> tuple[Comparison, bool]:
    """The comparison at one look, and whether it is the last."""
    terms = blank.terms
    seeds = tuple(pair.seed for pair in evidence.pairs)
    so_far = replace(
        blank, seeds=seeds, gates=evidence.gates, noise=evidence.noise, band=evidence.band, drift=evidence.drift
    )
    failed = {gate.name for gate in so_far.failed_gates}
    if "scale-fits" in failed:
        return _refused(so_far), True
    excesses = tuple(pair.excess(terms) for pair in evidence.pairs)
    look = judge_look(excesses, terms=terms, least_sd=evidence.least_sd)
    verdict, reason, final = _weigh(look, evidence, terms)
    so_far = replace(so_far, difference=look.mean, interval=(look.low, look.high), excesses=excesses)
    taken = replace(look, verdict=verdict)
    if failed - {"noise-floor"}:
        return replace(_refused(so_far), looks=(*blank.looks, replace(look, verdict="REFUSED"))), True
    if failed and verdict != "FAIL":
        # More seeds narrow the noise floor, so that it refuses for good only where no look is left or would help.
        return replace(_refused(so_far), looks=(*blank.looks, replace(look, verdict="REFUSED"))), _hopeless(look, terms)
    return replace(so_far, verdict=verdict, reason=reason, looks=(*blank.looks, taken)), final


def _weigh(look: Look, evidence: _Evidence, terms: Terms) -> tuple[Verdict, str, bool]:
    """Verdict, reason, and whether it is final, of the interval and the curves."""
    first, second = (terms.size(margin) for margin in terms.margins)
    ends = f"[{terms.show(look.low)}, {terms.show(look.high)}]"
    if look.verdict == "FAIL":
        return "FAIL", f"the whole interval {ends} is {second} worse or more", True
    if look.verdict == "MARGINAL":
        return "MARGINAL", f"the interval {ends} stays within {second}, and not within {first}", True
    if look.verdict == "INCONCLUSIVE":
        if not look.sd:
            return "INCONCLUSIVE", NO_SPREAD, False
        if is_futile(look, terms=terms):
            return (
                "INCONCLUSIVE",
                f"pairs spread by {terms.size(look.sd)}, too wide for the last look",
                True,
            )
        return "INCONCLUSIVE", f"the interval {ends} reaches over {first}", False
    drift, band = evidence.drift, evidence.band
    if drift is not None and drift.found:
        there = f"{terms.show(drift.at_horizon)} at step {drift.horizon:,}"
        return "MARGINAL", f"it is within {first} now, but falls behind: the line reaches {there}", True
    if band is not None and band.left:
        return (
            "MARGINAL",
            f"it ends within {first}, but its curve leaves FP32's by more than {terms.size(band.limit)}",
            True,
        )
    if band is not None and not band.holds:
        return (
            "INCONCLUSIVE",
            f"it ends within {first}, but its curve is not shown to stay within {terms.size(band.limit)}",
            False,
        )
    if evidence.far_worse:
        seeds = ", ".join(evidence.far_worse.values())
        return "MARGINAL", f"it is within {first} on average, but {seeds}, far more than the other seeds", True
    if terms.rare is not None and evidence.early_signs:
        seen = ", ".join(evidence.early_signs.values())
        return "MARGINAL", f"it is within {first}, but {seen}, unlike the other seeds: a sign of bad ones", True
    if terms.rare is not None and look.num_seeds < (needed := seeds_to_bound(terms.rare)):
        return (
            "INCONCLUSIVE",
            f"it is within {first}; {needed} seeds are to rule out {100 * terms.rare:g} % bad ones",
            False,
        )
    return "PASS", f"the whole interval {ends} is within {first}", True


def _hopeless(look: Look, terms: Terms) -> bool:
    return look.num_seeds == terms.looks[-1] or is_futile(look, terms=terms)


def _refused(comparison: Comparison) -> Comparison:
    gate = comparison.failed_gates[0]
    return replace(comparison, verdict="REFUSED", reason=gate.seen)


def _finished(comparison: Comparison, runs: Sequence[ArmRun], evidence: _Evidence) -> Comparison:
    """With flags and notes."""
    return replace(
        comparison,
        flags=flags_of(comparison, evidence.pairs, signs=tuple(evidence.early_signs.values())),
        notes=notes_of(comparison, runs, evidence.pairs, no_curves=evidence.no_curves),
    )
