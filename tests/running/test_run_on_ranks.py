"""`floatline run -- torchrun`: processes train the same model, and leave the same steps out."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.marks import needs_gloo
from tests.slow import slow

SCRIPT = Path(__file__).with_name("train_on_ranks.py")
START = [sys.executable, "-c", "from floatline.cli.main import main; main()", "run"]
LAUNCHERS = {
    "torchrun": [str(Path(sys.executable).with_name("torchrun"))],
    "module": [sys.executable, "-m", "torch.distributed.run"],
}

pytestmark = [
    slow,
    needs_gloo,
]


def train(plan, *words, launcher="module"):
    start = [*START, "--plan", plan, "--", *LAUNCHERS[launcher], "--nproc-per-node", "2", "--standalone", str(SCRIPT)]
    return subprocess.run([*start, *words], capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("launcher", [name for name, words in LAUNCHERS.items() if Path(words[0]).exists()])
def test_processes_end_with_the_same_weights_and_leave_the_same_step_out(launcher):
    found = train("fp16-mixed", "ddp", launcher=launcher)
    assert found.returncode == 0, found.stderr[-4000:]
    lines = sorted(re.findall(r"^(\d) (\w{12}) (\[.*\]) (\w+)$", found.stdout, re.MULTILINE))
    assert [line[0] for line in lines] == ["0", "1"]
    assert lines[0][1] == lines[1][1]
    assert {line[2] for line in lines} == {str([False, False, False, True, False, False])}
    assert {line[3] for line in lines} == {"True"}  # batch statistics of the step went back
    assert found.stderr.count("6 steps under plan 'fp16-mixed', 1 of them left out") == 1


def test_a_plan_that_ddp_is_too_early_for_is_told():
    found = train("bf16-true", "ddp")
    assert found.returncode != 0
    assert "DDP has laid out FP32 ones already" in found.stderr
