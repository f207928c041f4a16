"""Arms that are known to be good, bad or empty get their verdict, on a language model as small as can be judged."""

import copy

import pytest
import torch
from tests.slow import slow
from tests.validation import tiny_lm
from torch import nn

import floatline as fl
from floatline.numerics import cuda_autocast_lists
from floatline.validation.verdict.pairs import NUM_FIRST_LOSSES, ArmRun
from floatline.validation.verdict.terms import LANGUAGE_MODEL_MARGINS

STEPS, CLIP = 120, 1.0


def arm(train):
    """A loop of one's own as a candidate."""

    def run(seed):
        workload = tiny_lm.build(seed)
        with torch.no_grad():
            start = workload.evaluate(workload.model)
        losses = []
        batches = [workload.batches[i % len(workload.batches)] for i in range(STEPS)]
        with fl.HalfOnCPU(), cuda_autocast_lists():
            train(workload, batches, losses)
        with torch.no_grad():
            metric = workload.evaluate(copy.deepcopy(workload.model).float())
        return ArmRun("loop", seed, metric, start=start, first_losses=tuple(losses[:NUM_FIRST_LOSSES]), steps=STEPS)

    return run


def clip_before_unscale(workload, batches, losses):
    model, scaler = workload.model, torch.amp.GradScaler("cpu")
    optimizer = workload.make_optimizer(model)
    for inputs, targets in batches:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = workload.compute_loss(inputs, targets)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())


def pure(dtype):
    def train(workload, batches, losses):
        model = workload.model.to(dtype)
        optimizer = workload.make_optimizer(model)
        for inputs, targets in batches:
            loss = workload.compute_loss(inputs, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    return train


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """One study of all of them, with the margins of a language model."""
    off = fl.Plan(name="autocast-off", weights="fp32", compute="fp32")
    loops = [("clip-before-unscale", arm(clip_before_unscale)), ("pure-bf16", arm(pure(torch.bfloat16)))]
    study = fl.validate(
        tiny_lm.build,
        ["fp32", "fp16-mixed", off, *loops, ("pure-fp16-adam", arm(pure(torch.float16)))],
        steps=STEPS,
        margins=LANGUAGE_MODEL_MARGINS,
        max_seeds=8,
        folder=tmp_path_factory.mktemp("study") / "all",
        measure=False,
    )
    return {comparison.candidate: comparison for comparison in study.comparisons}


@slow
@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("fp32-nudged", "PASS"),
        ("fp16-mixed", "PASS"),
        ("clip-before-unscale", "FAIL"),
        ("pure-bf16", "FAIL"),
        ("pure-fp16-adam", "FAIL"),
        ("autocast-off", "REFUSED"),
    ],
)
def test_a_known_arm_gets_its_verdict(found, name, verdict):
    assert found[name].verdict == verdict, found[name]


@slow
def test_what_decided_is_what_is_wrong_with_them(found):
    assert found["pure-fp16-adam"].reason.startswith("it diverged in 1 of 1 seeds (seed 0)")
    assert found["autocast-off"].failed_gates[0].name == "arms-differ"
    assert found["pure-bf16"].interval[0] > LANGUAGE_MODEL_MARGINS[1]


@slow
def test_the_broken_arm_does_not_pass_and_the_noise_is_known(found):
    gates = {gate.name: gate for gate in found["fp16-mixed"].gates}
    assert gates["broken-fails"].passed and "FAIL" in gates["broken-fails"].seen
    assert gates["noise-floor"].passed is not False
    assert gates["seeds-differ"].passed


def refused(build, tmp_path, **options):
    study = fl.validate(build, folder=tmp_path / "study", max_seeds=3, **{"steps": 6} | options)
    assert study.verdict == "REFUSED"
    return study.best.failed_gates[0], len(study.runs)


@slow
@pytest.mark.parametrize("option", ["steps", "epochs", "batches"])
def test_zero_training_is_refused_after_one_seed(option, tmp_path):
    gate, num_runs = refused(tiny_lm.build, tmp_path, **{"steps": None, option: 0})
    assert gate.name == "steps-taken" and "Train for more steps" in gate.advice
    assert num_runs <= 4


@slow
def test_a_learning_rate_of_zero_is_refused(tmp_path):
    assert refused(tiny_lm.still, tmp_path)[0].name == "weights-changed"


@slow
def test_seeds_that_change_nothing_are_refused(tmp_path):
    gate, _ = refused(tiny_lm.same, tmp_path)
    assert gate.name == "seeds-differ" and "build(seed)" in gate.advice


@slow
def test_too_little_training_is_refused(tmp_path):
    assert refused(tiny_lm.build, tmp_path)[0].name == "reference-learned"


@slow
@pytest.mark.parametrize("curve", ["metric", "loss"])
def test_what_is_compared_on_the_way_can_be_settled(tmp_path, curve):
    study = fl.validate(tiny_lm.build, steps=24, max_seeds=3, folder=tmp_path, broken=False, measure=False, curve=curve)
    assert {run.curve_of for run in study.runs} == {curve}


@slow
def test_a_study_is_not_resumed_with_another_curve(tmp_path):
    asked = {"steps": 6, "max_seeds": 3, "folder": tmp_path, "broken": False, "measure": False}
    fl.validate(tiny_lm.build, curve="loss", **asked)
    with pytest.raises(fl.FloatlineError, match="curve"):
        fl.validate(tiny_lm.build, curve="metric", resume=True, **asked)


def test_a_curve_of_something_else_is_refused(tmp_path):
    with pytest.raises(fl.FloatlineError, match="The curve is 'accuracy'. Take 'metric' or 'loss'"):
        fl.validate(tiny_lm.build, curve="accuracy", folder=tmp_path)
