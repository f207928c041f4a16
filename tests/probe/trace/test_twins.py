"""Twins: what FP32 would have given, whatever the operation."""

import copy
import math

import pytest
import torch
from tests.probe.trace.recorded_steps import Calculation, ops_named
from tests.probe.trace.test_recorder import STEPS
from torch import nn

from floatline.numerics.half_on_cpu import HalfOnCPU
from floatline.probe.trace.recorder import Recorder

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def values_of(calculate, *inputs, **options):
    """The first operation's outputs when a function of the inputs is recorded."""
    with HalfOnCPU(), Recorder(nn.Identity(), **options) as recorder:
        calculate(*inputs)
    assert recorder.trace.meta["twin_failures"] == {}
    return recorder.trace.ops


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", [name for name in STEPS if name != "dropout"])
def test_twin_gradients_are_those_of_the_same_step_in_fp32(name, dtype):
    make, x = STEPS[name]
    model = make().to(dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    exact = copy.deepcopy(model).float()
    with HalfOnCPU(), Recorder(model) as recorder:
        model(x).float().pow(2).mean().backward()
    exact(x.float() if x.is_floating_point() else x).pow(2).mean().backward()
    largest = max(p.grad.abs().max().item() for p in exact.parameters())
    assert set(recorder.trace.gradients) == {n for n, _ in exact.named_parameters()}
    for parameter_name, parameter in exact.named_parameters():
        value = recorder.trace.gradients[parameter_name].value
        assert value.twin_largest == pytest.approx(parameter.grad.abs().max().item(), rel=1e-4, abs=1e-6 * largest)


def test_an_overflow_is_blown_here_and_finite_in_the_twin():
    (op,) = values_of(lambda x: x * x, torch.full((3,), 400.0).half())
    (value,) = op.outputs
    assert (value.pos_inf, value.blown, value.twin_nonfinite, value.twin_largest) == (3, 3, 0, 160000.0)


def test_an_underflow_is_lost_here_and_not_in_the_twin():
    (op,) = values_of(lambda x: x * 1e-6, torch.tensor([0.0, 1e-3]).half())
    assert (op.outputs[0].zeros, op.outputs[0].lost) == (2, 1)


def test_a_guard_too_small_for_half_is_lost():
    first, second = values_of(lambda x: 1 / (x + 1e-8), torch.zeros(2).half())[:2]
    assert (first.name, first.outputs[0].lost) == ("aten.add", 2)
    assert second.outputs[0].blown == 2


def test_infinite_fills_are_in_the_twin_as_well():
    (op,) = values_of(lambda x: x.masked_fill(torch.tensor([True, False]), -math.inf), torch.ones(2).half())
    assert (op.outputs[0].neg_inf, op.outputs[0].blown, op.outputs[0].twin_nonfinite) == (1, 0, 1)


def test_integers_that_half_cannot_hold_are_exact_in_the_twin():
    (op,) = values_of(lambda n: n.half(), torch.tensor([2049]))
    assert op.outputs[0].largest == 2048.0
    assert op.outputs[0].twin_largest == 2049.0
    assert op.inputs[0].value.error is None


@pytest.mark.parametrize(
    "move",
    [
        lambda x, n: torch.where(x > 9, x, 1e-8),
        lambda x, n: torch.cat([x, n]),
        lambda x, n: x.clone().copy_(n),
        lambda x, n: nn.functional.pad(x, (0, 1), value=0.1),
        lambda x, n: x.scatter(0, torch.tensor([0]), 0.1),
    ],
)
def test_moves_that_bring_in_a_number_half_cannot_hold_round(move):
    assert values_of(move, torch.ones(1).half(), torch.tensor([2049]))[-1].outputs[0].error > 1e-5


def test_moves_of_numbers_half_holds_do_not():
    ops = values_of(lambda x: torch.cat([x, x]).relu()[torch.tensor([0])].clone(), torch.ones(1).half())
    assert [op.outputs[0].error for op in ops] == [0.0] * 4


def test_a_difference_of_near_equals_has_an_error_as_large_as_itself():
    x = torch.tensor([30.1, 30.2, 30.3])

    def variance(x):
        return (x * x).mean() - x.mean() * x.mean()

    op = values_of(variance, x.half())[-1]
    assert op.name == "aten.sub"
    assert op.outputs[0].error > 0.5
    assert values_of(variance, x)[-1].outputs[0].error == 0.0


def test_twins_follow_writes_through_views():
    def write(x):
        x = x * 1.0
        x[1:].view(-1).mul_(400.0)
        x.add_(1.0)
        return x

    op = values_of(write, torch.full((3, 2), 400.0).half())[-1]
    assert op.outputs[0].blown == 4
    assert op.outputs[0].twin_largest == 160001.0


def test_random_numbers_are_the_same_in_the_twin():
    x = torch.linspace(0.1, 0.9, 64).half() / 3
    ops = values_of(lambda x: nn.functional.dropout(x, 0.5) * 3, x)
    assert ops[-1].outputs[0].lost == 0
    assert ops[-1].outputs[0].error < 1e-3
    torch.manual_seed(3)
    with Recorder(nn.Identity()):
        torch.rand(5).half()
    after = torch.rand(1)
    torch.manual_seed(3)
    torch.rand(5)
    assert torch.equal(after, torch.rand(1))


def test_sums_that_stand_still_are_counted():
    ops = values_of(lambda x: (x + 1e-4, x + 1.0, x.add_(1e-4)), torch.ones(5).half())
    assert [(op.moved, op.stuck) for op in ops] == [(5, 5), (5, 0), (5, 5)]
    assert values_of(lambda x: x + 1e-4, torch.ones(5))[0].stuck is None


def test_the_larger_operand_may_stand_on_either_side():
    big, small = torch.ones(5).half(), torch.full((5,), 1e-4).half()
    assert [(op.moved, op.stuck) for op in values_of(lambda: (big + small, small + big))] == [(5, 5), (5, 5)]


def test_nothing_and_infinity_do_not_stand_still():
    zeros, infinite = torch.zeros(5).half(), torch.full((5,), math.inf).half()
    assert [(op.moved, op.stuck) for op in values_of(lambda: (zeros + zeros, infinite + 1))] == [(0, 0), (0, 0)]


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_an_update_of_a_list_is_recorded_tensor_by_tensor(kind):
    weights = [nn.Parameter(torch.ones(4, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD(weights, lr=1e-4, **{kind: True})
    with Recorder(nn.ParameterList(weights)) as recorder:
        optimizer.step()
    ops = ops_named(recorder.trace, {"foreach": "aten._foreach_add_", "fused": "aten._fused_sgd_"}[kind])
    assert [(op.phase, op.inputs[0].role, op.moved, op.stuck) for op in ops] == [
        ("update", "param:0", 4, 4),
        ("update", "param:1", 3, 0),
    ]


def test_the_loss_scale_is_the_same_in_the_twin():
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    with HalfOnCPU(), Recorder(model) as recorder:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(X).pow(2).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    unscale = next(op for op in recorder.trace.ops if "unscale" in op.name)
    (update,) = [op for op in recorder.trace.ops if "update_scale" in op.name]
    assert unscale.outputs[0].blown > 0
    assert unscale.outputs[-1].largest == unscale.outputs[-1].twin_largest == 1.0  # found_inf
    assert update.outputs[0].largest == update.outputs[0].twin_largest == 2.0**23


def test_twins_start_from_given_weights_where_the_cast_lost_them():
    model = Calculation(lambda s, x: x / s.schedule, unused=nn.Identity())
    model.register_buffer("schedule", torch.full((8,), 1e-9))
    weights = {"schedule": model.schedule.clone()}
    model.half()
    blown = []
    for given in (None, weights):
        with Recorder(model, weights=given) as recorder:
            model(X.half())
        blown.append(recorder.trace.ops[-1].outputs[0].blown)
    assert blown == [0, X.numel()]
    assert torch.equal(weights["schedule"], torch.full((8,), 1e-9))


def test_an_operation_without_a_twin_is_counted_and_does_not_break_the_step(monkeypatch):
    def refuse(wide):
        raise NotImplementedError

    monkeypatch.setitem(__import__("floatline.probe.trace.twin_rules", fromlist=["RULES"]).RULES, "tanh", refuse)
    with Recorder(nn.Identity()) as recorder:
        y = X.half().tanh() * 3.0
    assert torch.equal(y, X.half().tanh() * 3.0)
    assert recorder.trace.meta["twin_failures"] == {"aten.tanh": 1}
    _, tanh, product = recorder.trace.ops
    assert tanh.outputs[0].error is None
    assert product.outputs[0].error is not None  # it starts again from the step's own values


def test_complex_numbers_have_twins():
    ops = values_of(lambda x: torch.view_as_real(torch.fft.rfft((x * x).float())).sum(), X.half())
    assert ops[-1].outputs[0].error > 0
