"""The gates: conditions without which no verdict means anything, each one function and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from floatline.errors import ComparisonError
from floatline.validation.verdict.comparison import Gate, NoiseFloor, Verdict
from floatline.validation.verdict.pairs import NUM_FIRST_LOSSES, ArmRun, Pair
from floatline.validation.verdict.terms import Terms

LEAST_GAIN = 0.1
MOST_SKIPPED = 0.05
MOST_START_DIFFERENCE = 0.02


def check_completed(pairs: Sequence[Pair]) -> Gate:
    """No arm raised. A run that diverged has an end of its own, and is no error."""
    raised = [run for run in _runs(pairs) if run.error and not run.diverged]
    if not raised:
        return Gate("completed", True, "every run came to its end")
    run = raised[0]
    return Gate("completed", False, f"{_name(run)} raised {run.error}", "Run that arm alone, fix it, and start again.")


def check_steps(pairs: Sequence[Pair]) -> Gate:
    """Every arm took at least one step. A run that diverged is judged by that alone."""
    counts = [(run, run.steps if run.applied is None else run.applied) for run in _runs(pairs) if not run.lost]
    known = [(run, count) for run, count in counts if count is not None]
    idle = [run for run, count in known if count == 0]
    if idle:
        skipped = f", {idle[0].skipped:,} were skipped" if idle[0].skipped else ""
        advice = "Train for more steps." if not idle[0].skipped else f"Run floatline diagnose under {idle[0].arm}."
        return Gate("steps-taken", False, f"no step was applied in {_name(idle[0])}{skipped}", advice)
    if len(known) < len(counts) or not counts:
        return Gate("steps-taken", None, "some run did not record its steps, or none came to its end")
    return Gate("steps-taken", True, f"at least {min(count for _, count in known):,} steps in every run")


def check_weights(pairs: Sequence[Pair]) -> Gate:
    """Training moved the weights of every arm."""
    runs = _runs(pairs)
    still = [run for run in runs if run.weights_changed is False and not run.lost]
    if still:
        advice = f"Check that the optimizer holds the model's parameters and lr > 0, or diagnose {still[0].arm}."
        return Gate("weights-changed", False, f"the weights of {_name(still[0])} are those it started with", advice)
    if not runs or any(run.weights_changed is None for run in runs):
        return Gate("weights-changed", None, "some run did not record whether its weights changed")
    return Gate("weights-changed", True, "the weights changed in every run")


def check_reference_finite(pairs: Sequence[Pair], terms: Terms) -> Gate:
    """FP32 itself trained."""
    lost = [pair.reference for pair in pairs if pair.reference.lost]
    if not lost:
        return Gate("reference-finite", True, "the reference ended finite in every seed")
    advice = "Fix the FP32 training first: floatline diagnose finds what it suffers from."
    return Gate("reference-finite", False, f"{_name(lost[0])} ended with {terms.metric} {lost[0].metric:g}", advice)


def check_scale(pairs: Sequence[Pair], terms: Terms) -> Gate:
    """The metric has a value on the scale of the comparison."""
    try:
        for pair in pairs:
            if not pair.reference.lost and not pair.reference.error and not pair.candidate.error:
                pair.excess(terms)
    except ComparisonError as error:
        seen, _, advice = str(error).partition(". ")
        return Gate("scale-fits", False, seen, advice)
    return Gate("scale-fits", True, f"every {terms.metric} has a value on the {terms.scale} scale")


def check_same_start(pairs: Sequence[Pair]) -> Gate:
    """The first loss of both arms is the same, but for rounding: same weights, same batch, same loss."""
    seen = [
        (0.0 if a == b else abs(b - a) / whole if whole else math.inf, pair)
        for pair in pairs
        for a, b, whole in [_first(pair)]
        if a is not None and b is not None and math.isfinite(a) and math.isfinite(b)
    ]
    if not seen:
        return Gate("same-start", None, "no first loss was recorded")
    worst, pair = max(seen, key=lambda entry: entry[0])
    text = f"the first losses differ by {100 * worst:.2g} % in seed {pair.seed}"
    if math.isinf(worst):
        text = f"the first losses are {_first(pair)[0]:g} and {_first(pair)[1]:g} in seed {pair.seed}"
    if worst <= MOST_START_DIFFERENCE:
        return Gate("same-start", True, text)
    advice = "Give both arms the same weights, batches and loss; if they have them, diagnose the forward pass."
    return Gate("same-start", False, text, advice)


def check_arms_differ(pairs: Sequence[Pair], terms: Terms) -> Gate:
    """The candidate computes in another precision: its first 20 losses are not FP32's to the last bit."""
    advice = "Check that autocast or the plan is on in the candidate, and off in the reference."
    for pair in pairs:
        ours, theirs = (run.first_losses[:NUM_FIRST_LOSSES] for run in (pair.reference, pair.candidate))
        # A few losses, perhaps rounded in a log, may agree by chance: then the end must agree as well.
        enough = len(ours) == NUM_FIRST_LOSSES or pair.reference.metric == pair.candidate.metric
        if ours and ours == theirs and enough:
            text = f"both arms have the same first {len(ours)} losses, bit by bit, in seed {pair.seed}"
            return Gate("arms-differ", False, text, advice)
    if not pairs:
        return Gate("arms-differ", None, "no pair is complete")
    # Losses that differ show two arithmetics, whatever a coarse metric ends at; and one seed may end equal by chance.
    silent = [pair for pair in pairs if not (pair.reference.first_losses and pair.candidate.first_losses)]
    equal = all(pair.reference.metric == pair.candidate.metric for pair in pairs)
    if equal and len(silent) == len(pairs) >= terms.looks[0]:
        text = f"{terms.metric} is the same in both arms, bit by bit, in all {len(pairs)} seeds"
        if not any(run.steps or len(run.curve) > 1 for run in _runs(pairs)):
            advice = f"No run shows a step of training: check that it trains at all. {advice}"
            return Gate("arms-differ", False, f"{text}, and nothing shows that any of them was trained", advice)
        return Gate("arms-differ", False, text, f"{advice} If they are, take a finer metric.")
    return Gate("arms-differ", True, "the arms are not bit-identical")


def check_learned(pairs: Sequence[Pair], terms: Terms) -> Gate:
    """FP32 gained at least 10 % of where it started, so that there is something to lose."""
    ends = _start_and_end(pairs, terms)
    if ends is None:
        return Gate("reference-learned", None, f"the {terms.metric} before training was not recorded")
    start, end = ends
    gain = start - end
    text = f"the reference went from {_shown(start, terms)} to {_shown(end, terms)}"
    if gain > 0 and gain >= LEAST_GAIN * abs(start):
        return Gate("reference-learned", True, text)
    return Gate("reference-learned", False, f"{text}, a gain below 10 %", "Train longer, or fix the FP32 training.")


def check_late_enough(pairs: Sequence[Pair], terms: Terms) -> Gate:
    """The margin is at most a tenth of what FP32 gained: else everything is equal, because nothing happened yet."""
    ends = _start_and_end(pairs, terms)
    if ends is None:
        return Gate("late-enough", None, f"the {terms.metric} before training was not recorded")
    start, end = ends
    margin = terms.margins[0] if terms.scale == "difference" else terms.margins[0] * abs(end)
    text = f"the margin is {margin:.3g} {terms.metric}, the reference gained {start - end:.3g}"
    if margin <= LEAST_GAIN * (start - end):
        return Gate("late-enough", True, text)
    return Gate("late-enough", False, f"{text}, less than ten times as much", "Train longer, or take a smaller margin.")


def check_skipped(pairs: Sequence[Pair]) -> Gate:
    """No arm left out more than 5 % of its updates."""
    shares = [(run.skipped / run.steps, run) for run in _runs(pairs) if run.skipped is not None and run.steps]
    if not shares:
        return Gate("updates-applied", None, "skipped updates were not recorded")
    share, run = max(shares, key=lambda entry: entry[0])
    if share <= MOST_SKIPPED:
        text = (
            f"at most {100 * share:.1f} % of updates were skipped, in {_name(run)}"
            if share
            else "no update was skipped"
        )
        return Gate("updates-applied", True, text)
    text = f"{100 * share:.1f} % of updates were skipped in {_name(run)}, more than {100 * MOST_SKIPPED:.0f} %"
    advice = f"Train longer, start with a smaller loss scale, or run floatline diagnose under {run.arm}."
    return Gate("updates-applied", False, text, advice)


def check_noise(noise: NoiseFloor | None, terms: Terms) -> Gate:
    """FP32 against nudged FP32 is known to half the margin."""
    if noise is None:
        return Gate("noise-floor", None, "FP32 was not run against nudged FP32")
    if noise.half_width == 0:
        return Gate("noise-floor", None, "the nudged arm equals FP32 to the last bit, so that no noise was seen")
    half = terms.size(noise.half_width)
    text = f"FP32 against nudged FP32 is known to {half}"
    if noise.half_width <= terms.margins[0] / 2:
        return Gate("noise-floor", True, text)
    advice = "Run more seeds, train longer, evaluate on more data, or take a wider margin."
    return Gate("noise-floor", False, f"{text}, not to half the margin", advice)


def check_broken(verdict: Verdict | None) -> Gate:
    """The candidate that is wrong on purpose does not pass."""
    if verdict is None:
        return Gate("broken-fails", None, "no broken candidate was run, or on too few seeds")
    if verdict != "PASS":
        return Gate("broken-fails", True, f"the broken candidate ends in {verdict}")
    advice = "Train longer, or take a metric that can tell: this comparison cannot fail."
    return Gate("broken-fails", False, "the broken candidate passes", advice)


def check_num_seeds(pairs: Sequence[Pair], terms: Terms) -> Gate:
    """There are as many pairs as the smallest look asks for."""
    text = f"{len(pairs)} of {terms.looks[0]} seeds for the first look"
    if len(pairs) >= terms.looks[0]:
        return Gate("enough-seeds", True, f"{len(pairs)} paired seeds")
    return Gate("enough-seeds", False, text, f"Run both arms on at least {terms.looks[0]} seeds.")


def setup_gates(pairs: Sequence[Pair], terms: Terms) -> tuple[Gate, ...]:
    """What is wrong with the arms themselves: no more seeds can fix it, and not even a divergence counts."""
    return (
        check_completed(pairs),
        check_steps(pairs),
        check_weights(pairs),
        check_reference_finite(pairs, terms),
        check_same_start(pairs),
        check_arms_differ(pairs, terms),
    )


def evidence_gates(pairs: Sequence[Pair], terms: Terms) -> tuple[Gate, ...]:
    """What the runs cannot show. A candidate that diverged where FP32 did not is a FAIL all the same."""
    return (
        check_scale(pairs, terms),
        check_learned(pairs, terms),
        check_late_enough(pairs, terms),
        check_skipped(pairs),
        check_num_seeds(pairs, terms),
    )


def _runs(pairs: Sequence[Pair]) -> list[ArmRun]:
    return [run for pair in pairs for run in (pair.reference, pair.candidate)]


def _name(run: ArmRun) -> str:
    return f"{run.arm}, seed {run.seed}"


def _first(pair: Pair) -> tuple[float | None, float | None, float]:
    """The first training loss of both arms, else the metric before training; and what its difference is a share of.

    A metric that starts at 0, such as an accuracy, is measured by the way that the reference went.
    """
    ours, theirs = pair.reference, pair.candidate
    if ours.first_losses and theirs.first_losses:
        return ours.first_losses[0], theirs.first_losses[0], abs(ours.first_losses[0])
    if ours.start is None:
        return None, None, 0.0
    return ours.start, theirs.start, max(abs(ours.start), abs(ours.metric - ours.start))


def _start_and_end(pairs: Sequence[Pair], terms: Terms) -> tuple[float, float] | None:
    """Mean of the reference before and after training, turned so that lower is better; None where not recorded."""
    runs = [pair.reference for pair in pairs if not pair.reference.lost]
    starts = [run.start for run in runs if run.start is not None and math.isfinite(run.start)]
    if not runs or len(starts) < len(runs):
        return None
    start, end = sum(starts) / len(runs), sum(run.metric for run in runs) / len(runs)
    if terms.scale == "log-error":
        return 1.0 - start, 1.0 - end
    return (-start, -end) if terms.higher_is_better else (start, end)


def _shown(value: float, terms: Terms) -> str:
    """A value that `_start_and_end` has turned, as the user knows it."""
    if terms.scale == "log-error":
        value = 1.0 - value
    elif terms.higher_is_better:
        value = -value
    return f"{value:.4g}"
