"""A guarded run with Muon: it trains, skips wholly, and resumes bit for bit."""

import pytest
import torch
from tests.optim.steps import same_bits, snapshot
from torch import nn

import floatline as fl

DTYPES = {"fp32": torch.float32, "bf16-mixed": torch.float32, "bf16-true": torch.bfloat16, "fp16-true": torch.float16}
BATCHES = [torch.randn(8, 16, generator=torch.Generator().manual_seed(i)) for i in range(6)]


def make(plan, folder=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(DTYPES[plan])
    optimizer = fl.optim.Muon(model.parameters(), 0.02, ns_dtype="fp32", adamw={"lr": 1e-2})
    return model, fl.Guard(model, optimizer, plan=plan, clip_norm=1.0, folder=folder)


def train(model, guard, batches):
    def loss(x):
        return model(x.to(next(model.parameters()).dtype)).float().square().mean()

    return [guard.step(loss, x) for x in batches]


@pytest.mark.parametrize("plan", DTYPES)
def test_the_loss_falls_under_every_plan(plan):
    model, guard = make(plan)
    outcomes = train(model, guard, BATCHES * 5)
    losses = [float(outcome.loss) for outcome in outcomes]
    assert losses[-1] < 0.5 * losses[0]
    assert sum(outcome.applied for outcome in outcomes) >= 20


@pytest.mark.parametrize("plan", DTYPES)
def test_a_bad_batch_keeps_every_bit(plan):
    model, guard = make(plan)
    train(model, guard, BATCHES[:3])
    before = snapshot(guard.optimizer)
    bad = BATCHES[3].clone()
    bad[0, 0] = torch.nan
    (outcome,) = train(model, guard, [bad])
    assert not outcome.applied
    assert same_bits(before, snapshot(guard.optimizer))
    train(model, guard, [BATCHES[3]])
    assert not same_bits(before, snapshot(guard.optimizer))


@pytest.mark.parametrize("plan", DTYPES)
def test_a_saved_run_goes_on_bit_for_bit(plan, tmp_path):
    model, guard = make(plan)
    train(model, guard, BATCHES[:3])
    path = guard.save(tmp_path)
    train(model, guard, BATCHES[3:])
    again, resumed = make(plan)
    resumed.load(path)
    train(again, resumed, BATCHES[3:])
    assert same_bits(snapshot(guard.optimizer), snapshot(resumed.optimizer))
    train(again, resumed, BATCHES[:1])
    assert not same_bits(snapshot(guard.optimizer), snapshot(resumed.optimizer))
