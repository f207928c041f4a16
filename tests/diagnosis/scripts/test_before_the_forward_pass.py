"""What a loop computes before it calls a model belongs to its step, and what nothing explains is not called healthy."""

from pathlib import Path

import pytest
from tests.diagnosis.scripts.test_scripts import observe
from tests.slow import slow

from floatline.diagnosis.target_diagnosis import diagnose
from floatline.errors import TargetError

TARGETS = Path(__file__).parents[1] / "targets" / "before_the_forward_pass.py"
LINES = TARGETS.read_text(encoding="utf-8").splitlines()


def call(tmp_path, code):
    target = tmp_path / "target.py"
    target.write_text(f"{TARGETS.read_text(encoding='utf-8')}\n\ndef train(steps=20):\n    {code}\n", encoding="utf-8")
    return str(target)


def is_here(finding):
    return "# HERE" in LINES[finding.line - 1]


@slow
@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("loop", ["cleared_first", "cleared_last", "of_two_models"])
def test_an_overflow_before_the_forward_pass_is_named_at_its_line(tmp_path, loop, first):
    found = diagnose(call(tmp_path, f"{loop}(steps, first={first})")).findings
    assert [finding.cause.id for finding in found[:1]] == ["product-overflow"]
    assert is_here(found[0])


@slow
@pytest.mark.parametrize("loop", ["cleared_first", "cleared_last", "of_two_models"])
def test_the_same_loop_without_an_overflow_is_healthy(tmp_path, loop):
    assert diagnose(call(tmp_path, f"{loop}(steps, first=99)")).verdict == "healthy"


@slow
@pytest.mark.parametrize("loop", ["ids", "ids_in_the_model"])
def test_an_index_that_came_through_16_bits_is_named_where_it_did(loop):
    found = diagnose(f"{TARGETS}:{loop}").findings
    assert [finding.cause.id for finding in found] == ["integer-not-exact"]
    assert is_here(found[0])
    assert found[0].seen.startswith("IndexError: index out of range in self, which FP32 does not raise")


@slow
def test_an_index_that_came_through_fp32_is_healthy(tmp_path):
    assert diagnose(call(tmp_path, "ids(steps, dtype=torch.float32)")).verdict == "healthy"


def test_an_index_that_fp32_refuses_too_is_not_blamed_on_16_bits(tmp_path):
    with pytest.raises(TargetError, match="FP32 raises it, too"):
        diagnose(call(tmp_path, "ids_in_the_model(steps, last=4100)"))


@slow
def test_a_failure_that_nothing_explains_is_told_and_not_called_healthy():
    found = diagnose(f"{TARGETS}:told_by_nothing_that_is_recorded")
    assert (found.findings, found.verdict) == ((), "precision")
    assert "not finite from step 0 on, in FP32 all stay finite" in found.unexplained
    assert found.as_json()["unexplained"] == found.unexplained == str(found).partition(": ")[2]


@slow
def test_inputs_that_are_finite_in_fp32_are_no_bad_data_where_fp32_diverges():
    found = diagnose(f"{TARGETS}:diverging_in_fp32_too")
    assert [finding.cause.id for finding in found.findings[:1]] in (["product-overflow"], ["optimization-divergence"])


def observe_call(tmp_path, code):
    script = tmp_path / "script.py"
    script.write_text(f"{TARGETS.read_text(encoding='utf-8')}\n\n{code}\n", encoding="utf-8")
    return observe(str(script))


@pytest.mark.parametrize("first", [0, 7, 30])
@pytest.mark.parametrize("loop", ["cleared_first", "cleared_last", "of_two_models", "scaled", "evaluated"])
def test_a_script_is_told_of_an_overflow_before_its_forward_pass(tmp_path, loop, first):
    found = observe_call(tmp_path, f"{loop}(50, first={first})")["findings"]
    assert [finding["cause"] for finding in found[:1]] == ["product-overflow"]
    assert "# HERE" in LINES[found[0]["line"] - 1]


@pytest.mark.parametrize("loop", ["cleared_first", "cleared_last", "of_two_models", "scaled", "evaluated"])
def test_the_same_script_without_an_overflow_is_left_in_peace(tmp_path, loop):
    answer = observe_call(tmp_path, f"{loop}(50, first=99)")
    assert (answer["findings"], answer["unexplained"]) == ([], "")
    assert answer["notes"][0].startswith(("2 of 50 steps recorded", "3 of 50 steps recorded", "4 of 50"))


@pytest.mark.parametrize("at", [7, 30, 49])
def test_an_input_that_overflowed_once_is_not_blamed_on_the_data(tmp_path, at):
    answer = observe_call(tmp_path, f"once(50, at={at})")
    assert "bad-input-data" not in [finding["cause"] for finding in answer["findings"]]
    assert answer["findings"] or f"not finite from step {at} on" in answer["unexplained"]


@slow
def test_workers_that_are_forked_between_two_steps_load_their_data(tmp_path):
    answer = observe_call(tmp_path, "loaded()")
    assert (answer["findings"], answer["unexplained"], answer["num_backward"]) == ([], "", 12)
