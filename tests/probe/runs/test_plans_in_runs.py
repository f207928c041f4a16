"""A workload is run as its plan says: batches summed up, gradients bounded, modules kept in FP32."""

from pathlib import Path

import pytest
import torch
from torch import nn

from floatline.plans import Clip, KeptModule, Plan, Scaling
from floatline.probe.runs.runs import run_target, trace_target
from floatline.probe.watch.events import StepEvent
from floatline.workload import Target

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))


def target(tmp_path, **fields):
    path = tmp_path / "plan.yaml"
    Plan(**{"weights": "fp32", "compute": "fp16", "scaling": Scaling(init_scale=256.0), **fields}).save(path)

    def build():
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        batches = [((X,), (X[:, :1],)), ((2 * X,), (3 * X[:, :1],))]
        return net, batches, nn.functional.mse_loss, str(path), lambda m: torch.optim.SGD(m.parameters(), 0.1)

    return Target("net.py", build, None, Path())


def test_batches_are_summed_up_before_an_update(tmp_path):
    record = run_target(target(tmp_path, accumulate=2), steps=3)
    assert (record.num_steps, len(record.losses), record.optimizers[0].num_steps) == (3, 6, 3)
    alone = run_target(target(tmp_path), steps=3)
    assert record.losses[0] == pytest.approx(alone.losses[0] / 2, rel=1e-3)


@pytest.mark.parametrize("clip", [Clip(max_value=1e-3), Clip(max_norm=1e-3)])
def test_gradients_are_bounded(tmp_path, clip):
    record = run_target(target(tmp_path, clip=clip), steps=2)
    assert max(max(event.largest) for event in record.of(StepEvent)) <= 1.001e-3


def test_gradients_are_not_bounded_without_a_clip(tmp_path):
    record = run_target(target(tmp_path), steps=2)
    assert max(max(event.largest) for event in record.of(StepEvent)) > 1e-2


@pytest.mark.parametrize("weights", ["fp32", "fp16"])
def test_modules_stay_in_fp32(tmp_path, weights):
    def dtypes(**fields):
        trace = trace_target(target(tmp_path, weights=weights, scaling=None, **fields), step=1)
        return [op.outputs[0].dtype for op in trace.ops if op.phase == "forward" and op.name == "aten.addmm"]

    assert dtypes() == ["float16", "float16"]
    assert dtypes(fp32_modules=(KeptModule(pattern="2"),)) == ["float16", "float32"]
