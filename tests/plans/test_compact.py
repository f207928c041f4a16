"""Plans that say how moments are stored: the optimizer that trains under one stores them so, however it was made."""

import pytest
import torch
from torch import nn

import floatline as fl
from floatline.errors import GuardError, PlanError
from floatline.optim import convert
from floatline.plans import Plan, resolve_plan
from floatline.training.placement import take_optimizer

COMPACT = resolve_plan("compact")


def trained(optimizer, model, *, steps=3):
    torch.manual_seed(1)
    for _ in range(steps):
        model(torch.randn(8, 64).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def half_model():
    torch.manual_seed(0)
    return nn.Linear(64, 64).bfloat16()


def test_compact_keeps_nothing_beside_a_weight_and_two_moments_of_8_bits():
    model = half_model()
    optimizer = trained(take_optimizer(torch.optim.AdamW(model.parameters()), COMPACT), model)
    assert (optimizer.update, optimizer.states) == ("stochastic", "int8")
    held = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for key, value in state.items()
        if key != "step"
    )
    weights = sum(param.numel() for param in model.parameters())
    assert held == pytest.approx(weights * 8 * COMPACT.states_share, rel=1e-3)
    assert COMPACT.master_bytes == 0


def test_what_a_plan_leaves_open_stays_as_the_optimizer_has_it():
    model = half_model()
    own = fl.optim.AdamW(model.parameters(), states="bf16")
    assert convert(own, update="kahan").states == "bf16"
    assert convert(own, update="kahan", states="int8").states == "int8"


def test_moments_of_earlier_steps_are_brought_into_the_plans_form():
    model = half_model()
    optimizer = trained(fl.optim.AdamW(model.parameters(), update="stochastic"), model)
    compact = convert(optimizer, update="stochastic", states="int8")
    for param in model.parameters():
        assert compact.state[param]["exp_avg"].dtype == torch.int8
    trained(compact, model, steps=1)


def test_a_guard_refuses_moments_that_are_not_the_plans():
    model = half_model()
    optimizer = fl.optim.AdamW(model.parameters(), update="stochastic")
    with pytest.raises(GuardError, match=r"asks for update='stochastic' and states='int8', and AdamW has .*'fp32'"):
        fl.Guard(model, optimizer, plan="compact")
    fl.Guard(model, convert(optimizer, update="stochastic", states="int8"), plan="compact").close()


def test_moments_of_an_optimizer_that_no_plan_exchanges_are_refused():
    with pytest.raises(PlanError, match="states int8 with weights fp32 is not a plan"):
        Plan(weights="fp32", compute="bf16", states="int8")
    with pytest.raises(PlanError, match="states is 'int4'. It must be null, fp32, bf16, int8"):
        Plan(weights="bf16", compute="bf16", states="int4")


def test_a_plan_keeps_its_states_in_a_file(tmp_path):
    COMPACT.save(tmp_path / "compact.yaml")
    assert Plan.load(tmp_path / "compact.yaml") == COMPACT
