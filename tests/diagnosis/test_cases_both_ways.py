"""Every case, as a target and as a script, under CPU's autocast lists and CUDA's: the same cause, place and verdict."""

import pytest
import torch
from tests.cases.both_ways import (
    LISTS,
    Said,
    agree,
    ask,
    diagnose_as_script,
    is_right,
    read_answer,
    under,
    write_script,
)
from tests.cases.harness import Case, all_cases
from tests.cases.scoring import expected_verdict, is_judged_here
from tests.diagnosis.test_cases_on_gpu import diagnose_on_gpu
from tests.slow import mark_of, mostly_slow, slow

CASES = {case.name: case for case in all_cases() if is_judged_here(case)}
# What one run of a script cannot tell: that labels do not follow from inputs, or that a line is to blame for losses
# that are finite and not FP32's, takes a second training; that weights end larger than FP32's, those: it is a note.
NOT_TOLD_OF_A_SCRIPT = dict.fromkeys(
    (
        *("049_eps_of_the_inputs_dtype", "052_nearest_of_near_duplicates", "074_shuffled_label_column"),
        "098_cold_items_keep_their_size",
    ),
    "healthy",
)
# The shortest cases of each kind are fast tests, one more of each kind is slow; few of the others are.
FAST = ("016_mask_constant_raises", "069_optimizer_without_gradients", "081_pairwise_matrix_root")
SLOW = ("014_stale_policy_ratio", "026_aspect_term_guard", "042_lora_gain_bf16", "053_clip_scaled_gradients")


def each_case() -> list:
    """Every case, the long ones marked."""
    return [
        pytest.param(
            case, id=name, marks=() if name in FAST else slow if name in SLOW else mark_of(number, every=100, rare=27)
        )
        for number, (name, case) in enumerate(CASES.items())
    ]


def check(case: Case, target: Said, script: Said) -> None:
    """The target is what the case says, and the script is what the target is."""
    assert (target.verdict, target.cause or "healthy") == (expected_verdict(case), case.expect["cause"]), target
    assert case.healthy or is_right(case, target), target
    if case.name in NOT_TOLD_OF_A_SCRIPT:
        assert (script.verdict, script.cause) == (NOT_TOLD_OF_A_SCRIPT[case.name], ""), script
    else:
        assert agree(case, target, script), (target, script)


@slow
@pytest.mark.parametrize("lists", LISTS)
@pytest.mark.parametrize("case", each_case())
def test_a_script_is_told_what_a_target_is(case, lists):
    check(case, *ask(case, lists))


@pytest.mark.parametrize("lists", LISTS)
@pytest.mark.parametrize("case", mostly_slow(CASES.values(), every=100, ids=CASES, rare=32))
def test_a_fixed_script_is_left_in_peace(case, lists, tmp_path):
    if case.name == "085_rank_skips_bad_batch":
        pytest.skip("trains in processes of its own, which are not watched")
    with under(lists):
        said = diagnose_as_script(write_script(case, tmp_path, name="fixed"))
    assert said.verdict == "healthy", said


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items() if case.kind == "build"])
def test_a_script_is_told_what_a_target_is_on_a_gpu(case, tmp_path):
    (tmp_path / "target").mkdir()
    target = read_answer(diagnose_on_gpu(case, tmp_path / "target"))
    script = diagnose_as_script(write_script(case, tmp_path, device="cuda"))
    untold = case.name in NOT_TOLD_OF_A_SCRIPT and not script.cause  # a batch that fails may be met again
    assert untold or agree(case, target, script), (target, script)
