"""Whose autocast a target follows on a CPU: a GPU's, or by `--as cpu` its own; in runs, replays, trials and bundles."""

import json
import subprocess
import sys

import pytest
import torch

from floatline.diagnosis.target_diagnosis import diagnose, run_changed_target
from floatline.numerics.cuda_autocast import cuda_autocast_lists, follows_cuda_lists
from floatline.probe.bundles.bundle import open_target, read_bundle, restore_step, write_bundle
from floatline.probe.runs.target_points import capture_points
from floatline.workload import load_target

# CUDA's autocast sums in FP32, a CPU's in FP16.
SUMS = """
import torch


def build(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 64)
    x = torch.randn(64, 8)

    def loss_fn(y):
        return 1e-6 * (300 * y.abs() + 1).sum()

    return model, [((x,), ())], loss_fn, "fp16-mixed", lambda m: torch.optim.SGD(m.parameters(), 1e-2)


def train(steps=12):
    torch.manual_seed(0)
    model, batches, loss_fn, _, make_optimizer = build()
    optimizer = make_optimizer(model)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_fn(model(*batches[0][0]))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")


def run_floatline(*words):
    return subprocess.run([sys.executable, "-m", "floatline", *words], capture_output=True, text=True, check=False)


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "sums.py"
    path.write_text(SUMS)
    return path


@pytest.mark.parametrize("name", ["build", "train"])
def test_a_sum_that_cuda_takes_in_fp32_is_healthy_on_a_cpu_and_overflows_by_its_own_lists(target, name):
    text = f"{target}:{name}"
    assert diagnose(text, steps=12).verdict == "healthy"
    found = diagnose(text, steps=12, as_device="cpu").primary
    assert (found.cause.id, found.line) == ("reduction-overflow", 1 + SUMS[: SUMS.index("return 1e-6")].count("\n"))
    assert not follows_cuda_lists()


def test_a_trial_of_a_change_follows_the_same_lists(target):
    def verdicts(sources):
        said = [
            run_changed_target(str(target), sources, steps=12, seed=0, as_device=device) for device in ("cuda", "cpu")
        ]
        return [one.verdict for one in said]

    assert verdicts({str(target): SUMS}) == ["healthy", "precision"]
    assert verdicts({str(target): SUMS.replace("y.abs()", "y.float().abs()")}) == ["healthy", "healthy"]


def test_replays_of_captured_steps_follow_the_lists_of_their_run(target):
    steps = capture_points(load_target(str(target)), plan="fp16-mixed", steps=3)
    assert all(step.replay().finite for step in steps)
    steps[0].cuda_lists = False
    assert not steps[0].replay().finite


def test_a_bundle_is_replayed_by_the_lists_of_its_run(target, tmp_path):
    loaded = load_target(str(target))
    bundle = read_bundle(write_bundle(loaded, tmp_path / "bundle", step=1))
    assert bundle.fields["cuda_lists"] is True
    assert restore_step(bundle, open_target(bundle)).replay().finite
    bundle.fields["cuda_lists"] = False
    assert not restore_step(bundle, open_target(bundle)).replay().finite
    del bundle.fields["cuda_lists"]  # as bundles of version 0.1.0 are
    assert not restore_step(bundle, open_target(bundle)).replay().finite


def test_the_command_line_takes_the_cpu_for_targets_and_cuda_for_scripts(target):
    healthy = run_floatline("diagnose", str(target), "--steps", "12", "--format", "json")
    assert (healthy.returncode, json.loads(healthy.stdout)["verdict"]) == (0, "healthy")
    own = run_floatline("diagnose", str(target), "--steps", "12", "--as", "cpu", "--no-try", "--format", "json")
    assert (own.returncode, json.loads(own.stdout)["findings"][0]["cause"]) == (1, "reduction-overflow")
    refused = run_floatline("diagnose", str(target), "--as", "cuda")
    assert refused.returncode == 2
    assert "A target on a CPU computes as a GPU already" in " ".join(refused.stderr.split())


def test_lists_that_are_in_force_around_a_diagnosis_stay_so(target):
    with cuda_autocast_lists():
        assert diagnose(str(target), steps=12, as_device="cpu").verdict == "precision"
        assert follows_cuda_lists()
