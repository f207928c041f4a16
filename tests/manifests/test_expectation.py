"""Beliefs: what a plan's name promises, what a YAML file says, and what is not so."""

import pytest
import torch
from tests.manifests import toys

from floatline.errors import ManifestError
from floatline.manifests.expectation import Expectation, resolve_expectation

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def mixed():
    return toys.measure(toys.make(), autocast=BF16)


@pytest.mark.parametrize("name", ["bf16-mixed", "bf16"])
def test_a_run_is_what_its_plan_promises(mixed, name):
    assert mixed.differences(name) == ()


@pytest.mark.parametrize(
    ("name", "said"),
    [("fp32", "compute: expected fp32"), ("fp16-mixed", "compute: expected fp16"), ("bf16-true", "master: expected")],
)
def test_another_plan_is_told_apart(mixed, name, said):
    assert said in "; ".join(mixed.differences(name))


def test_a_file_says_what_is_looked_at(mixed, tmp_path):
    path = tmp_path / "belief.yaml"
    path.write_text("weights: float32\nstates: bf16\nlost_updates: 0.5\n", encoding="utf-8")
    assert mixed.differences(path) == ("states: expected bf16, found fp32 exp_avg in 100 % (qkv.weight)",)
    with pytest.raises(ManifestError, match="states: expected bf16"):
        mixed.check(path)


def test_a_switch_that_makes_fp32_less_is_no_fp32():
    assert toys.measure(toys.make()).differences("fp32") == ()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert toys.measure(toys.make()).differences("fp32") == ("tf32: expected off, found matmul 'high'",)
    finally:
        torch.set_float32_matmul_precision(before)


def test_what_was_not_measured_is_not_as_expected():
    model = toys.make()
    found = toys.fl.manifest(model, toys.adamw(model))
    assert found.differences("fp32") == ("compute: expected fp32, and no step was measured",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("weight: fp32", "key 'weight' is not known. Did you mean 'weights'"),
        ("weights: fp17", "weights is 'fp17'. It must be a format"),
        ("compute_share: 3", "compute_share is 3. It must be a number from 0 to 1"),
        ("- 1", "holds a list"),
        ("", "is empty"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_line(tmp_path, text, said):
    path = tmp_path / "belief.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ManifestError) as error:
        resolve_expectation(path)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_nothing_is_expected_of_what_is_not_named(mixed):
    assert Expectation().differences(mixed) == ()
