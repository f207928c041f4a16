"""What is shown while `floatline diagnose -- python train.py` works: in a log a line a stage, on a terminal a clock."""

import contextlib
import os
import re
import subprocess
import sys

import pytest
from tests.preloaded import COMMAND
from tests.slow import slow

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")

SCRIPT = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(8):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, flush=True)
"""
BEGINS = "floatline: train.py runs as it is, under observation; what was seen is told when it ends, or at Ctrl-C"
ENDED = "floatline: the script has ended; what was seen of it is explained"
CLOCK = re.compile(r"0:00:\d\d")
STAGES = """
import time
from floatline.cli.output import Stages

with Stages(keeps={keeps}) as stages:
    stages{aloud}("a script runs")
    print("its own words", flush=True)
    time.sleep(1.5)
    print("its last words", flush=True)
    stages("a run that is not seen [red]" + " and a long text" * {num})
    time.sleep(1.5)
print("the answer")
"""


def see(words, *, cwd, columns=80):
    """What a terminal of so many columns is sent, without colours."""
    import fcntl
    import pty
    import struct
    import termios

    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    env["TERM"] = "xterm-256color"
    process = subprocess.Popen(words, stdin=end, stdout=end, stderr=end, cwd=cwd, env=env)
    os.close(end)
    parts = []
    with contextlib.suppress(OSError):  # Linux says so that nobody writes any more
        while part := os.read(terminal, 1 << 16):
            parts.append(part)
    os.close(terminal)
    code = process.wait(timeout=250)
    return code, re.sub(r"\x1b\[[0-9;?]*[mhl]", "", b"".join(parts).decode())


def show(tmp_path, *, keeps, aloud=True, num=0, columns=80):
    code = STAGES.format(keeps=keeps, aloud=".aloud" if aloud else "", num=num)
    done, text = see([sys.executable, "-c", code], cwd=tmp_path, columns=columns)
    assert done == 0, text
    return text


def test_a_clock_runs_under_a_stage_and_not_while_a_script_has_the_terminal(tmp_path):
    before, after = show(tmp_path, keeps=True).split("its last words")
    assert before == "floatline: a script runs\r\nits own words\r\n"
    assert "floatline: a run that is not seen [red]\r\n" in after
    assert {"0:00:00", "0:00:01"} <= set(CLOCK.findall(after))
    assert after.rstrip().endswith("the answer")


def test_the_check_above_can_fail(tmp_path):
    assert CLOCK.search(show(tmp_path, keeps=True, aloud=False).split("its last words")[0])


@pytest.mark.parametrize("columns", [80, 120])
def test_a_stage_that_changes_one_line_is_wrapped_and_leaves_nothing(tmp_path, columns):
    text = show(tmp_path, keeps=False, num=20, columns=columns)
    assert "…" not in text and "a run that is not seen [red]" in text
    assert text.count(" and a long") >= 19 and "0:00:01" in text
    assert not CLOCK.search(text.split("\x1b[1A\x1b[2K")[-1])  # the last frame was wiped


def test_in_a_log_each_stage_is_a_line(tmp_path):
    code = STAGES.format(keeps=True, aloud=".aloud", num=0)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "its own words\nits last words\nthe answer\n"
    assert done.stderr == "floatline: a script runs\nfloatline: a run that is not seen [red]\n"


def diagnose(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    return [sys.executable, "-c", COMMAND, "diagnose", "--", sys.executable, "train.py"]


@slow
def test_a_script_in_a_log_is_said_to_run_before_its_first_word_and_stdout_stays_its_own(tmp_path):
    both = subprocess.run(diagnose(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)
    lines = both.stdout.splitlines()
    assert lines[0] == BEGINS
    assert lines[1:10] == [*(f"step {step}" for step in range(8)), ENDED]
    assert lines[10].startswith("floatline: the script runs in FP32 for up to 100 steps")
    alone = subprocess.run(diagnose(tmp_path), capture_output=True, text=True, cwd=tmp_path)
    assert alone.stdout.startswith("step 0\n") and "floatline:" not in alone.stdout
    assert all(line.startswith("floatline: ") for line in alone.stderr.splitlines()), alone.stderr


@slow
def test_a_script_on_a_terminal_is_followed_by_a_clock_and_then_by_the_answer(tmp_path):
    code, text = see(diagnose(tmp_path), cwd=tmp_path, columns=120)
    assert text.startswith(f"{BEGINS}\r\nstep 0\r\n")
    own, after = text.split(ENDED)
    assert not CLOCK.search(own) and CLOCK.search(after)
    assert code == 0 and "healthy  No finding" in after
