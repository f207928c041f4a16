"""What a plan changes beside dtypes is what `floatline train` does: functions, rewrites and updates, also resumed."""

import json
import math

import pytest
import torch
from tests.preloaded import COMMAND, run_preloaded
from tests.slow import slow

from floatline.errors import OptimizerError, PlanError
from floatline.plans import KeptFunction, Plan, Rewrite, Scaling
from floatline.training.trainer import Trainer
from floatline.workload import Workload, load_target

TARGET = """
import torch
from torch import nn


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(2, 16), nn.Linear(16, 1)
        with torch.no_grad():
            self.head.bias.fill_(12.0)

    def forward(self, x):
        return self.head(torch.relu(self.first(x))).squeeze(1)


def penalty(logits):
    return -torch.log(1 - torch.sigmoid(logits)).mean()


def loss_fn(logits):
    return penalty(logits)


def build(seed=0):
    batches = [((torch.randn(24, 2),), ()) for _ in range(3)]
    return Critic(), batches, loss_fn, "fp16-mixed", lambda m: torch.optim.Adam(m.parameters(), 5e-2)
"""
MIXED = {"weights": "fp32", "compute": "fp16", "scaling": Scaling(init_scale=256.0)}
REWRITTEN = Plan(name="mine", **MIXED, rewrites=(Rewrite(kind="log-sigmoid", function="critic_target.py:penalty"),))


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "critic_target.py"
    path.write_text(TARGET, encoding="utf-8")
    return path


def losses_of(trainer):
    losses = []
    trainer.on_step = lambda outcome: losses.append(outcome.loss)
    result = trainer.run()
    return losses, result


def train(target, plan, **options):
    return losses_of(Trainer(load_target(str(target)).build(0), plan=plan, folder=None, steps=12, **options))


def test_the_target_breaks_as_it_is(target):
    losses, _ = train(target, Plan(name="mine", **MIXED))
    assert math.inf in losses


@pytest.mark.parametrize("function", ["critic_target.py:penalty", "loss"])
def test_a_rewrite_trains_as_fp32_does(target, function):
    plan = Plan(name="mine", **MIXED, rewrites=(Rewrite(kind="log-sigmoid", function=function),))
    losses, result = train(target, plan)
    expected, _ = train(target, Plan(weights="fp32", compute="fp32",
                                     rewrites=(Rewrite(kind="log-sigmoid", function="loss"),)))  # fmt: skip
    assert result.applied == 12
    assert losses == pytest.approx(expected, rel=0.02)
    assert math.isfinite(result.metric)


def test_the_code_is_its_own_again_after_the_run(target):
    workload = load_target(str(target)).build(0)
    code = workload.loss_fn.__globals__["penalty"].__code__
    trainer = Trainer(workload, plan=REWRITTEN, folder=None, steps=2)
    assert workload.loss_fn.__globals__["penalty"].__code__ is not code
    trainer.run()
    assert workload.loss_fn.__globals__["penalty"].__code__ is code


def test_measuring_is_done_with_the_code_as_written(target):
    trainer = Trainer(load_target(str(target)).build(0), plan=REWRITTEN, folder=None, steps=2)
    assert trainer.measure() == pytest.approx(12.0, abs=3)
    trainer.workload.model.head.bias.data.fill_(200.0)
    assert trainer.measure() == math.inf  # in FP32 too: log(0)
    trainer.guard.close()


@pytest.mark.parametrize("update", ["exact", "kahan"])
def test_a_true_plan_swaps_the_optimizer(update):
    def build():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        batches = [((torch.randn(8, 4),), (torch.randn(8, 1),)) for _ in range(2)]
        return Workload(
            model, batches, lambda y, t: (y.float() - t).square().mean(), "bf16-true",
            lambda m: torch.optim.SGD(m.parameters(), lr=1e-4, momentum=0.9),
        )  # fmt: skip

    plan = Plan(name="swapped", weights="bf16", compute="bf16", update=update)
    trainer = Trainer(build(), plan=plan, folder=None, steps=4)
    optimizer = trainer.guard.run.optimizer
    assert (type(optimizer).__module__, optimizer.update) == ("floatline.optim.algorithms", update)
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert trainer.run().applied == 4


def test_an_optimizer_without_counterpart_is_refused():
    model = torch.nn.Linear(2, 1)
    workload = Workload(
        model, [((torch.ones(1, 2),), ())], lambda y: y.mean(), "fp32", lambda m: torch.optim.RMSprop(m.parameters())
    )
    with pytest.raises(OptimizerError, match="RMSprop has no counterpart with update='exact'"):
        Trainer(workload, plan=Plan(weights="bf16", compute="bf16", update="exact"), folder=None)


def test_a_resumed_run_goes_on_with_all_of_it(target, tmp_path):
    plan = REWRITTEN.model_copy(update={"fp32_functions": (KeptFunction(function="loss"),)})
    build = lambda: load_target(str(target)).build(0)  # noqa: E731
    whole, _ = losses_of(Trainer(build(), plan=plan, folder=tmp_path / "whole", steps=8))
    first, _ = losses_of(Trainer(build(), plan=plan, folder=tmp_path / "parts", steps=4))
    again = Trainer(build(), folder=tmp_path / "parts", steps=8, resume=True)
    assert again.plan == plan
    second, _ = losses_of(again)
    assert first + second == whole


def test_a_function_that_is_not_there_is_refused_before_anything_is_written(target, tmp_path):
    plan = Plan(name="mine", **MIXED, fp32_functions=(KeptFunction(function="critic_target.py:penalti"),))
    with pytest.raises(PlanError, match=r"no such function\. Did you mean 'penalty'"):
        Trainer(load_target(str(target)).build(0), plan=plan, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def command(*words, cwd):
    return run_preloaded(["-c", COMMAND, *words], cwd=cwd)


@slow
def test_the_command_takes_it_from_yaml(target, tmp_path):
    REWRITTEN.save(tmp_path / "plan.yaml")
    run = command("train", "critic_target.py", "--plan", "plan.yaml", "--steps", "5", "--format", "json", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["applied"] == 5


def test_a_wrong_key_in_yaml_names_the_nearest(target, tmp_path):
    (tmp_path / "plan.yaml").write_text("weights: fp32\ncompute: fp16\nfp32_function: []\n", encoding="utf-8")
    run = command("train", "critic_target.py", "--plan", "plan.yaml", cwd=tmp_path)
    assert run.returncode == 2
    assert "key 'fp32_function' is not known. Did you mean 'fp32_functions'" in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
