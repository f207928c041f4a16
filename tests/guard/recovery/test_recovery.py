"""Recovery: streams of steps against the actions they must give, each with a twin that is one step short."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.slow import slow

from floatline.causes import CAUSES
from floatline.errors import GuardError
from floatline.guard.policy import Policy
from floatline.guard.recovery.actions import (
    AcceptRegime,
    Alarm,
    AskCanary,
    CheckWeights,
    Escalate,
    Rollback,
    Stop,
    Warn,
)
from floatline.guard.recovery.recovery import Recovery, SeenStep

NAN = math.nan
SMALL = Policy(
    probe_after=3,
    probe_every=4,
    regime_after=12,
    rollback_reach=20,
    collapse_after=5,
    most_rollbacks=4,
    forget_rollbacks=10,
    read_after=2,
    warn_after=1000,
    most_bad=None,
)


def make(policy: Policy = SMALL, *, floor: float | None = 1.0, can_probe: bool = True, can_roll_back: bool = True):
    return Recovery(policy, floor=floor, can_probe=can_probe, can_roll_back=can_roll_back)


def seen(attempt: int, reason: str | None = None, *, scale=65536.0, loss_score=0.0, norm_score=0.0) -> SeenStep:
    loss = NAN if reason == "forward-nonfinite" else 2.0
    return SeenStep(attempt, reason, loss, 1.0, scale, loss_score, norm_score)


KINDS = {
    ".": {},
    "O": {"reason": "overflow"},
    "F": {"reason": "overflow", "scale": 1.0},
    "N": {"reason": "forward-nonfinite"},
    "L": {"reason": "outlier", "loss_score": 9.0},
    "G": {"reason": "outlier", "norm_score": 9.0},
    "r": {"reason": "requested"},
}


class Run:
    """Feeds a recovery as a guard would: one letter a step, the same answer to every question."""

    def __init__(
        self, recovery: Recovery, *, finite=True, canary=1.0, reference: float | None = 1.0, start=100
    ) -> None:
        self.recovery = recovery
        self.finite, self.canary, self.reference = finite, canary, reference
        self.attempt = start - 1
        self.done: list[tuple[int, object]] = []

    def feed(self, letters: str) -> list[tuple[int, object]]:
        """The actions of these steps, each with the number of its step."""
        first = len(self.done)
        for letter in letters:
            self.attempt += 1
            todo = self.recovery.observe(seen(self.attempt, **KINDS[letter]))
            while todo:
                action = todo.pop(0)
                self.done.append((self.attempt, action))
                todo = [*self.answer(action), *todo]
        return self.done[first:]

    def answer(self, action: object) -> list:
        if isinstance(action, CheckWeights):
            return self.recovery.weights_checked(self.finite)
        if isinstance(action, AskCanary):
            return self.recovery.canary_answered(self.canary, self.reference)
        if isinstance(action, Rollback):
            self.recovery.rolled_back(self.attempt)
        return []

    def kinds(self, letters: str) -> list[type]:
        return [type(action) for _, action in self.feed(letters)]


def stop_of(actions: list[tuple[int, object]]) -> Stop:
    (stop,) = [action for _, action in actions if isinstance(action, Stop)]
    return stop


# Overflow


@pytest.mark.parametrize(
    ("letters", "kinds"),
    [
        ("FFFFF", [CheckWeights, Stop]),
        ("FFFF", []),  # one short
        ("OFFFFF", [CheckWeights, Stop]),
        ("OOOOOOOOOO", []),  # the scale is still falling
        ("FFFF.FFFF", []),  # an applied step ends the row
        ("FFFFOFFFF", []),  # a scale above the smallest ends it
        ("FFFFGFFFF", []),  # a finite gradient at the smallest scale ends it
        ("FFrFrFF", [CheckWeights, Stop]),  # a skip on request does not
    ],
)
def test_overflow_at_the_smallest_scale_stops_after_a_row(letters, kinds):
    assert Run(make()).kinds(letters) == kinds


def test_a_collapse_names_the_cause_and_the_scale():
    stop = stop_of(Run(make()).feed("OFFFFF"))
    assert stop.cause_id == "gradient-overflow"
    assert stop.message.startswith("No scale can work")
    assert "step 105" in stop.message


@pytest.mark.parametrize("floor", [None, 1.0])
def test_without_a_scale_the_stop_does_not_speak_of_a_scale_that_fails(floor):
    stop = stop_of(Run(make(floor=floor)).feed("FFFFF"))
    assert stop.cause_id == ""
    assert "No scale can work" not in stop.message
    assert "no loss scale to lower" in stop.message


def test_a_collapse_with_lost_weights_goes_back_instead():
    assert Run(make(), finite=False).kinds("FFFFF") == [CheckWeights, Rollback]


# Non-finite loss


def test_the_first_nonfinite_loss_and_every_tenth_look_at_weights_and_canary():
    actions = Run(make()).feed("N" * 20)
    assert [(at, type(action)) for at, action in actions] == [
        (at, kind) for at in (100, 109, 119) for kind in (CheckWeights, AskCanary)
    ]


def test_an_applied_step_begins_a_new_row_of_nonfinite_losses():
    run = Run(make(), canary=5.0)
    assert run.kinds("N.N") == [CheckWeights, AskCanary] * 2
    assert Run(make(), canary=5.0).kinds("NrN") == [CheckWeights, AskCanary]


@pytest.mark.parametrize("canary", [NAN, math.inf])
def test_a_nonfinite_canary_escalates(canary):
    actions = Run(make(), canary=canary).feed("N")
    assert [type(action) for _, action in actions] == [CheckWeights, AskCanary, Escalate]


def test_without_a_canary_nonfinite_losses_are_only_skipped():
    assert Run(make(can_probe=False)).kinds("N" * 9) == [CheckWeights]


def test_lost_weights_go_back_at_once():
    actions = Run(make(), finite=False).feed("N")
    assert actions[1:] == [(100, Rollback(80, 0, False, False))]


def test_the_first_bad_step_is_where_the_way_back_begins():
    actions = Run(make(), finite=False).feed("OON")
    assert actions[-1] == (102, Rollback(80, 0, False, False))


def test_lost_weights_stop_where_the_run_cannot_go_back():
    stop = stop_of(Run(make(can_roll_back=False), finite=False).feed("N"))
    assert "non-finite" in stop.message
    assert "step 100" in stop.message
    assert "checkpoint" in stop.message
    assert "snapshot_gib" in stop.message


def test_lost_weights_stop_where_there_is_no_snapshot_yet():
    recovery = make()
    recovery.observe(seen(3, "forward-nonfinite"))
    assert recovery.weights_checked(False) == [Rollback(0, 0, False, False)]
    (stop,) = recovery.no_snapshot()
    assert isinstance(stop, Stop)
    assert "step 3" in stop.message
    assert recovery.state_dict()["rollbacks"] == 0


# Outliers


@pytest.mark.parametrize(
    ("letters", "asked_at"),
    [
        ("LL", []),
        ("LLL", [102]),
        ("LLLLLL", [102]),
        ("LLLLLLL", [102, 106]),
        ("LL.LL", []),
        ("LLGLL", []),  # an ordinary loss ends the row of loss outliers
        ("LLrL", [103]),
        ("LOLNL", [104]),  # damaged weights show by turns
        ("GGGGGGGG", []),
    ],
)
def test_the_canary_is_asked_after_a_row_of_loss_outliers(letters, asked_at):
    run = Run(make(), canary=1.0)
    actions = [(at, action) for at, action in run.feed(letters) if letters[at - 100] == "L"]
    assert [at for at, _ in actions] == asked_at
    assert all(isinstance(action, AskCanary) for _, action in actions)


@pytest.mark.parametrize("missing", ["can_probe", "can_roll_back"])
def test_the_canary_is_not_asked_where_nothing_would_follow(missing):
    assert Run(make(**{missing: False})).kinds("LLLLLLL") == []


@pytest.mark.parametrize(
    ("canary", "reference", "back"),
    [
        (1.1, 1.0, False),
        (math.nextafter(1.1, 2), 1.0, True),
        (0.5, 1.0, False),
        (NAN, 1.0, True),
        (math.inf, 1.0, True),
        (-math.inf, 1.0, True),
        (9.0, None, False),
        (9.0, NAN, False),
        (NAN, None, False),
        (-2.0, -2.0, False),
        (-1.81, -2.0, False),
        (-1.79, -2.0, True),
        (0.0, 0.0, False),
        (0.1, 0.0, True),
    ],
)
def test_only_a_canary_that_is_worse_goes_back(canary, reference, back):
    kinds = Run(make(), canary=canary, reference=reference).kinds("LLL")
    assert kinds == ([AskCanary, Rollback] if back else [AskCanary])


def test_the_reference_is_of_the_snapshot_that_would_be_restored():
    actions = Run(make(), canary=9.0).feed("..GLLL")
    assert actions == [(105, AskCanary(82)), (105, Rollback(82, 0, False, False))]


def test_rollbacks_reach_further_cut_the_rate_escalate_and_end():
    run = Run(make(), canary=9.0, start=10_000)
    actions = run.feed("LLL" * 5)
    backs = [action for _, action in actions if isinstance(action, Rollback)]
    assert backs == [
        Rollback(10_000 - 20, 0, False, False),
        Rollback(10_003 - 40, 1, False, False),
        Rollback(10_006 - 80, 2, True, False),
        Rollback(10_009 - 160, 3, True, True),
    ]
    stop = stop_of(actions)
    assert "budget of rollbacks is spent: 4" in stop.message
    assert "step 10,012" in stop.message


def test_one_rollback_fewer_does_not_stop():
    assert Stop not in Run(make(), canary=9.0).kinds("LLL" * 4)


@pytest.mark.parametrize(("applied", "number"), [(9, 1), (10, 0)])
def test_rollbacks_are_forgotten_after_applied_steps(applied, number):
    run = Run(make(), canary=9.0)
    run.feed("LLL" + "." * applied)
    (_, (_, back)) = run.feed("LLL")
    assert back.number == number


def test_skipped_steps_do_not_help_to_forget():
    run = Run(make(), canary=9.0)
    run.feed("LLL" + "." * 9 + "rOO")
    assert run.feed("LLL")[-1][1].number == 1


def test_no_rollback_goes_back_before_the_beginning():
    assert Run(make(), canary=9.0, start=5).feed("LLL")[-1] == (7, Rollback(0, 0, False, False))


def test_steps_that_were_under_way_cause_no_second_rollback():
    recovery = make()
    for attempt in (10, 11, 12):
        actions = recovery.observe(seen(attempt, "outlier", loss_score=9.0))
    assert actions == [AskCanary(0)]
    assert recovery.canary_answered(9.0, 1.0) == [Rollback(0, 0, False, False)]
    recovery.rolled_back(16)
    late = [recovery.observe(seen(at, "outlier", loss_score=9.0)) for at in range(13, 17)]
    assert late == [[], [], [], []]
    assert recovery.healthy
    after = [recovery.observe(seen(at, "outlier", loss_score=9.0)) for at in range(17, 20)]
    assert after == [[], [], [AskCanary(0)]]


def test_without_that_note_they_would():
    recovery = make()
    for attempt in (10, 11, 12):
        recovery.observe(seen(attempt, "outlier", loss_score=9.0))
    recovery.canary_answered(9.0, 1.0)
    recovery.rolled_back(12)
    late = [recovery.observe(seen(at, "outlier", loss_score=9.0)) for at in range(13, 17)]
    assert late[2] == [AskCanary(0)]


# Change of regime


@pytest.mark.parametrize(
    ("letters", "at"), [("L" * 12, [111]), ("G" * 12, [111]), ("LG" * 6, [111]), ("L" * 11, []), ("L" * 11 + ".L", [])]
)
@pytest.mark.parametrize("known", [{}, {"reference": None}])
def test_a_row_of_outliers_with_sound_weights_is_a_new_level(letters, at, known):
    actions = Run(make(), **known).feed(letters)
    assert [step for step, action in actions if isinstance(action, AcceptRegime)] == at


@pytest.mark.parametrize("missing", ["can_probe", "can_roll_back"])
def test_without_a_canary_a_row_of_outliers_is_a_new_level_too(missing):
    assert Run(make(**{missing: False})).kinds("L" * 12) == [AcceptRegime]


def test_damaged_weights_are_no_new_level():
    assert Run(make(), canary=9.0).kinds("G" * 12) == [AskCanary, Rollback]


def test_outliers_judged_by_the_old_windows_do_not_count_again():
    run = Run(make(can_probe=False))
    run.feed("L" * 12)
    assert run.kinds("LL" + "L" * 11) == []  # two were under way
    assert run.kinds("L") == [AcceptRegime]


# Limits


def test_too_many_skipped_steps_in_a_row_stop():
    policy = replace(SMALL, most_bad=4)
    assert Run(make(policy)).kinds("OOO") == []
    stop = stop_of(Run(make(policy)).feed("OrOGO"))
    assert (stop.cause_id, "4 steps in a row" in stop.message, "step 100" in stop.message) == ("", True, True)
    assert Run(make(policy)).kinds("OOO.OOO") == []


def test_outliers_with_a_sound_canary_are_bad_data():
    policy = replace(SMALL, most_bad=4)
    assert stop_of(Run(make(policy)).feed("LLLL")).cause_id == "bad-input-data"
    assert stop_of(Run(make(policy), reference=None).feed("LLLL")).cause_id == ""
    assert stop_of(Run(make(policy)).feed("OLLL")).cause_id == ""


def test_a_question_is_answered_before_the_row_stops_the_run():
    policy = replace(SMALL, most_bad=1)
    assert Run(make(policy), finite=False).kinds("N") == [CheckWeights, Rollback]
    assert Run(make(policy)).kinds("N") == [CheckWeights, AskCanary, Stop]
    assert Run(make(policy), canary=NAN).kinds("N") == [CheckWeights, AskCanary, Escalate]


@pytest.mark.parametrize(
    ("letters", "kinds"),
    [
        ("." * 5 + "O.O.O", []),  # 7 of 10
        ("." * 4 + "O.O.OO", [Stop]),  # 6 of 10
        ("OOO", []),  # too few to tell
        ("." * 4 + "OrOrOrrOrr", []),  # on request: not counted, so still too few
    ],
)
def test_a_low_share_of_applied_steps_stops_once_the_window_is_full(letters, kinds):
    policy = replace(SMALL, least_success=0.7, success_window=10)
    assert Run(make(policy)).kinds(letters) == kinds


def test_the_share_is_that_of_the_last_steps_only():
    policy = replace(SMALL, least_success=0.7, success_window=10)
    assert Run(make(policy)).kinds("OOO" + "." * 10 + "OOO") == []


# In all


def test_every_cause_of_a_stop_is_in_the_catalogue():
    policy = replace(SMALL, most_bad=4)
    stops = [stop_of(Run(make()).feed("OFFFFF")), stop_of(Run(make(policy)).feed("LLLL"))]
    assert {stop.cause_id for stop in stops} == {"gradient-overflow", "bad-input-data"}
    assert {stop.cause_id for stop in stops} <= set(CAUSES)


@given(st.lists(st.tuples(st.floats(), st.floats(), st.floats(), st.floats()), max_size=60))
def test_applied_steps_ask_for_nothing_but_a_word_about_outliers(numbers):
    recovery = make(replace(SMALL, most_bad=1, least_success=1.0, success_window=5))
    for attempt, (loss, scale, loss_score, norm_score) in enumerate(numbers):
        asked = recovery.observe(SeenStep(attempt, None, loss, 1.0, scale, loss_score, norm_score))
        is_outlier = loss_score > SMALL.outlier_score or norm_score > SMALL.outlier_score
        assert all(isinstance(action, Warn) and is_outlier for action in asked)
    assert recovery.healthy


def test_outliers_that_are_trained_on_are_spoken_of_once_a_burst():
    recovery = make(SMALL)
    scores = dict.fromkeys((*range(40, 50), 60, 90), 20.0)
    said = [
        (i, action.message)
        for i in range(120)
        for action in recovery.observe(SeenStep(i, None, 9.0, 1.0, 1.0, scores.get(i, 0.0), math.nan))
    ]
    words = "loss 9 is out of line (score 20.0); trained on as any other step"
    assert said == [(40, words), (90, words)]  # 60 belongs to the burst that began at 40


def test_a_row_of_failures_is_told_once():
    recovery = make(replace(SMALL, warn_after=4))
    actions = [recovery.observe(seen(i, "forward-nonfinite")) for i in range(20, 40)]
    alarms = [(i, action) for i, found in enumerate(actions, 20) for action in found if isinstance(action, Alarm)]
    assert alarms == [(23, Alarm(4, 20, "forward-nonfinite"))]


def test_checkpoints_of_the_first_version_know_nothing_of_outliers_that_were_trained_on():
    recovery = make(SMALL)
    old = {name: value for name, value in recovery.state_dict().items() if name != "noted"}
    recovery.load_state_dict(old)
    assert recovery.state_dict()["noted"] == -1


def test_one_skipped_step_among_them_does():
    recovery = make(replace(SMALL, most_bad=1))
    assert recovery.observe(seen(0, "overflow"))
    assert not recovery.healthy


@settings(deadline=None)
@given(
    letters=st.text("....OFNLLLGr", max_size=80),
    cut=st.integers(0, 80),
    finite=st.booleans(),
    canary=st.sampled_from([1.0, 9.0, NAN]),
    reference=st.sampled_from([None, 1.0]),
)
def test_a_state_saved_on_the_way_goes_on_with_the_same_actions(letters, cut, finite, canary, reference):
    policy = replace(SMALL, most_bad=25, least_success=0.2, success_window=30)
    whole = Run(make(policy), finite=finite, canary=canary, reference=reference)
    first = Run(make(policy), finite=finite, canary=canary, reference=reference)
    expected = whole.feed(letters)
    actions = first.feed(letters[:cut])
    second = Run(make(policy), finite=finite, canary=canary, reference=reference, start=first.attempt + 1)
    second.recovery.load_state_dict(json.loads(json.dumps(first.recovery.state_dict())))
    assert actions + second.feed(letters[cut:]) == expected
    assert second.recovery.state_dict() == whole.recovery.state_dict()


def test_without_the_state_the_actions_differ():
    whole, second = Run(make()), Run(make(), start=102)
    assert whole.feed("LLL")
    assert not second.feed("L")


@pytest.mark.parametrize(("name", "value"), [("bad", None), ("bad", 1.5), ("sound", 1), ("outcomes", 7)])
def test_a_state_that_does_not_fit_is_refused_by_name(name, value):
    state = make().state_dict()
    with pytest.raises(GuardError, match=f"{name} = "):
        make().load_state_dict({**state, name: value})


def test_a_state_that_fits_is_taken():
    recovery = make()
    recovery.load_state_dict({**recovery.state_dict(), "bad": 3})
    assert not recovery.healthy


def loads_torch(name: str) -> bool:
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    return bool(subprocess.run([sys.executable, "-c", code]).returncode)


def test_recovery_does_not_load_torch():
    assert not loads_torch("floatline.guard.recovery.recovery")


@slow
def test_the_check_above_can_fail():
    assert loads_torch("floatline.guard.recovery.snapshots")
