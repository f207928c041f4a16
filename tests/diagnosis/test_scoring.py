"""The scores of the cases can be trusted: a right answer scores, and every kind of wrong one does not."""

import pytest
from tests.cases.harness import Case, all_cases
from tests.cases.scoring import score_case
from tools.score_cases import page

from floatline.errors import TargetError

CASES = {case.name[:3]: case for case in all_cases()}
FAILING, CONTROL, ROOT_MODULE = CASES["001"], CASES["090"], CASES["012"]


def reply(case: Case, **changes) -> dict:
    """What a perfect diagnosis says, changed."""
    finding = {"cause": case.expect["cause"], "module": "", "file": str(case.path), "line": case.line, **changes}
    return {"verdict": "precision", "findings": [finding], "seconds": 1.0}


HEALTHY = {"verdict": "healthy", "findings": [], "seconds": 1.0}


def score(case: Case, given: dict, twin: dict = HEALTHY):
    return score_case(case, lambda target: twin if target.endswith(":fixed") else given)


def test_a_perfect_answer_is_right():
    assert score(FAILING, reply(FAILING)).right
    assert score(CONTROL, HEALTHY).right


@pytest.mark.parametrize(
    ("changes", "right"),
    [
        ({"line": FAILING.line + 1}, False),
        ({"file": "other.py"}, False),
        ({"line": 1, "module": "blocks.1.ff.wo"}, True),
        ({"line": 1, "module": "blocks.1.ff"}, False),
        ({"line": 1, "module": "blocks.1.ff.wo.weight"}, False),
    ],
)
def test_a_place_is_right_only_if_it_is_exact(changes, right):
    assert score(FAILING, reply(FAILING, **changes)).place_right == right


def test_the_root_module_is_right_only_with_its_line():
    assert score(ROOT_MODULE, reply(ROOT_MODULE)).place_right
    assert not score(ROOT_MODULE, reply(ROOT_MODULE, line=1)).place_right


def test_another_cause_is_wrong():
    found = score(FAILING, reply(FAILING, cause="exp-overflow"))
    assert not found.cause_right
    assert found.verdict_right


def test_silence_on_a_failure_is_wrong_in_everything():
    found = score(FAILING, HEALTHY)
    assert (found.cause_right, found.place_right, found.verdict_right) == (False, False, False)


def test_a_finding_on_a_twin_or_a_control_is_a_false_alarm():
    alarm = reply(FAILING, cause="cancellation")
    assert score(FAILING, reply(FAILING), alarm).alarms == ("cancellation",)
    assert score(CONTROL, alarm).alarms == ("cancellation",)
    assert not score(CONTROL, alarm).verdict_right


def test_an_error_is_a_wrong_answer():
    def refuse(target):
        raise TargetError("no such thing")

    found = score_case(FAILING, refuse)
    assert not found.verdict_right
    assert found.alarms == ("error: no such thing",)


def test_the_page_shows_misses():
    wrong = score(FAILING, reply(FAILING, cause="exp-overflow"))
    text = page([score(CONTROL, HEALTHY), wrong])
    assert "| right cause first | 0 of 1 (0 %) |" in text
    assert "**exp-overflow**" in text
