"""Two real processes on gloo: DDP and FSDP2 train as one process does, and decide together."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.marks import needs_fsdp2
from tests.shared import once
from tests.slow import slow

pytestmark = [needs_fsdp2, slow]


def train_on_two(_):
    script = Path(__file__).with_name("two_processes.py")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(next(line for line in run.stdout.splitlines() if line.startswith("[{")))  # gloo may print, too


@pytest.fixture(scope="module")
def found():
    return once("two processes", train_on_two)


def both(found, key):
    return [results[key] for results in found]


@pytest.mark.parametrize("kind", ["exact", "stochastic", "bf16 states"])
def test_shards_of_fsdp2_end_with_the_bits_of_one_process(found, kind):
    assert both(found, f"{kind}: shards equal one process") == [True, True]


def test_the_norm_is_taken_over_the_mesh(found):
    for results in found:
        assert results["norm on two"] == pytest.approx(results["norm on one process"], rel=1e-6)
        assert results["norms of tensors differ by"] < 1e-5


def test_the_norm_of_a_shard_alone_would_be_wrong(found):
    for results in found:
        assert results["norm without the mesh"] < 0.95 * results["norm on one process"]


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_training_with_clipping_ends_where_one_process_does(found, kind):
    # The mean over two half batches is summed in another order: a rounding of the gradients, of their dtype.
    for results in found:
        assert results[f"float32: {kind} differs by"] < 1e-6
        assert results[f"bfloat16: {kind} differs by"] < 1e-3
        assert results["float32: moved by"] > 0.05
        assert results["float32: norms differ by"] < 1e-5


def test_a_nan_on_one_rank_skips_on_every_rank(found):
    assert both(found, "NaN on one rank: applied") == [False, False]
    assert both(found, "NaN on one rank: unchanged") == [True, True]
    assert both(found, "NaN on one rank: counted") == [1, 1]


@pytest.mark.parametrize("states", ["fp32", "int8"])
def test_a_full_checkpoint_of_shards_resumes_bit_for_bit(found, states):
    assert both(found, f"{states}: resumed differs by") == [0.0, 0.0]


def test_float32_weights_load_into_shards(found):
    assert both(found, "master file on shards") == [True, True]


@pytest.mark.parametrize("way", ["DTensor", "local part"])
def test_shards_that_were_written_continue_as_one_process_does(found, way):
    assert both(found, f"written through the {way}: shards equal one process") == [True, True]


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_a_rollback_in_place_keeps_the_remainders(found, kind):
    assert both(found, f"{kind}: rolled back bit for bit") == [True, True]
    assert min(both(found, f"{kind}: has remainders")) > 0


MUON = [
    ("exact", "bf16", "plain"),
    ("exact", "fp16", "plain"),
    ("exact", "fp32", "plain"),
    ("exact", "bf16", "nesterov"),
]


@pytest.mark.parametrize("case", [*MUON, ("stochastic", "bf16", "states")], ids=str)
def test_rows_that_muon_exchanges_end_with_the_bits_of_one_process(found, case):
    assert both(found, f"Muon, {', '.join(case)}, rows") == [True, True]
    assert min(both(found, "Muon: moved by")) > 0.01


@pytest.mark.parametrize("case", MUON, ids=str)
def test_columns_that_muon_gathers_end_with_the_bits_of_one_process(found, case):
    assert both(found, f"Muon, {', '.join(case)}, columns") == [True, True]


def test_a_shard_that_is_turned_alone_would_point_elsewhere(found):
    assert min(both(found, "Muon: turned alone differs by")) > 0.1


def test_a_nan_on_one_rank_keeps_every_bit_of_muon(found):
    assert both(found, "Muon, NaN on one rank: unchanged") == [True, True]


def test_a_full_checkpoint_of_muon_on_shards_resumes_bit_for_bit(found):
    assert both(found, "Muon: resumed differs by") == [0.0, 0.0]
