"""The fault campaign in its short form, and a judge that can condemn."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from tests.marks import needs_fsdp2
from tests.preloaded import run_preloaded
from tests.slow import exhaustive

import floatline as fl

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not (dist.is_available() and dist.is_gloo_available()), reason="needs Linux and gloo"
)
ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
HANG = """
import sys, time
from pathlib import Path
sys.path.insert(0, "benchmarks")
from campaign import plan, session
session.IN_GROUP["clock"] = lambda *_: time.sleep(1000)
faults = [plan.draw_fault(0, number, kind, "ddp") for number, kind in enumerate(["batch", "clock", "batch"])]
tell = lambda result: print(result.fault.kind, result.verdict.outcome)
session.run_campaign(faults, Path(sys.argv[1]), patience=40.0, tell=tell)
"""


@pytest.fixture(scope="module")
def campaign():
    """The parts of the campaign that are called here."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from campaign import judge, numbers, plan, trial
    finally:
        sys.path.remove(str(BENCHMARKS))
    return SimpleNamespace(judge=judge, numbers=numbers, plan=plan, trial=trial)


@exhaustive
@needs_fsdp2
def test_thirty_planted_faults_of_every_kind_do_no_harm(tmp_path, campaign):
    results = tmp_path / "results.jsonl"
    words = ["--num", "30", "--seed", "199", "--results", str(results)]
    run = run_preloaded([str(BENCHMARKS / "faults.py"), *words], cwd=ROOT)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    faults = campaign.plan.draw_faults(199, 30)
    rows = {row["number"]: row["verdict"]["outcome"] for row in map(json.loads, results.read_text().splitlines())}
    assert set(rows) == set(range(30))
    assert set(rows.values()) <= {"survived", "stopped", "noticed", "not seen"}
    assert {fault.kind for fault in faults} == set(campaign.plan.KINDS)
    assert {fault.setting.layout for fault in faults} == {"plain", "ddp", "fsdp2"}
    flips = [fault.number for fault in faults if fault.kind.endswith("flip")]
    assert all(rows[number] == "survived" for number in rows if number not in flips)


def test_a_campaign_has_a_thousand_faults_and_the_same_ones_for_the_same_seed(campaign):
    faults = campaign.plan.draw_faults(0, 1050)
    assert len(faults) == 1050
    assert faults == campaign.plan.draw_faults(0, 1050)
    assert faults != campaign.plan.draw_faults(1, 1050)


def nan_in_the_forward_pass(campaign):
    fault = campaign.plan.draw_fault(0, 0, "forward", "plain")
    return replace(fault, details={**fault.details, "value": "nan"})


def try_it(campaign, fault, folder):
    ranks = campaign.numbers.Ranks(0, 1)
    return campaign.numbers.try_numbers(fault, ranks, campaign.numbers.References(ranks), folder)


def test_a_guarded_run_survives_a_nan(tmp_path, campaign):
    assert try_it(campaign, nan_in_the_forward_pass(campaign), tmp_path).outcome == "survived"


def test_the_judge_sees_that_an_unguarded_loop_applies_a_nan(tmp_path, campaign, monkeypatch):
    def unguarded(guard, compute_loss, batch, *, skip=None):
        guard.optimizer.zero_grad()
        compute_loss(batch).backward()
        guard.optimizer.step()
        return SimpleNamespace(applied=True, reason=None)

    monkeypatch.setattr(fl.Guard, "step", unguarded)
    with pytest.raises(campaign.judge.BrokenError) as found:
        try_it(campaign, nan_in_the_forward_pass(campaign), tmp_path)
    assert found.value.verdict.outcome == "corrupted"


def test_the_judge_sees_a_skipped_step_that_moved_one_bit(tmp_path, campaign, monkeypatch):
    update = fl.Guard._finish

    def with_a_bit(guard, *args, **options):
        outcome = update(guard, *args, **options)
        if not outcome.applied:
            next(guard.model.parameters()).data.view(-1)[0] *= 1.001
        return outcome

    monkeypatch.setattr(fl.Guard, "_finish", with_a_bit)
    with pytest.raises(campaign.judge.BrokenError) as found:
        try_it(campaign, nan_in_the_forward_pass(campaign), tmp_path)
    assert found.value.verdict.outcome == "corrupted"


@pytest.mark.parametrize(
    "lie",
    [
        lambda lines: lines[:-2] + lines[-1:],  # a step is missing
        lambda lines: [
            *lines[:2],
            lines[2].replace('"applied":true', '"applied":false,"reason":"outlier"'),
            *lines[3:],
        ],
        lambda lines: [*lines[:2], change_loss(lines[2]), *lines[3:]],
    ],
    ids=["a missing step", "a skip that was none", "another loss"],
)
def test_the_judge_sees_a_ledger_that_lies(tmp_path, campaign, lie):
    setting = campaign.plan.Setting("plain", 1, "fp32", "floatline", 0, snapshots=False)
    trial = campaign.trial.run_steps(campaign.trial.Trial(setting, folder=tmp_path), 5)
    trial.guard.close()
    campaign.judge.check_ledger(tmp_path, [trial.seen])
    path = tmp_path / "ledger-00000.jsonl"
    lines = path.read_text("utf-8").splitlines()
    path.write_text("\n".join(lie(lines)) + "\n", "utf-8")
    assert path.read_text("utf-8").splitlines() != lines
    with pytest.raises(campaign.judge.BrokenError) as found:
        campaign.judge.check_ledger(tmp_path, [trial.seen])
    assert found.value.verdict.outcome == "false ledger"


def change_loss(line):
    fields = json.loads(line)
    return json.dumps({**fields, "loss": fields["loss"] + 0.01}, separators=(",", ":"))


@exhaustive
def test_a_hang_is_reported_and_the_campaign_goes_on(tmp_path):
    run = run_preloaded(["-c", HANG, str(tmp_path)], cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["batch survived", "clock hang", "batch survived"]
