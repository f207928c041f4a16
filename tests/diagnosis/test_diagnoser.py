"""A guarded run whose failed steps are diagnosed in place: named once, and the run is what it would have been."""

import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.slow import slow
from torch import nn

import floatline as fl
from floatline.diagnosis import Diagnoser
from floatline.errors import GuardError
from floatline.probe.bundles.bundle import read_bundle


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, 4)

    def forward(self, x, fault=""):
        x = self.drop(self.norm(self.body(x)))
        x = self.head(x * (1 + 0.01 * random.random()))
        if fault == "overflow":
            x = (x * 1e3) * (x * 1e3)
        if fault == "log of zero":
            return torch.log(torch.softmax(x * 12, dim=-1).half())
        return torch.log_softmax(x, dim=-1)


PLENTY = 36000.0  # seconds: on a busy machine a step takes what it takes
FAULTS = {"overflow": "product-overflow", "log of zero": "rounded-onto-singularity", "bad data": "bad-input-data"}


def train(on_failure=None, *, fault="", at=(5, 6, 7, 12), steps=16, folder=None, hook=True, late=0):
    """A guarded run with a fault in some steps, and what is left of it; read late as on a GPU."""
    torch.manual_seed(0)
    random.seed(0)
    model = Net()
    optimizer = fl.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"on_failure": on_failure} if hook else {}
    guard = fl.Guard(model, optimizer, plan="fp16-mixed", folder=folder, **options)
    guard._late = late

    def compute_loss(batch):
        x, y, planted = batch
        return F.nll_loss(model(x, planted).float(), y)

    outcomes = []
    with fl.HalfOnCPU():
        for number in range(1, steps + 1):
            x = torch.randn(32, 8)
            y = x[:, :4].argmax(1)
            planted = fault if number in at else ""
            if planted == "bad data":
                x[0, 0] = float("nan")
            outcomes.append(guard.step(compute_loss, (x, y, planted)))
    summary = guard.summary()
    guard.close()
    states = [value for state in optimizer.state.values() for value in state.values()]
    left = [*model.parameters(), *model.buffers(), *states, torch.get_rng_state(), guard.run.judge.scale]
    return summary, [o.applied for o in outcomes], left, guard


@slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_cause_is_named_once_with_its_line(fault, tmp_path):
    diagnoser = Diagnoser(budget=PLENTY)
    summary, applied, _, _ = train(diagnoser, fault=fault, folder=tmp_path / "run")
    assert applied.count(False) == 4
    assert [(named.attempt, named.finding.cause.id) for named in diagnoser.named] == [(5, FAULTS[fault])]
    events = [line for line in (tmp_path / "run").rglob("*.jsonl") for line in line.read_text().splitlines()]
    assert len([line for line in events if '"diagnosis"' in line]) == 1
    assert f"diagnosis of step 5: {FAULTS[fault]} at test_diagnoser.py:" in summary
    assert Path(diagnoser.named[0].finding.file) == Path(__file__)


@slow
def test_the_line_is_the_planted_one():
    diagnoser = Diagnoser(budget=PLENTY)
    train(diagnoser, fault="log of zero")
    source = Path(__file__).read_text().splitlines()
    assert "torch.log(torch.softmax" in source[diagnoser.named[0].finding.line - 1]


@slow
@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_the_run_is_bit_for_bit_that_without_the_hook(fault):
    _, applied, left, _ = train(Diagnoser(budget=PLENTY), fault=fault)
    _, expected_applied, expected, _ = train(fault=fault, hook=False)
    assert applied == expected_applied
    for one, other in zip(left, expected, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@slow
def test_the_check_above_can_fail():
    def meddle(failed):
        torch.rand(1)

    _, _, left, _ = train(meddle, fault="bad data")
    _, _, expected, _ = train(fault="bad data", hook=False)
    assert not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(left, expected, strict=True))


@slow
def test_a_healthy_run_is_not_looked_at():
    diagnoser = Diagnoser(budget=PLENTY)
    summary, applied, _, _ = train(diagnoser)
    assert all(applied)
    assert diagnoser.seconds == 0.0
    assert "diagnosis" not in summary


@slow
def test_a_budget_of_0_names_nothing_and_says_why_once():
    diagnoser = Diagnoser(budget=0)
    summary, _, _, _ = train(diagnoser, fault="bad data")
    assert diagnoser.named == []
    assert [line for line in summary.splitlines() if line.startswith("diagnosis")] == [
        "diagnosis of step 5: not diagnosed: the budget of 0 s is used up"
    ]


@slow
def test_a_run_of_several_processes_is_left_alone(monkeypatch):
    monkeypatch.setattr("floatline.diagnosis.diagnoser.num_processes", lambda group: 4)
    diagnoser = Diagnoser(budget=PLENTY)
    summary, _, _, _ = train(diagnoser, fault="bad data")
    assert diagnoser.named == []
    assert summary.count("not diagnosed: 4 processes train together") == 2  # the last event, and its own line


@slow
def test_a_budget_that_is_too_small_for_a_recording_is_kept():
    diagnoser = Diagnoser(budget=1e-4)
    summary, _, _, _ = train(diagnoser, fault="bad data")
    assert diagnoser.named == []
    assert "more than the budget has left" in summary


@slow
def test_a_scale_search_is_no_failure():
    seen = []
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = fl.optim.SGD(model.parameters(), lr=1e-3)
    guard = fl.Guard(model, optimizer, plan="fp16-mixed", on_failure=lambda failed: seen.append(failed.outcome.scale))
    weight = 20.0

    def compute_loss(x):
        return (model(x) * weight).float().mean()

    with fl.HalfOnCPU():
        for _ in range(4):
            guard.step(compute_loss, torch.full((2, 4), 3.0))
        assert guard.run.diary.accounts.run.skipped["overflow"] > 0
        assert seen == []
        weight = 30000.0  # now no scale can hold the gradient
        for _ in range(18):
            guard.step(compute_loss, torch.full((2, 4), 3.0))
    assert set(seen) == {1.0}


@slow
def test_a_gradient_that_no_scale_can_hold_is_named():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    diagnoser = Diagnoser(budget=PLENTY)
    guard = fl.Guard(
        model, fl.optim.SGD(model.parameters(), lr=1e-3), plan="fp16-mixed", policy="balanced", on_failure=diagnoser
    )
    with fl.HalfOnCPU():
        for _ in range(18):
            guard.step(lambda x: (model(x).float() * 3e5).mean(), torch.full((2, 4), 3.0))
            if diagnoser.named:
                break
    assert [named.finding.cause.id for named in diagnoser.named] == ["gradient-overflow"]


@slow
def test_what_the_hook_gets_is_what_the_step_began_with():
    got = []
    train(got.append, fault="bad data", at=(5,))
    failed = got[0]
    assert failed.outcome.attempt == 5
    assert failed.updates_since == 0
    assert failed.batches[0][2] == "bad data"
    assert all(buffer.isfinite().all() for buffer in failed.buffers.values())
    assert failed.run.model.norm.running_mean.isfinite().all()  # the failed step has been undone


@slow
def test_a_step_that_is_read_late_has_its_own_batch_and_buffers():
    got = []
    train(got.append, fault="bad data", at=(5, 7), late=3)
    assert [failed.outcome.attempt for failed in got] == [5, 7]
    assert [failed.updates_since for failed in got] == [2, 3]  # steps 6 and 8; 8, 9 and 10
    assert all(failed.batches[0][0].isnan().any() for failed in got)
    assert all(buffer.isfinite().all() for buffer in got[0].buffers.values())


@slow
def test_a_step_that_is_read_late_is_named_all_the_same():
    diagnoser = Diagnoser(budget=PLENTY)
    _, _, left, _ = train(diagnoser, fault="overflow", late=4)
    assert [named.finding.cause.id for named in diagnoser.named] == ["product-overflow"]
    _, _, expected, _ = train(fault="overflow", late=4, hook=False)
    for one, other in zip(left, expected, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@slow
def test_a_hook_that_raises_is_noted_and_the_run_goes_on():
    def fail(failed):
        raise ValueError("in the hook\nand more")

    summary, applied, _, _ = train(fail, fault="bad data", at=(5,))
    assert applied.count(True) == 15
    assert "could not be diagnosed: ValueError: in the hook" in summary


@slow
def test_a_named_step_is_written_as_a_bundle(tmp_path):
    diagnoser = Diagnoser(budget=PLENTY, folder=tmp_path / "bundles", with_data=True)
    train(diagnoser, fault="bad data")
    read = read_bundle(tmp_path / "bundles" / "step-00000005")
    assert diagnoser.named[0].bundle == (tmp_path / "bundles" / "step-00000005").absolute()
    assert read.findings[0]["cause"] == "bad-input-data"
    assert read.has_data


def test_weights_that_are_broken_already_are_said():
    diagnoser = Diagnoser(budget=PLENTY)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    guard = fl.Guard(model, fl.optim.SGD(model.parameters(), lr=1e-3), plan="bf16-mixed", on_failure=diagnoser)
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
    with pytest.raises(fl.GuardStop):
        guard.step(lambda x: model(x).float().mean(), torch.ones(2, 4))
    assert (
        "weight is not finite before the step" in str(guard.run.diary.accounts.last_event or "") or guard.run.diagnoses
    )
    assert diagnoser.named == []


@pytest.mark.parametrize("budget", [-1.0, float("nan"), float("inf"), True, "30"])
def test_a_budget_that_is_no_time_is_refused(budget):
    with pytest.raises(GuardError, match="Give seconds, 0 or more"):
        Diagnoser(budget=budget)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_failed_step_is_named_and_the_run_is_the_same():
    def run(on_failure):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.Linear(64, 4)).cuda()
        optimizer = fl.optim.AdamW(model.parameters(), lr=1e-3)
        guard = fl.Guard(model, optimizer, plan="fp16-mixed", on_failure=on_failure)

        def compute_loss(batch):
            x, y, size = batch
            x = model(x) * size
            return F.cross_entropy(x * x, y)

        for number in range(24):
            x = torch.randn(32, 64, device="cuda")
            guard.step(compute_loss, (x, x[:, :4].argmax(1), 1e5 if number in (5, 14) else 1.0))
        return guard.summary(), [p.detach().clone() for p in model.parameters()]

    diagnoser = Diagnoser(budget=PLENTY)
    summary, weights = run(diagnoser)
    assert [named.finding.cause.family for named in diagnoser.named] == ["range"], summary
    _, expected = run(None)
    assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))
