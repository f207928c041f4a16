"""The line that brings FP32's results back is to blame, also where lines above it would as well."""

import math
from dataclasses import replace

import pytest

from floatline.causes import find_cause
from floatline.diagnosis.beside_fp32 import NUDGE, Beside, StepErrors, compare_with_fp32, keep_steady, look_closer
from floatline.diagnosis.blame import ANY, Blame, name_own_line
from floatline.diagnosis.gaps import Gap, Shown, measure_difference, measure_loss_gap
from floatline.diagnosis.scripts.against_fp32 import _blame_a_line
from floatline.diagnosis.scripts.script_report import ScriptDiagnosis
from floatline.findings import Finding

FP32 = Shown(tuple(2.0 - 0.02 * i for i in range(60)), lines={"a.py:90": (4.0,)})
APART = Shown(tuple(2.0 - 0.005 * i for i in range(60)), lines={"a.py:90": (3.0,)})


def at(line, cause=ANY):
    return Finding(find_cause(cause), "seen", "fix", file="a.py", line=line)


def lines_from(*lines):
    return [at(line) for line in lines]


class Runs:
    """A script that is FP32's if one of some lines is, or another set."""

    def __init__(self, *helping):
        self.helping, self.asked = helping, []

    def __call__(self, lines):
        numbers = [line for _, line in lines]
        self.asked.append(numbers)
        return FP32 if any(set(group) <= set(numbers) for group in self.helping) else APART


@pytest.fixture
def beside():
    return Beside(gap=measure_loss_gap(APART, FP32))


def test_a_suspect_that_helps_is_to_blame_after_one_run(beside):
    runs = Runs([30])
    blamed = Blame(beside, FP32, runs).find([at(30, "cancellation")], lines_from(10, 20, 30, 40))
    assert blamed.finding.line == 30
    assert runs.asked == [[30]]
    assert "100 %" in blamed.note


@pytest.mark.parametrize("guilty", range(1, 41))
def test_of_lines_that_hand_fp32_down_the_last_one_that_helps_is_to_blame(beside, guilty):
    runs = Runs(*([line] for line in range(1, guilty + 1)))
    blamed = Blame(beside, FP32, runs).find([], lines_from(*range(1, 41)))
    assert blamed.finding.line == guilty
    assert len(runs.asked) <= 7


def test_a_suspect_that_does_not_help_is_not_to_blame(beside):
    blamed = Blame(beside, FP32, Runs([30])).find([at(20, "cancellation")], lines_from(10, 20, 30, 40))
    assert blamed.finding.line == 30


def test_gradients_that_a_scale_is_missing_for_are_blamed_without_a_run(beside):
    runs = Runs([30])
    blamed = Blame(beside, FP32, runs).find([at(50, "gradient-underflow")], lines_from(10, 20, 30))
    assert (blamed.finding.line, runs.asked) == (50, [])


@pytest.mark.parametrize(("helping", "line"), [(30, 30), (10, 50)], ids=["the state", "another line"])
def test_gradients_that_a_scale_is_missing_for_are_not_blamed_where_a_state_is_to_blame(beside, helping, line):
    runs = Runs([helping])
    suspects, candidates = [at(50, "gradient-underflow")], [at(10), at(30, "optimizer-state-underflow")]
    blamed = Blame(beside, FP32, runs).find(suspects, candidates)
    assert (blamed.finding.line, runs.asked) == (line, [[30]])


def test_gradients_that_a_scale_is_missing_for_are_not_blamed_where_losses_are_those_of_fp32():
    read = Beside(gap=measure_loss_gap(FP32, FP32), lines={"a.py:90": measure_difference((3.0,), (4.0,))})
    blamed = Blame(read, FP32, Runs([30])).find([at(50, "gradient-underflow")], lines_from(10, 20, 30))
    assert blamed.finding.line == 30


def test_a_line_that_helps_by_chance_is_passed_over_for_one_that_helps_more(beside):
    some = Shown(tuple(0.3 * a + 0.7 * b for a, b in zip(APART.losses, FP32.losses, strict=True)))

    def run(lines):
        numbers = [line for _, line in lines]
        return FP32 if 20 in numbers else some if 40 in numbers else APART

    assert Blame(beside, FP32, run).find([], lines_from(10, 20, 30, 40)).finding.line == 20


def test_where_two_lines_are_needed_the_first_of_them_is_found(beside):
    assert Blame(beside, FP32, Runs([20, 40])).find([], lines_from(10, 20, 30, 40, 50)).finding.line == 20


def test_where_nothing_helps_nothing_is_to_blame(beside):
    blamed = Blame(beside, FP32, Runs()).find([at(20, "cancellation")], lines_from(10, 20, 30))
    assert blamed.finding is None
    assert blamed.note.startswith("2 runs")


def test_a_line_outside_of_modules_is_tried_alone_where_all_together_make_it_worse(beside):
    worse = Shown(tuple(5.0 * loss for loss in APART.losses))

    def run(lines):
        numbers = [line for _, line in lines]
        return FP32 if numbers == [20] else worse if 30 in numbers else APART

    rows = [replace(at(30), module="net.0"), at(20), replace(at(40), module="net.1")]
    assert Blame(beside, FP32, run).find([], rows).finding.line == 20


def test_a_candidate_with_a_known_cause_is_tried_before_the_others_are_halved(beside):
    runs = Runs([30])
    rows = [at(10), at(20), at(30, "accumulator-stagnation"), at(40)]
    assert Blame(beside, FP32, runs).find([], rows).finding.line == 30
    assert len(runs.asked) == 1


def test_what_a_nudge_does_as_well_is_no_part_of_what_must_be_gone():
    def near(share):
        return Shown((), lines={"a.py:90": tuple(x * (1 + share) for x in (4.0, 4.0, 4.0, 4.0, 4.0))})

    fp32 = near(0.0)
    gap = measure_difference(near(0.5).lines["a.py:90"], fp32.lines["a.py:90"])
    runs = {True: near(0.2), False: near(0.5)}

    def find(floors):
        read = Beside(gap=None, lines={"a.py:90": gap}, floors=floors)
        blame = Blame(read, fp32, lambda lines: fp32 if len(lines) == 4 else runs[("a.py", 30) in lines])
        return blame.find([], lines_from(10, 20, 30, 40)).finding.line

    assert find({"a.py:90": 0.2}) == 30
    assert find({}) == 10  # the twin: half of it is left with the line to blame, and nothing with all


def test_what_a_line_rounds_is_named_by_the_operation_after_it_that_cannot_bear_it(beside):
    log = replace(at(30, "rounded-onto-singularity"), seen="3 operands of log are exactly 0")
    runs = lambda lines: FP32 if ("a.py", 20) in lines and ("a.py", 30) in lines else APART  # noqa: E731
    found = Blame(beside, FP32, runs).find([], [at(10), at(20), log, at(40)]).finding
    assert (found.cause.id, found.line) == ("rounded-onto-singularity", 20)
    assert "line 30 reads what this line rounds" in found.seen


def test_a_difference_of_what_several_lines_round_is_named_itself(beside):
    wanted = {("a.py", line) for line in (20, 25, 30)}
    runs = lambda lines: FP32 if wanted <= set(lines) else APART  # noqa: E731
    found = Blame(beside, FP32, runs).find([], [at(10), at(20), at(25), at(30, "cancellation"), at(40)]).finding
    assert (found.cause.id, found.line) == ("cancellation", 30)
    assert "rounded from line 20 on" in found.seen
    far = [at(20), *lines_from(21, 22, 23, 24), at(30, "cancellation")]
    assert Blame(beside, FP32, runs).find([], [at(25), *far]).finding.cause.id == ANY  # the twin: too far away


def test_positions_that_several_lines_round_before_their_sine_are_the_fault_of_the_first_of_these(beside):
    wanted = {("a.py", line) for line in (20, 25, 30)}
    runs = lambda lines: FP32 if wanted <= set(lines) else APART  # noqa: E731
    sine = replace(at(30, "integer-not-exact"), seen="sin of numbers up to 6e4 is off by 115 %")
    found = Blame(beside, FP32, runs).find([], [at(10), at(20), at(25), sine, at(40)]).finding
    assert (found.cause.id, found.line) == ("integer-not-exact", 20)
    assert found.seen == "line 30 reads what this line rounds: sin of numbers up to 6e4 is off by 115 %"


@pytest.mark.parametrize(("read", "is_apart"), [((0.1, 0.3), True), ((1.31, 1.3), False)], ids=["metric", "mean loss"])
def test_losses_that_are_but_rounded_do_not_hide_another_number_that_is_apart(read, is_apart):
    fp32 = Shown(tuple(1.5 - 0.001 * i for i in range(60)), lines={"a.py:9": (0.9, 1.0) if is_apart else (1.47, 1.45)})
    own = Shown(tuple(1.5 - 0.004 * i for i in range(60)), lines={"a.py:9": read})
    rounded = StepErrors({step: abs(own.losses[step] / fp32.losses[step] - 1) for step in range(60)}, gradients=0.0)
    beside = compare_with_fp32(own, lambda nudge: fp32, rounded)
    assert not beside.is_apart
    assert bool(beside.apart) == is_apart


def test_a_run_that_fails_does_not_help(beside):
    blame = Blame(beside, FP32, lambda _: "it took too long")
    assert blame.find([at(20, "cancellation")], lines_from(10, 20)).finding is None
    raising = Blame(beside, FP32, lambda _: Shown(FP32.losses, error="RuntimeError"))
    assert raising.find([at(20, "cancellation")], []).finding is None


def test_a_number_that_is_read_is_asked_where_losses_are_together():
    read = Beside(gap=measure_loss_gap(FP32, FP32), lines={"a.py:90": measure_difference((3.0,), (4.0,))})
    assert Blame(read, FP32, Runs([30])).find([], lines_from(10, 20, 30, 40)).finding.line == 30


@pytest.mark.parametrize(
    ("own", "nudged", "other", "is_apart"),
    [
        (3.8, 4.001, 4.0, True),
        (3.8, 4.001, 4.05, False),  # a nudge the other way does as much
        (3.95, 4.0, 4.0, False),  # one percent
    ],
)
def test_a_number_slightly_apart_is_so_if_no_nudge_does_a_twentieth_of_it(own, nudged, other, is_apart):
    shown = {value: Shown(FP32.losses, lines={"a.py:90": (value,)}) for value in (own, nudged, other, 4.0)}
    runs = {0.0: shown[4.0], NUDGE: shown[nudged], -NUDGE: shown[other]}
    closer = look_closer(Beside(gap=measure_loss_gap(FP32, FP32)), shown[own], runs.__getitem__)
    assert (closer is not None) == is_apart
    if closer is not None:
        blame = Blame(closer, runs[0.0], lambda lines: runs[0.0] if lines[0][1] == 30 else shown[own])
        assert blame.find([], [at(20, "cancellation"), at(30, "cancellation")]).finding.line == 30


def moved(*sides, by=0.1):
    """FP32's losses with each sixth of them off to a side, in turns."""
    return Shown(tuple(loss + by * sides[i // 6 % len(sides)] for i, loss in enumerate(FP32.losses)))


@pytest.mark.parametrize(
    ("nudged", "other", "is_apart"),
    [
        (moved(1, by=0.001), moved(-1, by=0.001), True),
        (moved(1, -1), moved(-1, by=0.001), False),  # far from FP32, above and below it
        (moved(1, by=0.001), moved(1, -1), False),  # after a nudge the other way only
    ],
    ids=["calm", "above and below", "one nudge of two"],
)
def test_losses_are_apart_only_if_they_are_farther_than_either_nudge_takes_fp32(nudged, other, is_apart):
    runs = {0.0: FP32, NUDGE: nudged, -NUDGE: other}
    assert compare_with_fp32(moved(-1), runs.__getitem__).is_apart is is_apart


def test_a_closer_look_needs_no_run_where_nothing_is_slightly_apart():
    runs = {0.0: FP32}
    assert look_closer(Beside(gap=measure_loss_gap(FP32, FP32)), FP32, runs.__getitem__) is None
    assert look_closer(Beside(gap=None), FP32, runs.__getitem__) is None


def test_numbers_that_are_others_when_the_run_is_made_again_are_not_apart():
    read = Beside(gap=measure_loss_gap(FP32, FP32), lines={"a.py:90 (n)": measure_difference((3.0,), (4.0,))})
    own = Shown((), lines={"a.py:90 (n)": (3.0,)})
    assert read.is_only_printed
    assert keep_steady(read, own, own).lines
    assert not keep_steady(read, own, Shown((), lines={"a.py:90 (n)": (2.6,)})).lines
    assert keep_steady(read, own, "it took too long").lines


def test_a_number_that_is_not_finite_is_back_where_it_is():
    gone = Gap(math.inf, 4.0, 4.0, math.nan, 1, is_few=True)
    lost = Beside(gap=measure_loss_gap(FP32, FP32), lines={"a.py:90": gone})
    spoilt = Shown(APART.losses, lines={"a.py:90": (math.nan,)})
    blame = Blame(lost, FP32, lambda lines: FP32 if ("a.py", 30) in lines else spoilt)
    assert blame.find([], lines_from(10, 30, 40)).finding.line == 30


NOT_FINITE = replace(APART, losses=FP32.losses, lines={"a.py:90": (math.nan,)})
NEARER = replace(NOT_FINITE, lines={"a.py:90": (3.0,)})


@pytest.mark.parametrize(("with_it", "line"), [(NEARER, 20), (NOT_FINITE, 10)], ids=["finite again", "as before"])
def test_what_made_a_number_inf_is_to_blame_also_where_rounding_is_left_of_it(with_it, line):
    read = compare_with_fp32(NOT_FINITE, lambda _: FP32)

    def run(lines):
        numbers = [line for _, line in lines]
        return FP32 if 10 in numbers else with_it if numbers == [20] else NOT_FINITE

    rows = [at(10), at(20, "reduction-overflow"), at(30)]
    assert Blame(read, FP32, run).find([], rows).finding.line == line


@pytest.mark.parametrize(("cause", "line"), [("choice-flipped", 30), (ANY, 10)], ids=["a choice", "another"])
def test_what_is_chosen_by_is_tried_alone_before_the_line_that_rounded_it_first(cause, line):
    fp32, own, nearer = (replace(FP32, lines={"a.py:90": (x,)}) for x in (4.0, 3.0, 3.7))
    read = Beside(gap=measure_loss_gap(FP32, FP32), lines={"a.py:90": measure_difference((3.0,), (4.0,))})

    def run(lines):
        numbers = [line for _, line in lines]
        return fp32 if 10 in numbers else nearer if 30 in numbers else own

    assert Blame(read, fp32, run).find([], [at(10), at(20), at(30, cause)]).finding.line == line


def test_a_librarys_line_is_named_at_the_next_one_of_the_users():
    rows = lines_from(1, 2, 3, 4)
    casts = replace(at(22), file="/env/site-packages/lightning/precision/utils.py")
    named = name_own_line(casts, [rows[0], casts, replace(rows[1], file="/env/site-packages/x.py"), *rows[2:]])
    assert (named.file, named.line) == ("a.py", 3)
    assert "in precision/utils.py:22" in named.seen
    assert name_own_line(rows[1], rows) is rows[1]
    assert name_own_line(casts, [*rows, casts]) is casts  # none of the user's runs after it


class ScriptRuns(Runs):
    """The same, as a script's runs are asked for."""

    source = ""

    def in_part(self, lines):
        return self(lines)

    def nudged(self, _size):
        return FP32


@pytest.mark.parametrize(("file", "named"), [("a.py", 20), ("site-packages/torch/optim/adam.py", 60)])
def test_a_suspect_of_the_same_cause_takes_the_place_of_a_librarys_line_alone(beside, file, named):
    """It was tried by itself before, and did not help."""
    candidates = [replace(at(20, "cancellation"), file=file), at(60, "cancellation")]
    report = {
        "suspects": [at(60, "cancellation").as_json()],
        "suspects_beside": [],
        "candidates": [one.as_json() for one in candidates],
    }
    found = ScriptDiagnosis("python train.py", "bf16-mixed", (), 1.0)
    told = _blame_a_line(found, report, beside, ScriptRuns([20]))
    assert told.primary.line == named
