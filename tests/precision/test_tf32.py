"""TF32 for the FP32 modules of a plan: allowed while the plan is in force, and only then."""

import pytest
import torch
from torch import nn

from floatline.errors import PlanError
from floatline.plans import KeptModule, Plan
from floatline.precision.applied_plan import AppliedPlan
from floatline.precision.fp32_call import tf32_products


@pytest.fixture(autouse=True)
def strict():
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision("highest")


def make_plan(**fields) -> Plan:
    return Plan(weights="fp32", compute="fp16", fp32_modules=(KeptModule(pattern="0"),), **fields)


def test_a_plan_with_tf32_allows_it_until_it_is_removed_and_not_while_it_is_paused():
    applied = AppliedPlan(nn.Sequential(nn.Linear(2, 2)), make_plan(tf32=True))
    assert torch.get_float32_matmul_precision() == "high"
    with applied.paused():
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == "high"
    applied.remove()
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_plan_without_tf32_leaves_the_setting_alone():
    applied = AppliedPlan(nn.Sequential(nn.Linear(2, 2)), make_plan())
    assert torch.get_float32_matmul_precision() == "highest"
    torch.set_float32_matmul_precision("medium")
    with applied.paused():
        assert torch.get_float32_matmul_precision() == "medium"
    applied.remove()
    assert torch.get_float32_matmul_precision() == "medium"


def test_what_the_user_set_comes_back():
    torch.set_float32_matmul_precision("medium")
    with tf32_products():
        assert torch.get_float32_matmul_precision() == "medium"  # it allows TF32 already
    assert torch.get_float32_matmul_precision() == "medium"


def test_fp32_itself_takes_no_tf32():
    with pytest.raises(PlanError, match="tf32 with compute fp32"):
        Plan(weights="fp32", compute="fp32", tf32=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_tf32_products_are_off_by_at_most_its_rounding_and_hold_what_fp32_holds():
    generator = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(512, 512, device="cuda", generator=generator) * 1e6
    b = torch.randn(512, 512, device="cuda", generator=generator)
    exact = a.double() @ b.double()
    bound = 2.0**-9 * (a.double().abs() @ b.double().abs())  # both factors are rounded to 2^-11, or cut to 2^-10
    with tf32_products():
        fast = a @ b
    assert bool(((fast - exact).abs() <= bound).all())
    assert not torch.equal(fast, a @ b)  # or TF32 was not used, and nothing was tested
    assert not bool((a.half() @ b.half()).isfinite().all())
