"""Folk remedies: each warns with what was measured, none hides the loss, none is a default."""

import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import floatline as fl
from floatline.errors import GuardError
from floatline.guard.policy import Policy
from floatline.guard.remedies import MEASURED_ON, REMEDIES, RemedyWarning, find_remedy, use_remedy
from floatline.plans import Scaling

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "remedies.md").read_text(encoding="utf-8")
OFFERED = [name for name, remedy in REMEDIES.items() if remedy.apply is not None]


def use(name):
    with pytest.warns(RemedyWarning):
        return use_remedy(name)


@pytest.mark.parametrize("name", OFFERED)
def test_the_warning_quotes_the_harm_and_what_to_do_instead(name):
    with pytest.warns(RemedyWarning) as caught:
        assert use_remedy(name) is REMEDIES[name].apply
    text = str(caught[0].message)
    assert REMEDIES[name].harm in text and REMEDIES[name].instead in text and MEASURED_ON in text
    assert caught[0].filename == __file__  # the user's line
    assert issubclass(RemedyWarning, UserWarning)


def test_looking_one_up_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_remedy("clamp-loss").name == "clamp-loss"


def test_unknown_names_and_what_is_not_offered_are_refused():
    with pytest.raises(GuardError, match=r"^Remedy 'clamp-los' is not known\. Did you mean 'clamp-loss'"):
        find_remedy("clamp-los")
    with pytest.raises(GuardError, match=r"^Remedy 'fp16-moments' is not offered: \+23 %, or NaN\. Use FP32 moments"):
        use_remedy("fp16-moments")


@pytest.mark.parametrize("value", [-1.0, 3.0, 6.0, 7.3, math.inf, math.nan])
def test_a_clamped_loss_is_recorded_as_it_was_and_has_the_gradient_of_the_clamp(value):
    clamp = use("clamp-loss")
    loss, twin = torch.tensor(value, requires_grad=True), torch.tensor(value, requires_grad=True)
    seen = clamp(loss)
    torch.testing.assert_close(seen, loss, rtol=0, atol=0, equal_nan=True)
    seen.backward()
    twin.clamp(0, 6).backward()
    assert torch.equal(loss.grad, twin.grad)


def test_a_plain_clamp_hides_the_loss():
    assert torch.tensor(math.inf).clamp(0, 6) == 6


@pytest.mark.parametrize(("clamped", "gradient"), [(True, 0.0), (False, 1.0)])
def test_a_clamped_loss_above_its_bound_trains_nothing(clamped, gradient):
    weight = torch.full((4,), 2.0, requires_grad=True)
    loss = weight.sum()
    (use("clamp-loss")(loss) if clamped else loss).backward()
    assert weight.grad.tolist() == [gradient] * 4


def test_a_divided_loss_keeps_its_value_and_divides_its_gradient():
    loss = torch.tensor(3.0, requires_grad=True)
    seen = use("divide-loss")(loss, 1024)
    seen.backward()
    assert seen.item() == 3.0
    assert float(loss.grad) == 1 / 1024


def test_logits_of_50257_tokens_within_5_cannot_bring_the_loss_below_1_19():
    logits = torch.full((1, 50257), -1000.0)
    logits[0, 7] = 1000.0
    target = torch.tensor([7])
    assert float(nn.functional.cross_entropy(logits, target)) == 0
    assert f"{float(nn.functional.cross_entropy(use('clamp-logits')(logits), target)):.2f}" == "1.19"


def test_a_norm_above_the_limit_is_skipped_by_a_policy():
    assert use("skip-norm-above")(3.0) == Policy(skip_norm_above=3.0)
    assert Policy().skip_norm_above == math.inf


def test_the_start_at_2_32_is_a_scaling_with_its_cap_raised():
    assert use("init-scale-2^32")() == Scaling(init_scale=2.0**32, cap=2.0**32, hysteresis=2)
    with pytest.raises(ValueError, match="outside floor 1 to cap"):
        Scaling(init_scale=2.0**32)


def test_clipping_before_unscaling_bounds_far_too_much():
    param = nn.Parameter(torch.zeros(4))
    param.grad = torch.full((4,), 0.25) * 65536
    norm = use("clip-before-unscale")([param])
    assert float(norm) == 0.5 * 65536
    assert float((param.grad / 65536).norm()) == pytest.approx(1 / 65536, rel=1e-3)


def test_the_optimizers_are_those_that_are_named():
    params = [nn.Parameter(torch.ones(2).bfloat16())]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # floatline.optim warns of nearest rounding on its own
        nearest = use_remedy("nearest-weights")(params)
    assert isinstance(nearest, fl.optim.AdamW)
    adam = use("fp16-adam")(params)
    assert isinstance(adam, torch.optim.Adam)
    assert adam.defaults["eps"] == 1e-4


@pytest.mark.parametrize("name", REMEDIES)
def test_the_page_has_the_same_numbers(name):
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
    remedy = REMEDIES[name]
    assert row == f"| `{name}` | {remedy.what} | {remedy.harm} | {remedy.instead} |"
