"""The choice of a plan for a device and a model, and its reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from floatline.checkup.choose import PlanDecision, choose_plan
from floatline.errors import HardwareError
from floatline.hardware import HARDWARE, detect_devices
from floatline.plans import Plan
from floatline.plans.presets import PLANS
from floatline.precision.dtypes import find_overflow


@pytest.mark.parametrize(
    ("device", "plan", "reason"),
    [
        ("h100", "bf16-mixed", "computes BF16 natively"),
        ("a100", "bf16-mixed", "no loss scale is needed"),
        ("mi300x", "bf16-mixed", "computes BF16 natively"),
        ("t4", "fp16-mixed", "is_bf16_supported() still says True"),
        ("v100", "fp16-mixed", "tensor cores"),
        ("p100", "fp16-mixed", "memory and bandwidth more than time"),
        ("gtx 1080", "fp32", "1/64 of FP32"),
        ("gtx 1660", "fp32", "NaN"),
        ("mps", "fp16-mixed", "FP16 natively"),
        ("x86-avx2", "fp32", "HalfOnCPU"),
        ("arm-fp16", "fp32", "HalfOnCPU"),
        ("x86-avx512-bf16", "bf16-mixed", "vector dot products"),
        ("x86-amx-bf16", "bf16-mixed", "AMX tiles"),
    ],
)
def test_the_plan_for_a_device(device: str, plan: str, reason: str):
    choice = choose_plan(device)
    assert choice.value.name == plan
    assert reason in choice.reason


def test_no_device_is_told_to_compute_in_a_format_it_lacks():
    for hardware in HARDWARE.values():
        compute = choose_plan(hardware).value.compute
        assert compute == "fp32" or hardware.supports(compute).level == "native", hardware.id


def test_the_plan_carries_the_reason_of_its_choice():
    choice = choose_plan("t4")
    assert choice.value.reasons["compute"] == choice.reason
    assert choice.value.scaling == PLANS["fp16-mixed"].scaling
    assert PLANS["fp16-mixed"].reasons["compute"] != choice.reason


def test_without_a_device_this_machine_is_asked():
    assert choose_plan() == choose_plan(detect_devices().best.hardware)


def test_an_unknown_device_is_refused():
    with pytest.raises(HardwareError, match="'t44' is not known"):
        choose_plan("t44")


def test_fp16_parameters_that_are_trained_are_mentioned():
    model = nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 2))
    assert "2 trainable parameters are FP16: cast them to FP32" in choose_plan("t4", model=model).reason
    assert "cast them" not in choose_plan("t4", model=nn.Linear(2, 2)).reason
    assert "cast them" not in choose_plan("t4", model=model.requires_grad_(False)).reason


def test_a_bf16_checkpoint_that_fits_fp16_is_run_in_it_with_a_warning():
    choice = choose_plan("t4", model=nn.Linear(2, 2).bfloat16())
    assert choice.value.name == "fp16-mixed"
    assert "stored in BF16; all of them fit" in choice.reason


def test_a_bf16_checkpoint_beyond_fp16_is_not_run_in_it():
    model = nn.Linear(2, 2).bfloat16()
    with torch.no_grad():
        model.weight[0, 0] = 1e5
    choice = choose_plan("t4", model=model)
    assert choice.value.name == "fp32"
    assert "Weights that FP16 would make infinite: 1, most in weight." in choice.reason
    assert choose_plan("h100", model=model).value.name == "bf16-mixed"


def test_a_decision_reads_well():
    assert str(PlanDecision(value="bf16", reason="it is native")) == "bf16: it is native"
    assert isinstance(choose_plan("t4").value, Plan)


def test_weights_beyond_the_range_are_counted_where_they_are():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model.register_parameter("empty", nn.Parameter(torch.empty(0)))
    assert find_overflow(model, "fp16") == {}
    with torch.no_grad():
        model[0].weight[0] = torch.tensor([65519.0, -65520.0, 1e9])  # pyright: ignore[reportIndexIssue]
        model[1].weight[0] = torch.tensor([float("nan"), float("inf"), -7e4])  # pyright: ignore[reportIndexIssue]
    assert find_overflow(model, "fp16") == {"0.weight": 2, "1.weight": 1}
    assert find_overflow(model, "bf16") == {}
