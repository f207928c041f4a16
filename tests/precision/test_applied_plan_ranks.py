"""An applied plan on two processes: modules, functions and rewrites are exact under DDP and FSDP2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.marks import needs_fsdp2, needs_gloo
from tests.shared import once
from tests.slow import slow

SCRIPT = Path(__file__).with_name("applied_on_ranks.py")

pytestmark = needs_gloo


def apply_on_ranks(folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    run = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text("utf-8")) for rank in range(2)]


def found_by_all():
    return once("applied plan on ranks", apply_on_ranks)


@slow
@pytest.mark.parametrize("kind", ["DDP", pytest.param("FSDP2", marks=needs_fsdp2)])
def test_everything_that_is_kept_has_the_bits_of_fp32(kind):
    for rank in found_by_all():
        found = rank[kind]
        assert found["head"]
        assert found["needed"]  # FP16 would have been inf there
        assert found["function"]
        assert found["function_dtype"] == "torch.float32"
        assert found["applied"]


@slow
@needs_fsdp2
def test_both_ways_find_the_same_gradient():
    for rank in found_by_all():
        assert rank["DDP"]["norm"] == pytest.approx(rank["FSDP2"]["norm"], rel=1e-5)
        assert rank["DDP"]["norm"] > 0
