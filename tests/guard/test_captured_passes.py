"""graph=True: the bits of the steps without it, whatever comes; what cannot be captured is told in one line."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import floatline as fl
from floatline.guard import captured_passes

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
WEIGHTS = {"fp16-true": torch.float16, "bf16-true": torch.bfloat16}


class Net(nn.Module):
    """Has all that a graph may get wrong: random numbers, buffers that change, a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 4))
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.body(x)


def make(plan, *, graph, **options):
    torch.manual_seed(0)
    net = Net().to("cuda" if torch.cuda.is_available() else "cpu", WEIGHTS.get(plan, torch.float32))
    return fl.Guard(net, fl.optim.AdamW(net.parameters(), lr=1e-2), plan=plan, graph=graph, **options)


def batches(num, *, rows=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(rows, 12, generator=generator).cuda() for _ in range(num)]
    return [{"x": one[:, :8].to(dtype), "y": one[:, 8:]} for one in drawn]


def loss_of(guard):
    return lambda batch: F.mse_loss(guard.model(batch["x"]).float(), batch["y"])


def counted(guard):
    return lambda batch: (loss_of(guard)(batch), batch["count"])


def end_of(guard):
    guard.drain()
    torch.cuda.synchronize()
    return {name: value.clone() for name, value in guard.model.state_dict().items()}, torch.cuda.get_rng_state()


def assert_same(one, other):
    (weights, drawn), (others, others_drawn) = one, other
    assert torch.equal(drawn, others_drawn)
    for name, value in weights.items():
        assert torch.equal(value, others[name]), name


class TestOnAGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("plan", ["fp32", "fp16-mixed", "bf16-mixed", "fp16-true", "bf16-true"])
    @pytest.mark.parametrize("num", [1, 2])
    def test_captured_steps_have_the_bits_of_plain_ones(self, plan, num):
        ends, told = [], []
        for graph in (False, True):
            guard = make(plan, graph=graph, clip_norm=1.0)
            torch.manual_seed(3)
            outcomes = []
            for step in range(14):
                given = batches(num * 14, dtype=WEIGHTS.get(plan, torch.float32))[num * step : num * step + num]
                if step == 9:
                    given[-1]["x"][0, 0] = math.nan
                outcomes.append(guard.step(loss_of(guard), *given))
            assert (guard._captured is not None and len(guard._captured._graphs) == 1) is graph
            ends.append(end_of(guard))
            told.append([(one.loss, one.reason, one.scale, one.grad_norm) for one in outcomes])
        assert_same(*ends)
        assert str(told[0]) == str(told[1])  # NaN is told as NaN
        assert [reason for _, reason, *_ in told[1]].count("forward-nonfinite") == 1

    def test_batches_of_another_shape_are_captured_apart(self):
        ends = []
        for graph in (False, True):
            guard = make("fp16-mixed", graph=graph)
            torch.manual_seed(3)
            for step in range(16):
                guard.step(loss_of(guard), batches(16, rows=16 if step % 4 else 6)[step])
            ends.append(end_of(guard))
        assert len(guard._captured._graphs) == 2
        assert_same(*ends)

    def test_more_shapes_than_are_captured_are_run_as_they_are(self):
        guard = make("fp16-mixed", graph=True)
        for rows in range(4, 24):
            guard.step(loss_of(guard), batches(1, rows=rows)[0])
        assert guard.summary().startswith("20 attempted, 20 applied")
        assert guard._captured._graphs == {}

    def test_a_number_of_python_that_changes_is_noticed_and_the_graph_given_up(self, capsys):
        guard, weight = make("fp16-mixed", graph=True), {"now": 1.0}

        def compute_loss(batch):
            return weight["now"] * loss_of(guard)(batch)

        for one in batches(12):
            weight["now"] *= 1.5
            guard.step(compute_loss, one)
        said = capsys.readouterr().err
        assert "reads something that changes from step to step and is in no batch" in said
        assert "The last 2 steps of this shape were made as captured" in said
        assert guard._captured._graphs == {}

    def test_a_batch_that_a_function_holds_is_never_captured(self):
        guard = make("fp16-mixed", graph=True)
        for one in batches(10):
            guard.step(lambda _, one=one: loss_of(guard)(one), None)
        assert guard._captured._graphs == {}

    def test_a_function_that_is_written_anew_in_each_step_is_captured(self):
        guard = make("fp16-mixed", graph=True)
        for one in batches(8):
            guard.step(lambda batch: F.mse_loss(guard.model(batch["x"]).float(), batch["y"]), one)
        assert len(guard._captured._graphs) == 1

    def test_a_step_that_reads_a_number_is_refused_in_one_line_and_leaves_nothing(self):
        guard = make("fp16-mixed", graph=True)

        def compute_loss(batch):
            loss = loss_of(guard)(batch)
            return loss * (2.0 if loss.item() > 1e9 else 1.0)

        given = batches(4)
        for one in given[:3]:
            guard.step(compute_loss, one)
        with pytest.raises(fl.FloatlineError, match="graph=True cannot capture this step") as found:
            guard.step(compute_loss, given[3])
        assert "\n" not in str(found.value)
        assert all(param.grad is None for param in guard.model.parameters())
        assert guard.attempts == 3
        torch.cuda.synchronize()
        guard.step(loss_of(guard), given[3])  # another function
        assert guard.summary().startswith("4 attempted, 4 applied")

    def test_weights_of_micro_batches_are_tensors(self):
        ends = []
        for graph in (False, True):
            guard = make("fp32", graph=graph)
            torch.manual_seed(3)
            for one in batches(8):
                parts = [{"x": one["x"][:5], "y": one["y"][:5]}, {"x": one["x"][5:], "y": one["y"][5:]}]
                counts = [torch.tensor(float(len(part["x"])), device="cuda") for part in parts]
                given = [{**part, "count": count} for part, count in zip(parts, counts, strict=True)]
                guard.step(counted(guard), *given)
            ends.append(end_of(guard))
        assert_same(*ends)
        guard = make("fp32", graph=True)
        with pytest.raises(fl.FloatlineError, match="is no tensor on the GPU"):
            for one in batches(6):
                guard.step(lambda batch: (loss_of(guard)(batch), 16), one)

    def test_a_batch_of_an_unknown_kind_is_refused(self):
        @dataclass
        class Batch:
            x: torch.Tensor

        guard = make("fp16-mixed", graph=True)
        with pytest.raises(fl.FloatlineError, match="a batch holds a Batch, of which nobody knows"):
            guard.step(lambda batch: guard.model(batch.x).float().mean(), Batch(batches(1)[0]["x"]))

    def test_skip_outliers_is_refused(self):
        with pytest.raises(fl.FloatlineError, match="skip_outliers=True"):
            make("fp16-mixed", graph=True, policy=fl.Policy(skip_outliers=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the weights would be on the GPU")
def test_without_a_gpu_it_is_refused_in_one_line():
    with pytest.raises(fl.FloatlineError, match=r"graph=True captures CUDA graphs, and the weights are on cpu\."):
        make("fp32", graph=True)


def test_what_a_function_computes_with_is_what_it_is_known_by():
    def make_loss(model):
        return lambda batch: model(batch)

    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    known = captured_passes._identity(make_loss(one))
    assert known == captured_passes._identity(make_loss(one))
    assert hash(known) == hash(captured_passes._identity(make_loss(one)))
    assert known != captured_passes._identity(make_loss(other))
    assert captured_passes._identity(one) != captured_passes._identity(other)
    assert captured_passes._identity(one.forward) == captured_passes._identity(one.forward)  # a method, made twice
    assert captured_passes._identity(one.forward) != captured_passes._identity(other.forward)
