"""run_target and trace_target: what a run showed, in any precision, and one step of it recorded."""

import contextlib
import math
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.slow import slow
from torch import nn

from floatline.errors import TargetError
from floatline.probe.runs.runs import run_target, trace_target
from floatline.probe.watch.events import ScaleEvent
from floatline.workload import Target

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
Y = X.sum(1, keepdim=True)


def build(precision="fp16-mixed", model=None, loss_fn=nn.functional.mse_loss):
    def build():
        torch.manual_seed(0)
        net = model() if model else nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        return (
            net,
            [((X,), (Y,)), ((X + 1,), (Y,))],
            loss_fn,
            precision,
            lambda m: torch.optim.SGD(m.parameters(), 0.05),
        )

    return Target("net.py", build, None, Path())


def function(train):
    return Target("net.py", None, train, Path())


def train(steps=5, init_scale=2.0**10, factor=1.0):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(X)
        loss = (out.float() - Y).pow(2).mean() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    return {"losses": losses, "model": model}


class Exploding(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def forward(self, x):
        return self.inner(x).masked_fill(x[:, :1] > 0, -1e9)


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed", "bf16-mixed", "fp16-true", "bf16-true"])
def test_a_workload_trains_in_its_precision(precision):
    record = run_target(build(precision), steps=10)
    assert (record.kind, record.precision, record.num_steps, record.num_batches) == ("build", precision, 10, 2)
    assert len(record.losses) == 10
    assert record.losses[-1] < record.losses[0]
    assert record.exception is None
    assert sorted(record.moved) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    dtype = next(record.model.parameters()).dtype
    assert dtype == {"fp16-true": torch.float16, "bf16-true": torch.bfloat16}.get(precision, torch.float32)


def test_the_losses_are_those_of_the_loop():
    record = run_target(function(train))
    assert record.losses == pytest.approx(record.result["losses"])
    assert record.entry == "train"


def test_a_replay_in_fp32_has_no_scale_and_nearly_the_same_losses():
    given, fp32 = run_target(function(train)), run_target(function(train), precision="fp32")
    assert given.of(ScaleEvent)
    assert not fp32.of(ScaleEvent)
    assert fp32.losses == pytest.approx(given.losses, rel=1e-2)
    assert fp32.losses != given.losses


def test_the_same_seed_gives_the_same_run():
    def draw():
        model = nn.Linear(4, 1)
        (model(X) - torch.randn(8, 1)).pow(2).mean().backward()

    losses = [run_target(function(draw), seed=seed).losses for seed in (1, 1, 2)]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_an_exception_is_kept_with_line_module_and_op():
    record = run_target(build(model=Exploding))
    failure = record.exception
    assert "without overflow" in failure.message
    assert Path(failure.file).name == "test_runs.py"
    assert (failure.function.rpartition(".")[2], failure.module, failure.op) == ("forward", "", "aten.masked_fill")
    assert run_target(build(model=Exploding), steps=3, precision="fp32").exception is None


def test_a_search_for_a_scale_is_no_bad_step():
    record = run_target(function(lambda: train(steps=30, init_scale=2.0**36)))
    assert record.skipped
    assert record.first_bad_step is None
    assert record.stuck_skips == []
    assert record.step_to_trace == 29


def test_skips_that_never_end_are_found():
    def endless():
        return train(steps=30, factor=float("inf"))

    record = run_target(function(endless))
    assert len(record.skipped) == 30
    assert record.first_bad_step == 0
    assert record.step_to_trace == 0


def test_a_bad_loss_gradient_and_weight_are_dated():
    def diverge():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1e30)
        for _ in range(5):
            optimizer.zero_grad()
            (model(X) - Y).pow(2).mean().backward()
            optimizer.step()

    record = run_target(function(diverge))
    assert record.first_bad_step == min(record.bad_loss, record.bad_gradient)
    assert 0 < record.first_bad_step <= record.bad_weight
    assert not math.isfinite(record.losses[record.bad_loss])
    assert not record.weights_finite
    assert run_target(function(train)).first_bad_step is None


def test_steps_reach_only_a_function_that_takes_them():
    assert run_target(function(train), steps=3).num_steps == 3
    assert run_target(function(lambda: train()), steps=3).num_steps == 5


@slow
def test_what_cannot_be_run_is_one_line():
    def endless():
        while True:
            time.sleep(0.01)

    def endless_training():
        while True:
            with contextlib.suppress(Exception):
                train()

    for loop in (endless, endless_training):
        with pytest.raises(TargetError, match="did not end: after"):
            run_target(function(loop), limit=0.1)
    with pytest.raises(TargetError, match="ran no backward pass"):
        run_target(function(lambda: None))
    with pytest.raises(TargetError, match="train needs data"):
        run_target(function(lambda data: None))


def test_a_run_that_goes_on_may_take_longer_than_the_limit_of_a_step():
    steps = []

    def slowly():
        for _ in range(6):
            time.sleep(0.5)
            train()
            steps.append(time.perf_counter())

    run_target(function(slowly), limit=2.5)
    assert steps[-1] - steps[0] >= 2.5


def test_what_the_function_prints_goes_to_stderr(capsys):
    def talk():
        sys.stdout.write("epoch 1")
        train()

    run_target(function(talk))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "epoch 1" in captured.err


@pytest.mark.parametrize("target", [build(), function(train)], ids=["build", "train"])
def test_one_step_is_recorded(target):
    trace = trace_target(target, step=2)
    assert trace.meta["step"] == 2
    phases = {op.phase for op in trace.ops}
    assert {"forward", "backward", "update"} <= phases
    products = [op for op in trace.ops if op.phase == "forward" and op.name == "aten.addmm"]
    assert len(products) == (2 if target.builder else 1)
    assert {output.dtype for op in products for output in op.outputs} == {"float16"}


def test_the_watch_leaves_no_operations_of_its_own_in_a_trace():
    trace = trace_target(function(train), step=1)
    assert not [op.name for op in trace.ops if "norm" in op.name or "isnan" in op.name or "clone" in op.name]


def test_a_step_that_does_not_come_is_one_line():
    with pytest.raises(TargetError, match="no step 50"):
        trace_target(function(lambda: train(3)), step=50)
