"""Changes of a replay: lines in FP32, constants that fit, FP32 updates, another loss scale."""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from floatline.precision.islands import LineIslands
from floatline.probe.runs.conditions import Change, changed
from floatline.probe.runs.runs import replay_step, run_target
from floatline.workload import Target

HERE = __file__
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
Y = X.sum(1, keepdim=True)


def line():
    return sys._getframe(1).f_lineno


def apply(change):
    return changed(change, in_step=lambda: False)


def square(x):
    at = line() + 1
    return (x * x).sum(), at


def test_a_line_is_computed_in_fp32_forward_and_backward():
    x = torch.full((4,), 300.0, dtype=torch.float16, requires_grad=True)
    _, at = square(x)
    with LineIslands([(HERE, at)]):
        total, _ = square(x)
    total.backward()
    assert (total.dtype, float(total.detach())) == (torch.float32, 360000.0)
    assert (x.grad.dtype, x.grad.tolist()) == (torch.float16, [600.0] * 4)


def test_another_line_stays_as_it_is():
    x = torch.full((4,), 300.0, dtype=torch.float16)
    with LineIslands([(HERE, 1)]):
        assert math.isinf(square(x)[0])


def test_autocast_is_off_on_the_line_and_on_behind_it():
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    at = line() + 2
    with LineIslands([(HERE, at)]), torch.autocast("cpu", dtype=torch.float16):
        here = layer(x)
        behind = layer(here)
    assert (here.dtype, behind.dtype) == (torch.float32, torch.float16)


def test_wide_results_are_narrowed_for_sixteen_bit_weights():
    layer, x = nn.Linear(4, 4).half(), torch.ones(2, 4).half()
    at = line() + 2
    with LineIslands([(HERE, at)]):
        wide = x * 2
        assert (wide.dtype, layer(wide).dtype) == (torch.float32, torch.float16)


def test_casts_and_new_tensors_of_the_line_are_fp32():
    at = line() + 2
    with LineIslands([(HERE, at)]):
        made = torch.full((2,), 1e5).half(), torch.zeros(2, dtype=torch.float16), torch.ones(2).to(torch.bfloat16)
    assert {tensor.dtype for tensor in made} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_eps_of_a_16_bit_operand_is_that_of_fp32_and_any_other_constant_stays(dtype):
    x = torch.full((4,), 0.5, dtype=dtype)
    own = torch.finfo(x.dtype).eps
    at = line() + 2
    with LineIslands([(HERE, at)]):
        guarded, moved = x - x + own, x - x + 2 * own
    assert guarded.tolist() == [torch.finfo(torch.float32).eps] * 4
    assert moved.tolist() == [2 * own] * 4
    with LineIslands([(HERE, 1)]):
        assert (x - x + own).tolist() == [own] * 4


def test_a_constant_is_brought_within_its_format():
    scores, hidden = torch.zeros(2, dtype=torch.float16), torch.tensor([True, False])
    at = line() + 2
    with LineIslands([], fitting=[(HERE, at)]):
        filled = scores.masked_fill(hidden, -1e9)
    assert filled.tolist() == [-65504.0, 0.0]


def test_the_constant_above_does_not_fit_by_itself():
    with pytest.raises(RuntimeError, match="overflow"):
        torch.zeros(2, dtype=torch.float16).masked_fill(torch.tensor([True, False]), -1e9)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_fp32_updates_lose_nothing(make):
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    with apply(Change(fp32_updates=True)):
        optimizer = make([weight], lr=1e-3)
        for _ in range(20):
            weight.grad = torch.ones(3, dtype=torch.bfloat16)
            optimizer.step()
    assert weight.dtype == torch.bfloat16
    assert float(weight.detach()[0]) < 0.999


def test_the_updates_above_are_lost_without_it():
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    for _ in range(20):
        weight.grad = torch.ones(3, dtype=torch.bfloat16)
        optimizer.step()
    assert weight.tolist() == [1.0] * 3


def target(factor=1.0, gain=1.0):
    def build():
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        with torch.no_grad():
            net[2].weight.mul_(gain)

        def loss(out, y):
            return factor * (out.float() - y.float()).pow(2).mean()

        return net, [((X,), (Y,))], loss, "fp16-true", lambda m: torch.optim.SGD(m.parameters(), 1e-3)

    return Target("net.py", build, None, Path())


def test_a_loss_factor_saves_gradients_of_the_step():
    lost = {k: replay_step(target(1e-8), step=2, change=Change(loss_factor=k))[1].meta["gradients"] for k in (1.0, 2e5)}
    assert lost[1.0]["lost"] > 0.5
    assert lost[2e5]["lost"] < 0.02
    assert lost[2e5]["error"] < 0.05


def test_the_error_of_all_gradients_is_small_in_a_healthy_step_and_none_where_one_is_not_finite():
    healthy = replay_step(target(), step=1)[1].meta["gradients"]
    assert 0 < healthy["error"] < 0.01
    assert sum(healthy["exponents"].values()) == 49
    assert replay_step(target(gain=1e4), step=0)[1].meta["gradients"]["error"] is None


def test_modules_in_fp32_are_found_in_the_model_that_a_loop_calls():
    def train(steps=3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
        with torch.no_grad():
            model[0].weight.mul_(1e6)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (model(X).float() - Y).pow(2).mean()
            loss.backward()
            optimizer.step()

    loop = Target("net.py", None, train, Path())
    assert run_target(loop).first_bad_step == 0
    assert run_target(loop, change=Change(islands=("0",))).first_bad_step is None


def test_what_is_written_in_place_becomes_fp32_where_that_is_asked_for():
    def add_up(**options):
        total, one = torch.zeros((), dtype=torch.bfloat16), torch.ones((), dtype=torch.bfloat16)
        at = line() + 3
        with LineIslands([(HERE, at)], **options):
            for _ in range(300):
                total.add_(one)
        return total

    assert add_up().item() == 256.0  # BF16 counts no further
    assert add_up(widens=True).item() == 300.0
    assert add_up(widens=True).dtype is torch.float32
