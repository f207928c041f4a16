"""Two processes under Lightning: one rank's bad batch is skipped by both, and schedules and replicas stay together."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.marks import needs_fsdp2, needs_gloo
from tests.shared import folder_of, once
from tests.slow import slow

import floatline as fl

pytest.importorskip("lightning", reason="lightning is not installed")

SCRIPT = Path(__file__).with_name("lightning_on_ranks.py")
pytestmark = [
    slow,
    needs_gloo,
    needs_fsdp2,
]
OURS = ["DDP", "DDP, 16-bit weights", "FSDP2"]


def fit(folder):
    """What each process found, in the order of ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=600, env=env)
    if run.returncode != 0:
        return run.stderr[-6000:]  # kept: every test fails with it, and none tries again
    return [json.loads((folder / f"{rank}.json").read_text("utf-8")) for rank in range(2)]


def found_by_all():
    """What each process found, and the first process's ledger of the DDP fit."""
    ranks = once("lightning on ranks", fit)
    return ranks, None if isinstance(ranks, str) else fl.Ledger.read(folder_of("lightning on ranks") / "ddp-ledger")


def of(name):
    ranks, _ = found_by_all()
    assert not isinstance(ranks, str), ranks
    return [rank[name] for rank in ranks]


@pytest.mark.parametrize("name", [*OURS, "DDP, two batches a step", "FSDP2, resumed", "Fabric, DDP"])
def test_both_processes_decide_and_end_alike(name):
    one, other = of(name)
    assert one == other


@pytest.mark.parametrize("name", OURS)
def test_the_bad_batch_of_one_process_is_skipped_by_both_and_the_schedule_waits(name):
    found = of(name)[1]
    skipped = sum(found["skipped"].values())
    assert found["skipped"]["forward-nonfinite"] == 1
    assert found["global_step"] == found["advances"] == 12 - skipped
    assert found["metrics"]["floatline/skipped"] == skipped
    assert found["scale"] == 2.0 ** (16 - found["skipped"]["overflow"])


def test_a_fabric_loop_does_what_the_trainer_does():
    found, fit = of("Fabric, DDP")[0], of("DDP")[0]
    assert (found["skipped"], found["scale"], found["advances"]) == (fit["skipped"], fit["scale"], fit["advances"])
    assert found["weights"] == pytest.approx(fit["weights"], abs=1e-5)


def test_plain_lightning_counts_the_batch_advances_and_lowers_the_scale_once_more():
    found = of("plain Lightning")[0]
    assert found["global_step"] == found["advances"] == 12
    assert found["scale"] == of("DDP")[0]["scale"] / 2


def test_the_first_process_writes_the_ledger():
    ledger = found_by_all()[1]
    assert len(ledger.applied) == 12
    assert ledger.reason[5] == "forward-nonfinite"


def test_sharded_weights_are_those_of_replicas_but_for_the_order_of_sums():
    replicas, shards = of("DDP")[0]["weights"], of("FSDP2")[0]["weights"]
    assert shards == pytest.approx(replicas, abs=1e-5)


def test_a_sharded_run_resumes_to_the_same_bits():
    whole, resumed = of("FSDP2, whole")[0], of("FSDP2, resumed")[0]
    assert resumed["weights"] == whole["weights"]
    assert resumed["global_step"] == whole["global_step"]
    assert resumed["advances"] == whole["advances"]
