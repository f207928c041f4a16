"""`floatline validate`: exit codes, JSON, wrong use in one line, resuming after a kill, one at a time."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.preloaded import COMMAND, run_preloaded
from tests.slow import exhaustive, slow

TARGET = str(Path(__file__).parents[1] / "validation" / "tiny_lm.py")
START = [sys.executable, "-c", COMMAND, "validate"]


def floatline(*words, cwd):
    return run_preloaded(["-c", COMMAND, "validate", *words], cwd=cwd, timeout=600)


def wait_for(condition):
    end = time.monotonic() + 250
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "There is nothing to validate. Give a TARGET; or --plan fp16-mixed -- python train.py --seed {seed}; or "),
        ([TARGET, "--baseline", "python x.py"], "--baseline are both given."),
        ([TARGET, "--plan", "fp17-mixed"], "Did you mean 'fp16-mixed'"),
        ([TARGET, "--margin", "0.02", "0.01"], "do not rise from above 0"),
        ([TARGET, "--max-seeds", "2"], "2 seeds are fewer than the smallest look"),
        ([TARGET, "--steps", "3", "--epochs", "1"], "both given"),
        ([TARGET, "--steps", "-1"], "--steps"),
        ([TARGET, "--resume"], "no study to resume"),
        (["no_such.py"], "no_such.py"),
        ([f"{TARGET}:train"], "has only train(), which cannot be started twice from the same weights"),
        (["--baseline", "x {seed}", "--candidate", "y {seed}", "--metric", "l", "--steps", "3"], "are for a target"),
        (["--baseline", "x {seed}", "--candidate", "y {seed}", "--metric", "l", "--curve", "loss"], "is for a target"),
        ([TARGET, "--curve", "accuracy"], "The curve is 'accuracy'"),
        ([TARGET, "--rare", "0"], "A share of 0 failing seeds is not between 0 and 1"),
        ([TARGET, "--resolution", "-1"], "A resolution of -1 is no step"),
        ([TARGET, "--faster", "0"], "--faster 0 is no ratio"),
        ([TARGET, "--smaller", "0.9", "--no-measure"], "--faster and --smaller are about what is measured"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(words, line, tmp_path):
    done = floatline(*words, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("floatline: ") and done.stderr.count("\n") == 1
    assert line in done.stderr


@slow
def test_a_killed_validation_resumes_repeats_nothing_and_two_at_once_are_refused(tmp_path):
    words = [f"{TARGET}:slow", "--steps", "60", "--max-seeds", "3", "--no-measure", "--folder", "study", "--jobs", "1"]
    words += ["--margin", "0.01", "0.02", "--format", "json"]
    runs = tmp_path / "study" / "runs"
    begun = subprocess.Popen([*START, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: len(list(runs.glob("*/*.json"))) >= 2 or begun.poll() is not None)
    second = floatline(*words, "--resume", cwd=tmp_path)
    assert second.returncode == 2 and "in use by process" in second.stderr
    begun.send_signal(signal.SIGKILL)
    begun.communicate()
    before = {path: path.stat().st_mtime_ns for path in runs.glob("*/*.json")}
    assert 2 <= len(before) < 12
    other = floatline(*words, "--steps", "61", "--resume", cwd=tmp_path)
    assert other.returncode == 2 and '"steps": 60' in other.stderr and '"steps": 61' in other.stderr
    resumed = floatline(*words, "--resume", cwd=tmp_path)
    found = json.loads(resumed.stdout)
    assert resumed.returncode == 0, (found, resumed.stderr)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(list(runs.glob("*/*.json"))) == 12
    assert (found["verdict"], found["candidate"], found["metric"], found["seeds"]) == (
        "PASS",
        "fp16-mixed",
        "val_loss",
        3,
    )
    assert Path(found["report"]).is_file()
    assert json.loads((tmp_path / "study" / "validation.json").read_text())["target"].endswith("tiny_lm.py:slow")
    lines = resumed.stderr.splitlines()  # no bar where it is no terminal, but a line for each run
    assert all(line.startswith(("floatline: ", "  ")) for line in lines)
    assert len([line for line in lines if re.search(r"seed \d: [0-9.]+ in \d+ s; ", line)]) == 12 - len(before)


@pytest.mark.parametrize(
    ("number", "code", "how"),
    [
        (signal.SIGINT, 130, "interrupted"),
        pytest.param(signal.SIGTERM, 143, "ended by SIGTERM", marks=exhaustive),
    ],
)
@pytest.mark.slow
def test_ctrl_c_and_sigterm_keep_what_is_finished_and_leave_no_process(tmp_path, number, code, how):
    words = [f"{TARGET}:slow", "--steps", "60", "--max-seeds", "3", "--no-measure", "--folder", "study", "--jobs", "1"]
    runs = tmp_path / "study" / "runs"
    begun = subprocess.Popen(
        [*START, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    wait_for(lambda: len(list(runs.glob("*/*.json"))) >= 1 or begun.poll() is not None)
    begun.send_signal(number)
    out, err = begun.communicate(timeout=250)
    assert (begun.returncode, out) == (code, "")
    assert err.splitlines()[-1] == f"floatline: {how}. What is finished is kept: go on with --resume."
    assert not [path for path in Path("/proc").glob("[0-9]*") if _is_child_in(path, tmp_path)]


def _is_child_in(process, folder):
    """Whether it is a worker that was started in this folder."""
    try:
        return (process / "cwd").readlink() == folder and b"floatline.validation.running.child" in (
            process / "cmdline"
        ).read_bytes()
    except OSError:
        return False


@exhaustive
def test_a_crash_of_one_run_is_a_refusal_with_exit_code_1(tmp_path):
    done = floatline(f"{TARGET}:crash", "--steps", "4", "--max-seeds", "3", "--no-measure", cwd=tmp_path)
    assert done.returncode == 1
    assert "REFUSED" in done.stdout and "its process ended with exit code 9" in done.stdout
