"""Several processes: an inf or NaN on one rank is skipped by all, and their scales stay equal."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from tests.marks import needs_gloo
from tests.shared import once
from tests.slow import slow

SCRIPT = Path(__file__).with_name("rank_checks.py")
ROOT = SCRIPT.parents[2]
WORLDS = [2, 4]
RUNS = [
    "DDP, SGD",
    "DDP, SGD, unscale_",
    "DDP, fused AdamW",
    "DDP, fp16, floatline",
    "DDP, fp16, unscale_",
    "FSDP2, SGD",
    "FSDP2, bf16, SGD",
    "FSDP2, fp16, floatline",
    "FSDP2, fp16, unscale_",
]

pytestmark = [
    slow,
    needs_gloo,
]


def run_all(folder):
    """What each process found, for each number of processes, in the order of ranks."""
    words = [sys.executable, str(SCRIPT), str(folder), *map(str, WORLDS)]
    run = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert run.returncode == 0, run.stderr
    return {
        world: [json.loads((folder / f"{world}-{rank}.json").read_text("utf-8")) for rank in range(world)]
        for world in WORLDS
    }


def of(world, name):
    found = [rank.get(name) for rank in once("scaler on ranks", run_all)[str(world)]]
    if found[0] is None:
        pytest.skip("this torch has no Tensor.grad_dtype, or FSDP2 does not run on the CPU in it")
    return found


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", RUNS)
def test_a_nan_on_one_rank_is_skipped_by_all(world, name):
    found = of(world, name)
    for rank in found:
        assert rank["applied"] == [True, True, False, True, True, True]
        assert rank["scales"] == [1024.0, 1024.0, 512.0, 512.0, 512.0, 512.0]
        assert rank["weights"] == found[0]["weights"]
    assert all(map(math.isfinite, found[0]["weights"]))


@pytest.mark.parametrize("world", WORLDS)
def test_torchs_scaler_leaves_scales_and_weights_different(world):
    first, *_, last = of(world, "torch: DDP, SGD")
    assert first["scales"][2] == 1024.0
    assert last["scales"][2] == 512.0
    assert first["weights"] != last["weights"]


@pytest.mark.parametrize("world", WORLDS)
def test_hysteresis_counts_alike_on_all_ranks(world):
    for rank in of(world, "DDP, hysteresis"):
        assert rank["applied"] == [True, True, False, True, True, True]
        assert rank["scales"] == [1024.0] * 6


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_without_gradients_goes_along(world):
    for rank in of(world, "gradients on one rank"):
        assert rank == {"scales": [512.0], "applied": [False], "weights": [1.0, 1.0, 1.0]}


@pytest.mark.parametrize("world", WORLDS)
def test_no_gradients_anywhere_is_an_error_on_every_rank(world):
    assert of(world, "no gradients") == ["No inf checks were recorded for this optimizer."] * world


@pytest.mark.parametrize("world", WORLDS)
def test_a_process_in_a_group_of_its_own_decides_alone(world):
    assert of(world, "alone") == [False] + [True] * (world - 1)
