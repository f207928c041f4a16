"""A validation on a real Ray cluster of one node: the same results, lost workers made good, crashes told."""

import importlib.util
import os

import pytest
from tests.slow import exhaustive, slow

from floatline.errors import ComparisonError

ray = pytest.importorskip("ray", reason="ray is not installed (the extra 'ray')")

TARGET = """
import os, signal
from pathlib import Path
import torch
from torch import nn


def build(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, w = torch.randn(64, 8, generator=generator), torch.randn(8, 4, generator=generator)
    batches = [((x[i::4],), ((x[i::4] @ w).argmax(1),)) for i in range(4)]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    return model, batches, nn.functional.cross_entropy, "fp16-mixed", lambda m: torch.optim.AdamW(m.parameters(), 1e-2)


class Fragile(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return x + self.down(self.up(x).add(3000.0) - 3000.0)  # FP16 counts in steps of 2 there


def build_fragile(seed=0):
    _, batches, loss_fn, _, make_optimizer = build(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), Fragile(), nn.GELU(), nn.Linear(32, 4))
    return model, batches, loss_fn, "fp16-mixed", make_optimizer


def build_where_a_worker_is_lost(seed=0):
    marker = Path(__file__).with_name("lost")
    if seed == 1 and not marker.exists():
        marker.write_text(str(os.getppid()))
        os.kill(os.getppid(), signal.SIGKILL)  # the Ray worker that has started this process
        signal.pause()
    return build(seed)


def build_that_crashes(seed=0):
    if seed == 1:
        Path(__file__).with_name("crashes").open("a").write("x")
        os._exit(3)
    return build(seed)
"""
OPTIONS = {"steps": 20, "margins": (0.05, 0.1), "max_seeds": 3, "measure": False, "broken": False}


@pytest.fixture(scope="module")
def cluster():
    os.environ["RAY_AUTH_MODE"] = "disabled"  # else a token is written into the home folder
    os.environ["RAY_raylet_start_wait_time_s"] = "180"  # noqa: SIM112 Ray spells it so; on a busy machine
    ray.init(num_cpus=1, log_to_driver=False, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture
def target(tmp_path):
    (tmp_path / "net.py").write_text(TARGET)
    return str(tmp_path / "net.py")


def study(target, folder, *, on_ray=True, **more):
    from floatline.integrations.ray import RayRunner
    from floatline.validation.target_study import validate

    runner = {"runner": RayRunner(jobs=1)} if on_ray else {"jobs": 1}
    return validate(target, folder=folder, **runner, **OPTIONS, **more)


def metrics(validation):
    return {(run.arm, run.seed): run.metric for run in validation.runs}


@exhaustive
def test_a_cluster_gives_what_this_machine_gives_and_a_lost_worker_changes_nothing(cluster, target, tmp_path):
    here = study(target, tmp_path / "here", on_ray=False)
    there = study(f"{target}:build_where_a_worker_is_lost", tmp_path / "there")
    assert (tmp_path / "lost").exists()  # or no worker was lost, and nothing was tested
    assert there.verdict == here.verdict == "PASS", there.best.reason
    assert metrics(there) == metrics(here)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "there" / "runs").rglob("*.json")}
    again = study(f"{target}:build_where_a_worker_is_lost", tmp_path / "there", resume=True)
    assert metrics(again) == metrics(there)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept  # nothing was done twice


@slow
def test_a_training_that_crashes_is_a_result_and_is_not_run_again(cluster, target, tmp_path):
    found = study(f"{target}:build_that_crashes", tmp_path / "study")
    crashed = [run for run in found.runs if run.seed == 1]
    assert crashed and all("exit code 3" in run.error for run in crashed)
    assert len((tmp_path / "crashes").read_text()) == len(crashed)


@slow
def test_a_search_on_the_cluster_finds_the_same_island_and_outlives_its_workers(cluster, target):
    from floatline.diagnosis.islands.search import find_island
    from floatline.integrations.ray_search import RaySearch
    from floatline.probe.runs.target_points import capture_points
    from floatline.workload import load_target

    points = capture_points(load_target(f"{target}:build_fragile"), steps=8)
    here = find_island(points)
    spread = RaySearch(f"{target}:build_fragile", steps=8, workers=1)
    there = find_island(points, spread=spread)
    assert here.modules and there.modules == here.modules
    assert there.num_replays < here.num_replays  # the others were made on the cluster
    ray.kill(spread._workers[0])
    assert find_island(points, spread=spread).modules == here.modules
    spread.close()


def test_without_ray_one_line_says_what_to_install(monkeypatch):
    from floatline.integrations.ray import RayRunner

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ComparisonError, match=r"The engine 'ray' needs Ray. Install it with: pip install"):
        RayRunner()
