"""Steps captured at points of a run are those of the run that `run_target` makes: there is one plain loop."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from floatline.plans import Clip, KeptFunction, KeptModule, Plan, Rewrite, Scaling
from floatline.probe import capture_points
from floatline.probe.runs.runs import run_target
from floatline.workload import Target, Workload

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
STEPS = 6
FIELDS = {"weights": "fp32", "compute": "fp16", "scaling": Scaling(init_scale=256.0)}


def scaled_square(x):
    return (x * 16).square() / 256


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.norm = nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        return self.last(scaled_square(self.norm(self.drop(self.first(x))))).sigmoid().log()


def build():
    batches = [((X,), (X[:, :1],)), ((2 * X,), (3 * X[:, :1],)), ((3 * X,), (X[:, :1],))]
    return Net(), batches, nn.functional.mse_loss, "fp32", lambda m: torch.optim.SGD(m.parameters(), 0.1)


def target(plan, tmp_path):
    plan.save(tmp_path / "plan.yaml")
    return Target("net.py", lambda: (*build()[:3], str(tmp_path / "plan.yaml"), build()[4]), None, Path())


PLANS = {
    "mixed": {},
    "function": {"fp32_functions": (KeptFunction(function=f"{__name__}.scaled_square"),)},
    "module": {"fp32_modules": (KeptModule(pattern="last"),)},
    "rewrite": {"rewrites": (Rewrite(kind="log-sigmoid", function=f"{__name__}.Net.forward"),)},
    "clip and sums": {"clip": Clip(max_norm=1e-2), "accumulate": 2},
    "growing scale": {"scaling": Scaling(init_scale=256.0, growth_interval=2)},
    "true": {"weights": "bf16", "compute": "bf16", "scaling": None},
    "update": {"weights": "bf16", "compute": "bf16", "scaling": None, "update": "kahan"},
}


@pytest.mark.parametrize("name", PLANS)
def test_the_captured_run_is_the_run_itself(name, tmp_path):
    given = target(Plan(**FIELDS | PLANS[name]), tmp_path)
    (last,) = capture_points(given, points=(1.0,), steps=STEPS, seed=1)
    ran = run_target(given, steps=STEPS - 1, seed=1)
    assert last.origin.step == STEPS - 1
    own = dict(ran.model.named_parameters())
    assert all(torch.equal(tensor, own[name]) for name, tensor in last.state.captured.items())
    losses = run_target(given, steps=STEPS, seed=1).losses
    assert last.replay().loss == pytest.approx(sum(losses[-len(last.batches) :]), rel=1e-6)


@pytest.mark.parametrize("name", ["function", "rewrite", "module", "update"])
def test_what_a_plan_says_makes_a_difference_here(name, tmp_path):
    """The test above would fail if the loop ignored it."""
    plain = {key: value for key, value in (FIELDS | PLANS[name]).items() if key in FIELDS}
    one, other = (
        capture_points(target(Plan(**fields), tmp_path), points=(1.0,), steps=STEPS, seed=1)[0].state.captured
        for fields in (FIELDS | PLANS[name], plain)
    )
    assert any(not torch.equal(one[key], other[key]) for key in one)


def test_a_workload_gets_everything_back(tmp_path):
    model, batches, loss_fn, _, make_optimizer = build()
    before = copy.deepcopy(model.state_dict())
    workload = Workload(model, batches, loss_fn, "bf16-true", make_optimizer)
    (step,) = capture_points(workload, points=(1.0,), steps=3)
    assert {t.dtype for t in model.state_dict().values() if t.is_floating_point()} == {torch.float32}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if "num_" not in name)
    assert step.replay().finite
