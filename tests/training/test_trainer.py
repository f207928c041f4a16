"""Trainer: a resumed run is the run that was never ended, bit for bit; wrong use is one line."""

import math
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.slow import slow
from torch import nn

import floatline as fl
from floatline.errors import GuardError, LedgerError, PlanError
from floatline.findings import GuardStop
from floatline.guard.checkpoints.run_files import load_checkpoint, newest_checkpoint
from floatline.guard.policy import POLICIES, Policy
from floatline.plans import Clip, Plan, Scaling
from floatline.plans.presets import resolve_plan
from floatline.training.placement import place
from floatline.training.trainer import Trainer
from floatline.workload import Workload

CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="expects the run on a CPU")


@pytest.fixture(autouse=True)
def ctrl_c_is_heard():
    """Tests that run in the background inherit a Ctrl-C that is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Net(nn.Module):
    """Dropout, and three sources of random numbers, so that a resume that forgets one of them differs."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        noise = 0.01 * (random.random() + float(np.random.rand())) if self.training else 0.0
        return self.head(self.body(x)) + noise


def loss_fn(logits, targets):
    return nn.functional.cross_entropy(logits.float(), targets)


def make_workload(precision="fp16-mixed", *, num_batches=7, optimizer=None, loss=loss_fn, evaluate=None):
    torch.manual_seed(0)
    batches = [((torch.randn(6, 8),), (torch.randint(0, 3, (6,)),)) for _ in range(num_batches)]
    make = optimizer or (lambda model: fl.optim.AdamW(model.parameters(), lr=1e-2))
    return Workload(Net(), batches, loss, precision, make, evaluate)


def train(folder, precision="fp16-mixed", *, steps=30, workload=None, **options):
    return Trainer(workload or make_workload(precision), folder=folder, steps=steps, **options).run()


def final(folder):
    """Everything a run ended with, but for times and paths."""
    tensors, state = load_checkpoint(newest_checkpoint(folder))
    return tensors, {name: value for name, value in state.items() if name not in ("accounts", "snapshots")}


def assert_same_end(one, other):
    (tensors, state), (others, other_state) = final(one), final(other)
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), others[name].reshape(-1).view(torch.uint8)), name
    assert repr(state) == repr(other_state)


PLANS = {
    "fp32": resolve_plan("fp32"),
    "fp16-mixed": resolve_plan("fp16-mixed"),
    "fp16-true": resolve_plan("fp16-true"),
    "bf16-true": resolve_plan("bf16-true"),
    "accumulated": resolve_plan("safe"),
    # The scale has to fall first: skipped steps and its search are part of what goes on.
    "overflowing": Plan(name="high", weights="fp32", compute="fp16", scaling=Scaling(init_scale=2.0**24)),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_resumed_run_ends_with_the_bits_of_one_that_was_never_ended(tmp_path, name):
    plan = PLANS[name]
    whole = train(tmp_path / "whole", plan=plan, steps=14)
    train(tmp_path / "parts", plan=plan, steps=5)
    resumed = train(tmp_path / "parts", resume=True, steps=14)
    assert_same_end(tmp_path / "whole", tmp_path / "parts")
    same = ("attempted", "applied", "skipped", "first_loss", "last_loss", "metric")
    assert [getattr(whole, field) for field in same] == [getattr(resumed, field) for field in same]
    assert whole.attempted == 14
    assert (whole.skipped["overflow"] > 5) is (name == "overflowing")
    assert fl.Ledger.read(tmp_path / "whole").loss == fl.Ledger.read(tmp_path / "parts").loss
    assert fl.Ledger.read(tmp_path / "whole").scale == fl.Ledger.read(tmp_path / "parts").scale


@pytest.mark.parametrize("clip", [Clip(max_norm=0.01, norm_type=math.inf), Clip(max_value=0.01)])
def test_the_ledger_tells_of_a_clip_by_the_largest_element(tmp_path, clip):
    plan = Plan(name="clipped", weights="fp32", compute="fp16", scaling=Scaling(init_scale=256.0), clip=clip)
    train(tmp_path, plan=plan, steps=3)
    train(tmp_path, resume=True, steps=5)
    history = fl.Ledger.read(tmp_path)
    assert Plan(**history.header.metadata["plan"]) == plan
    assert min(history.grad_norm) > 0.01, "as it was before the clip"


def test_the_ledger_of_another_clip_is_another(tmp_path):
    plan = Plan(name="clipped", weights="fp32", compute="fp16", scaling=Scaling(), clip=Clip(max_norm=0.01))
    train(tmp_path, plan=plan, steps=1)
    kept = Plan(**fl.Ledger.read(tmp_path).header.metadata["plan"])
    assert kept == plan
    assert kept.clip != Clip(max_norm=0.01, norm_type=math.inf)


def test_torchs_optimizers_are_resumed_bit_for_bit_too(tmp_path):
    for make in (
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    ):
        root = tmp_path / make(nn.Linear(1, 1)).__class__.__name__
        train(root / "whole", workload=make_workload(optimizer=make), steps=10)
        train(root / "parts", workload=make_workload(optimizer=make), steps=5)
        train(root / "parts", workload=make_workload(optimizer=make), steps=10, resume=True)
        assert_same_end(root / "whole", root / "parts")


@slow
@pytest.mark.parametrize("lost", ["torch", "python", "numpy", "place"])
def test_a_resume_that_forgot_something_would_be_found(tmp_path, lost):
    train(tmp_path / "whole", steps=10)
    train(tmp_path / "parts", steps=5)
    trainer = Trainer(make_workload(), folder=tmp_path / "parts", steps=10, resume=True)
    if lost == "place":
        trainer.steps_done -= 1
        trainer.steps -= 1
    else:
        {"torch": torch.manual_seed, "python": random.seed, "numpy": np.random.seed}[lost](99)
    trainer.run()
    with pytest.raises(AssertionError):
        assert_same_end(tmp_path / "whole", tmp_path / "parts")


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from test_trainer import make_workload
from floatline.training.trainer import Trainer
import torch

torch.set_num_threads(1)

def kill(outcome):
    if outcome.attempt == 15:
        os.kill(os.getpid(), signal.SIGKILL)

Trainer(make_workload(), folder=sys.argv[1], steps=30, save_every=12, on_step=kill).run()
"""


@slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint_bit_for_bit(tmp_path):
    train(tmp_path / "whole")
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "killed"), here]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert newest_checkpoint(tmp_path / "killed").name == "checkpoint-00000012"
    result = train(tmp_path / "killed", steps=None, resume=True)
    assert result.attempted == 30  # the steps that the run was begun with
    assert_same_end(tmp_path / "whole", tmp_path / "killed")
    whole, killed = fl.Ledger.read(tmp_path / "whole"), fl.Ledger.read(tmp_path / "killed")
    assert killed.loss[-18:] == whole.loss[12:]
    assert killed.num_resumes == 1
    assert killed.loss[:12] == whole.loss[:12]


def test_the_result_says_what_happened(tmp_path):
    seen = []
    result = train(tmp_path / "run", steps=9, on_step=seen.append, workload=make_workload(evaluate=lambda model: 7))
    assert (result.attempted, result.applied, sum(result.skipped.values())) == (9, 9, 0)
    assert (result.first_loss, result.last_loss) == (seen[0].loss, seen[-1].loss)
    assert result.metric == 7.0
    assert result.folder == tmp_path / "run"
    assert result.checkpoint == tmp_path / "run" / "checkpoint-00000009"
    assert (result.interrupted, result.stopped, result.finding) == (False, None, None)
    assert [outcome.attempt for outcome in seen] == list(range(1, 10))
    assert fl.Ledger.read(tmp_path / "run").ended


def test_the_metric_without_evaluate_is_the_loss_over_the_batches_in_fp32(tmp_path):
    for precision in ("fp32", "fp16-true"):
        workload = make_workload(precision)
        result = train(tmp_path / precision, workload=workload, steps=5)
        trained = Net()
        optimizer = Trainer(workload, folder=tmp_path / precision, resume=True, steps=5).guard.run.optimizer
        weights = workload.model.state_dict() if precision == "fp32" else optimizer.master_state_dict(workload.model)
        trained.load_state_dict(weights)
        trained.eval()
        with torch.no_grad():
            losses = [loss_fn(trained(*inputs), *targets).item() for inputs, targets in workload.batches]
        assert result.metric == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def test_the_model_keeps_its_modes(tmp_path):
    workload = make_workload()
    workload.model.body[1].eval()
    train(tmp_path, workload=workload, steps=2)
    assert workload.model.training
    assert not workload.model.body[1].training


def test_batches_are_cycled_in_order_with_epochs_and_micro_batches(tmp_path):
    seen = []

    class Echo(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, x):
            seen.append(int(x))
            return self.w * x

    batches = [((torch.tensor(float(i)),), ()) for i in range(5)]
    workload = Workload(Echo(), batches, lambda y: y, "fp32", lambda m: fl.optim.SGD(m.parameters(), lr=1e-6))
    plan = Plan(weights="fp32", compute="fp32", accumulate=2)
    Trainer(workload, folder=tmp_path, steps=6, plan=plan).run()
    assert seen[:12] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    history = fl.Ledger.read(tmp_path)
    assert history.epoch == [0, 0, 0, 1, 1, 2]
    assert history.batch == [0, 1, 2, 0, 1, 0]
    assert history.micro_batches == [2] * 6
    assert history.loss == pytest.approx([0.5, 2.5, 2.0, 1.5, 3.5, 0.5], rel=1e-4)


def test_without_steps_a_run_is_one_pass_or_200_steps(tmp_path):
    assert Trainer(make_workload(num_batches=3), folder=tmp_path / "a").steps == 200
    assert Trainer(make_workload(num_batches=407), folder=tmp_path / "b").steps == 407
    assert Trainer(make_workload(num_batches=407), folder=tmp_path / "c", plan="safe").steps == 204


def test_checkpoints_are_made_on_schedule_and_old_ones_deleted(tmp_path):
    made = []
    look = lambda outcome: made.append(newest_checkpoint(tmp_path).name[-2:])  # noqa: E731
    train(tmp_path, steps=8, save_every=3, keep=1, on_step=look)
    assert made == ["00", "00", "00", "03", "03", "03", "06", "06"]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-00000008"]


@CPU
@pytest.mark.parametrize(("precision", "dtype"), [("fp16-mixed", "float16"), ("fp16-true", "float16")])
def test_half_products_on_a_cpu_are_computed_in_float32(tmp_path, precision, dtype, monkeypatch):
    from floatline.numerics import cuda_autocast as module

    modes = []
    original = module.HalfOnCPU
    monkeypatch.setattr(module, "HalfOnCPU", lambda: modes.append(original()) or modes[-1])
    train(tmp_path, precision, steps=2)
    assert sum(modes[0].computed.values()) >= 4


@pytest.mark.parametrize("precision", ["fp16-true", "bf16-true"])
def test_a_true_plan_casts_the_weights_and_feeds_inputs_in_their_format(tmp_path, precision):
    workload = make_workload(precision)
    result = train(tmp_path, workload=workload, steps=3)
    dtype = {"fp16-true": torch.float16, "bf16-true": torch.bfloat16}[precision]
    assert workload.model.head.weight.dtype == workload.model.body[0].weight.dtype == dtype
    assert workload.batches[0][0][0].dtype == torch.float32  # the workload's own stay
    assert result.applied == 3


@pytest.mark.parametrize("precision", ["fp16-true", "bf16-true"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
def test_torchs_optimizers_are_refused_on_16_bit_weights(tmp_path, precision, kind):
    workload = make_workload(precision, optimizer=lambda model: kind(model.parameters(), lr=0.1))
    named = f"floatline.optim.{kind.__name__}" if kind is not torch.optim.RMSprop else "an optimizer of floatline.optim"
    with pytest.raises(GuardError, match=f"Use {named} in make_optimizer, or a plan with fp32 weights"):
        train(tmp_path / "run", workload=workload)
    assert not (tmp_path / "run").exists()


def test_place_keeps_the_shape_of_containers():
    from collections import namedtuple

    pair = namedtuple("pair", "a b")
    x, n = torch.ones(2), torch.ones(2, dtype=torch.int64)
    found = place(({"x": x, "n": n}, [x, "text"], pair(x, None)), torch.device("cpu"), torch.float16)
    assert found[0]["x"].dtype == found[1][0].dtype == found[2].a.dtype == torch.float16
    assert found[0]["n"].dtype == torch.int64
    assert (found[1][1], found[2].b, type(found[2])) == ("text", None, pair)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_finish_the_step_save_and_the_run_can_go_on(tmp_path, number):
    train(tmp_path / "whole", steps=10)

    def press(outcome):
        if outcome.attempt == 4:
            signal.raise_signal(number)

    before = signal.getsignal(number)
    result = train(tmp_path / "parts", steps=10, on_step=press)
    assert signal.getsignal(number) is before
    assert result.ended_by == number
    assert (result.interrupted, result.attempted, result.metric, result.stopped) == (True, 4, None, None)
    assert result.checkpoint.name == "checkpoint-00000004"
    assert fl.Ledger.read(tmp_path / "parts").ended
    train(tmp_path / "parts", steps=10, resume=True)
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


def test_a_second_ctrl_c_ends_at_once_and_lets_the_folder_go(tmp_path):
    def press(outcome):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, on_step=press)
    train(tmp_path, resume=True, steps=3)


def test_a_run_that_was_started_to_ignore_ctrl_c_ignores_it(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        result = train(tmp_path, steps=3, on_step=lambda outcome: signal.raise_signal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert (result.interrupted, result.attempted) == (False, 3)


def test_a_run_in_another_thread_leaves_signals_alone(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    results = []
    thread = threading.Thread(target=lambda: results.append(train(tmp_path, steps=2)))
    thread.start()
    thread.join()
    assert results[0].attempted == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_right_after_a_checkpoint_makes_no_second_one(tmp_path):
    press = lambda outcome: signal.raise_signal(signal.SIGINT) if outcome.attempt == 3 else None  # noqa: E731
    result = train(tmp_path, steps=9, save_every=3, on_step=press)
    assert result.interrupted
    assert result.checkpoint.name == "checkpoint-00000003"


def test_ctrl_c_in_the_last_step_is_no_interruption(tmp_path):
    result = train(tmp_path, steps=1, on_step=lambda outcome: signal.raise_signal(signal.SIGINT))
    assert not result.interrupted
    assert result.metric is not None


def test_a_stop_of_the_guard_is_a_result_with_its_message(tmp_path):
    calls = []

    def bad_from_5(logits, targets):
        calls.append(1)
        return loss_fn(logits, targets) * (math.nan if len(calls) > 5 else 1.0)

    policy = Policy(most_bad=3)
    workload = make_workload(loss=bad_from_5)
    result = train(tmp_path, workload=workload, policy=policy)
    assert result.stopped.startswith("Stopped at step 8")
    late = int(torch.cuda.is_available())  # what became of a step on a GPU is known when the next one has begun
    assert (result.attempted, result.applied, result.skipped["forward-nonfinite"]) == (8 + late, 5, 3 + late)
    assert result.metric is None
    load_checkpoint(result.checkpoint)
    history = fl.Ledger.read(tmp_path)
    assert history.ended
    assert history.events[-1].event == "stop"
    assert all(param.isfinite().all() for param in workload.model.parameters())


def test_an_error_in_the_targets_code_comes_through_and_lets_the_folder_go(tmp_path):
    def broken(logits, targets):
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        train(tmp_path, workload=make_workload(loss=broken))
    train(tmp_path, resume=True, steps=2)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda y, t: y.float().mean(1), "has shape"),
        (lambda y, t: y.argmax(), "int64 tensor, which has no gradient"),
        (lambda y, t: 1.0, "is a float"),
        (lambda y, t: y.detach().float().mean(), "does not depend on any trained parameter"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_one_line(tmp_path, loss, message):
    with pytest.raises(GuardError, match=message) as caught:
        train(tmp_path, workload=make_workload(loss=loss))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), "optimizer has a parameter of shape"),
        (lambda model: torch.optim.SGD(model.parameters(), lr=math.nan), "learning rate of group 0 is nan"),
        (lambda model: fl.optim.SGD(model.parameters(), lr=math.nan), "nan"),
        (lambda model: None, "make_optimizer gave a NoneType"),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_one_line_and_leaves_no_run(tmp_path, make, message):
    with pytest.raises((GuardError, fl.FloatlineError), match=message):
        train(tmp_path / "run", workload=make_workload(optimizer=make))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["steps", "save_every", "keep"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_counts_below_one_are_refused(tmp_path, name, value):
    with pytest.raises(GuardError, match=f"{name} is {value}"):
        Trainer(make_workload(), folder=tmp_path, **{"steps": 3, name: value})


def test_a_folder_that_holds_a_run_is_not_begun_again(tmp_path):
    train(tmp_path, steps=2)
    with pytest.raises(GuardError, match="already holds a run. Resume it"):
        train(tmp_path, steps=2)


def test_resume_without_a_run_is_refused(tmp_path):
    with pytest.raises(GuardError, match="There is no run to resume in"):
        train(tmp_path / "none", resume=True)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_ended_before_its_first_checkpoint_is_told_to_begin_again(tmp_path, resume):
    fl.Ledger.create(tmp_path).close()
    with pytest.raises(GuardError, match="has no checkpoint to go on from. Delete the folder, or choose another"):
        train(tmp_path, resume=resume)


def test_a_frozen_half_base_is_evaluated_in_fp32(tmp_path):
    def make(model):
        model.body.requires_grad_(False)
        return fl.optim.AdamW(model.head.parameters(), lr=1e-2)

    workload = make_workload(optimizer=make)
    for param in workload.model.body.parameters():
        param.requires_grad_(False)
    workload.model.body[0].half()
    result = train(tmp_path, workload=workload, steps=3)
    assert workload.model.body[0].weight.dtype == torch.float16
    assert math.isfinite(result.metric)


def test_a_folder_in_use_is_refused(tmp_path):
    trainer = Trainer(make_workload(), folder=tmp_path, steps=2)
    with pytest.raises(LedgerError, match=f"in use by process {os.getpid()}"):
        train(tmp_path, resume=True)
    trainer.run()


@pytest.mark.parametrize(
    ("options", "name"),
    [({"plan": "bf16-mixed"}, "plan"), ({"seed": 1}, "seed")],
)
def test_a_run_is_not_resumed_as_another(tmp_path, options, name):
    train(tmp_path, steps=2)
    with pytest.raises(GuardError, match=f"The run in .* has {name} .*, which is not the"):
        train(tmp_path, resume=True, **options)
    train(tmp_path, resume=True, plan="fp16-mixed", seed=0)


def test_a_run_is_not_resumed_with_other_batches(tmp_path):
    train(tmp_path, steps=2)
    with pytest.raises(GuardError, match="has batches 7, which is not the 8"):
        train(tmp_path, resume=True, workload=make_workload(num_batches=8))


def test_a_damaged_checkpoint_is_named_and_the_run_goes_on_once_it_is_moved(tmp_path):
    train(tmp_path, steps=6, save_every=3)
    newest = newest_checkpoint(tmp_path)
    (newest / "tensors.safetensors").write_bytes(b"")
    with pytest.raises(GuardError, match=r"is damaged.*checkpoint-00000003"):
        train(tmp_path, resume=True)
    newest.rename(tmp_path / "away")
    assert train(tmp_path, steps=6, resume=True).attempted == 6


def test_a_plan_that_is_not_known_is_refused(tmp_path):
    with pytest.raises(PlanError, match="Plan 'fp17' is not known"):
        train(tmp_path, plan="fp17")


def test_the_policy_is_the_plans_unless_one_is_given(tmp_path):
    assert Trainer(make_workload(), folder=tmp_path / "a", plan="balanced").guard.run.policy == POLICIES["balanced"]
    given = Trainer(make_workload(), folder=tmp_path / "b", plan="balanced", policy="safe")
    assert given.guard.run.policy == POLICIES["safe"]


def test_a_resumed_run_keeps_its_policy_unless_another_is_given(tmp_path):
    own = Policy(outlier_score=math.inf, most_bad=7)
    train(tmp_path, steps=2, policy=own)
    trainer = Trainer(make_workload(), folder=tmp_path, resume=True, steps=3)
    assert trainer.guard.run.policy == own
    trainer.run()
    assert Trainer(make_workload(), folder=tmp_path, resume=True, policy="safe").guard.run.policy == POLICIES["safe"]


def test_a_policy_file_that_cannot_be_read_is_one_line(tmp_path):
    train(tmp_path, steps=2)
    (tmp_path / "policy.json").write_text('{"most_bad": "seven"}')
    with pytest.raises(GuardError, match="Resume the run with a policy by name"):
        train(tmp_path, resume=True)
    train(tmp_path, resume=True, policy="balanced")


def test_the_plans_clipping_is_used(tmp_path):
    plan = Plan(weights="fp32", compute="fp32", clip=Clip(max_norm=0.25))
    assert Trainer(make_workload(), folder=tmp_path, plan=plan).guard.clip_norm == 0.25


def test_a_run_with_retries_and_snapshots_keeps_its_place_in_the_data(tmp_path):
    plan = Plan(name="high", weights="fp32", compute="fp16", scaling=Scaling(init_scale=2.0**24))
    whole = train(tmp_path / "whole", plan=plan, policy="ultra-conservative", steps=10)
    assert whole.attempted > 10  # overflowed batches were run again
    train(tmp_path / "parts", plan=plan, policy="ultra-conservative", steps=5)
    train(tmp_path / "parts", steps=10, resume=True)
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


def test_guard_stop_is_not_a_mistake_of_the_caller():
    assert not issubclass(GuardStop, GuardError)
