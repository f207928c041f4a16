"""`floatline train`: what it prints, its exit codes, and one line for every wrong use."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from tests.slow import exhaustive, slow

import floatline as fl
from floatline.cli.main import main
from floatline.guard.checkpoints.run_files import newest_checkpoint

TARGET = """
import torch
from torch import nn

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x):
        return self.body(x)

def build(seed=0, optimizer=None, loss=None):
    generator = torch.Generator().manual_seed(seed)
    batches = [((torch.randn(5, 4, generator=generator),), (torch.zeros(5, 4),)) for _ in range(3)]
    optimizer = optimizer or (lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2))
    print("the target prints")
    return Scale(), batches, loss or nn.MSELoss(), "fp16-mixed", optimizer

def rows(seed=0):
    return build(seed, loss=lambda y, t: (y.float() - t).square().mean(1))

def whole(seed=0):
    return build(seed, loss=lambda y, t: y.argmax())

def stranger(seed=0):
    return build(seed, optimizer=lambda model: torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1))

def no_rate(seed=0):
    return build(seed, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=float("nan")))

def nothing(seed=0):
    return build(seed, optimizer=lambda model: 1 / 0)

def crash(seed=0):
    return build(seed, loss=lambda y, t: y[99])

def unmeasured(seed=0):
    from floatline import Workload
    return Workload(*build(seed), lambda model: model.missing)

def poisoned(seed=0):
    return build(seed, loss=lambda y, t: (y.float() - t).mean() * float("nan"))
"""


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.py").write_text(TARGET)
    return "small.py"


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the real entry point; gives exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["floatline", "train", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return run


def one_line(text: str) -> str:
    """What the command complained about: the last line, and the only one of its kind."""
    lines = [line for line in text.splitlines() if line.startswith("floatline: ")]
    assert len(lines) == 1, text
    assert text.splitlines()[-1] == lines[0]
    return lines[0]


def test_a_run_says_what_happened_and_where_it_lies(target, command, tmp_path):
    code, out, err = command(target, "--steps", "6")
    assert code == 0, err
    assert re.search(r"6 attempted, \d applied, \d skipped", out)
    assert re.search(r"\nloss [\d.e-]+ in FP32 after 6 steps", out)
    assert "ledger and checkpoints in runs/small\n" in out
    assert "the target prints" not in out
    assert "the target prints" in err
    assert fl.Ledger.read(tmp_path / "runs" / "small").accounts.run.attempted == 6


def test_json_is_one_object_with_the_numbers(target, command, tmp_path):
    code, out, _ = command(target, "--steps", "4", "--format", "json", "--folder", "here", "--plan", "bf16-mixed")
    found = json.loads(out)
    assert code == 0
    assert list(found) == [
        *("target", "plan", "steps", "attempted", "applied", "skipped", "first_loss", "last_loss", "metric"),
        *("seconds", "folder", "checkpoint", "interrupted", "stopped", "finding", "best", "epochs"),
    ]
    assert (found["target"], found["plan"], found["attempted"]) == (target, "bf16-mixed", 4)
    assert found["checkpoint"] == str(tmp_path / "here" / "checkpoint-00000004")
    assert found["metric"] > 0


@slow
def test_without_steps_200_are_made(target, command):
    assert json.loads(command(target, "--format", "json")[1])["steps"] == 200


def test_a_resumed_run_reports_the_numbers_of_the_whole_run(target, command):
    whole = json.loads(command(target, "--steps", "9", "--folder", "whole", "--format", "json", "--seed", "3")[1])
    command(target, "--steps", "4", "--folder", "parts", "--seed", "3")
    again = ["--steps", "9", "--folder", "parts", "--resume", "--format", "json", "--seed", "3"]
    parts = json.loads(command(target, *again)[1])
    same = ("attempted", "applied", "skipped", "first_loss", "last_loss", "metric", "plan", "steps")
    assert [whole[name] for name in same] == [parts[name] for name in same]
    assert whole["attempted"] == 9


def test_save_every_is_the_distance_of_checkpoints(target, command, tmp_path):
    command(target, "--steps", "8", "--save-every", "5", "--folder", "run")
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == [
        "checkpoint-00000005",
        "checkpoint-00000008",
    ]


def test_a_stop_of_the_guard_exits_with_1_and_says_why(target, command):
    code, out, _ = command(f"{target}:poisoned", "--policy", "ultra-conservative", "--folder", "a")
    assert code == 1
    assert re.search(r"^Stopped at step \d+.*: .*State: .*stopped/checkpoint-\d+\.$", out, re.MULTILINE)
    code, out, _ = command(f"{target}:poisoned", "--policy", "ultra-conservative", "--folder", "b", "--format", "json")
    assert code == 1
    assert json.loads(out)["stopped"].startswith("Stopped at step ")
    assert json.loads(out)["last_loss"] == "NaN"


WRONG = {
    "plan": (["small.py", "--plan", "fp17-mixed"], "Plan 'fp17-mixed' is not known. Did you mean 'fp16-mixed'"),
    "clip": (["small.py", "--plan", "bad.yaml"], "Plan 'bad.yaml': clip.max_norm is 0. It must be a number above 0."),
    "policy": (["small.py", "--policy", "save"], "Policy 'save' is not known. Did you mean 'safe'?"),
    "steps": (["small.py", "--steps", "0"], "--steps"),
    "target": (["missing.py"], "Target 'missing.py' does not exist."),
    "rows": (["small.py:rows"], "compute_loss has shape (5,). Give one number: take the mean or the sum."),
    "whole": (["small.py:whole"], "torch.int64 tensor, which has no gradient. Give a floating-point loss."),
    "stranger": (["small.py:stranger"], "Make the optimizer from model.parameters()"),
    "rate": (["small.py:no_rate"], "The learning rate of group 0 is nan. Give a finite number from 0 up."),
    "true": (["small.py", "--plan", "fp16-true"], "Use floatline.optim.AdamW in make_optimizer"),
    "resume": (["small.py", "--resume"], "There is no run to resume in"),
    "optimizer": (["small.py:nothing"], "make_optimizer failed: ZeroDivisionError: division by zero. Fix it there."),
    "metric": (["small.py:unmeasured", "--steps", "1"], "its evaluation failed: AttributeError: 'Scale' object has no"),
    "loss": (["small.py:crash"], "step 1 failed: IndexError: index 99 is out of bounds"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_is_one_line_and_exit_code_2(target, command, tmp_path, case):
    (tmp_path / "bad.yaml").write_text("weights: fp32\ncompute: fp16\nclip: {max_norm: 0}\n")
    arguments, message = WRONG[case]
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert message in one_line(err)


def test_a_run_that_could_not_begin_leaves_no_folder_in_the_way(target, command):
    assert command(f"{target}:no_rate", "--folder", "run")[0] == 2
    assert command(target, "--folder", "run", "--steps", "2")[0] == 0


def test_a_folder_that_holds_a_run_wants_resume(target, command, tmp_path):
    command(target, "--steps", "2")
    code, _, err = command(target, "--steps", "2")
    assert code == 2
    assert one_line(err).endswith(
        f"{tmp_path}/runs/small already holds a run. Resume it (--resume), or choose another folder."
    )


def test_a_run_folder_in_use_by_another_process_is_refused(target, command, tmp_path):
    command(target, "--steps", "2", "--folder", "run")
    program = "import sys, floatline as fl; fl.Ledger.resume('run'); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        code, _, err = command(target, "--folder", "run", "--resume")
        other.stdin.close()
    assert code == 2
    assert f"in use by process {other.pid} on" in one_line(err)
    assert command(target, "--folder", "run", "--resume", "--steps", "3")[0] == 0


def test_resuming_with_another_seed_or_plan_is_refused(target, command):
    command(target, "--steps", "2", "--folder", "run", "--seed", "5")
    assert "has seed 5, which is not the 0 given now" in one_line(command(target, "--folder", "run", "--resume")[2])
    other = command(target, "--folder", "run", "--resume", "--seed", "5", "--plan", "fp32")[2]
    assert "has plan 'fp16-mixed', which is not the 'fp32' given now" in one_line(other)


@slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGINT to a process")
@pytest.mark.parametrize(
    ("number", "how"),
    [(signal.SIGINT, "Interrupted"), pytest.param(signal.SIGTERM, "Ended by SIGTERM", marks=exhaustive)],
)
def test_a_signal_saves_says_how_to_go_on_and_is_the_exit_code(target, command, tmp_path, number, how):
    # Started in the background, a process inherits a Ctrl-C that is ignored, and keeps to it.
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program += "from floatline.cli.main import main; main()"
    arguments = ["train", target, "--steps", "1000000", "--save-every", "3", "--folder", "run"]
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        until = time.monotonic() + 250
        while not newest_checkpoint(tmp_path / "run") or newest_checkpoint(tmp_path / "run").name.endswith("-00000000"):
            assert time.monotonic() < until and run.poll() is None, run.communicate()
            time.sleep(0.05)
        os.kill(run.pid, number)
        out, err = run.communicate(timeout=250)
    assert run.returncode == 128 + number, err
    steps = int(re.search(rf"{how} after step ([\d,]+) of 1,000,000; the state is saved\.", out)[1].replace(",", ""))
    assert "Go on with: floatline train small.py --folder run --resume\n" in out
    assert "Traceback" not in err
    assert newest_checkpoint(tmp_path / "run").name == f"checkpoint-{steps:08d}"
    assert fl.Ledger.read(tmp_path / "run").ended
    assert command(target, "--folder", "run", "--resume", "--steps", str(steps + 2))[0] == 0


def test_nothing_but_the_targets_own_output_goes_to_stderr_without_a_terminal(target, command):
    assert command(target, "--steps", "2")[2] == "the target prints\n"


def test_without_a_terminal_a_longer_run_has_a_line_for_each_tenth(target, command):
    said = command(target, "--steps", "40")[2].splitlines()
    lines = [line for line in said if line.startswith("floatline: step ")]
    assert len(lines) in (9, 10)  # what the guard has not read yet is not shown
    assert re.match(r"floatline: step \d of 40, loss \d.*, 0 skipped, about .+ to go$", lines[0]), lines[0]
    assert "to go" not in lines[-1] or "step 40" not in lines[-1]


@slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_on_a_terminal_a_bar_shows_loss_scale_and_skips(target, tmp_path):
    import pty

    leader, follower = pty.openpty()
    program = "from floatline.cli.main import main; main()"
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    run = subprocess.Popen(
        [sys.executable, "-c", program, "train", target, "--steps", "20"],
        stdout=subprocess.PIPE,
        stderr=follower,
        env=environment,
    )
    os.close(follower)
    shown = b""
    with contextlib.suppress(OSError):  # what Linux says when the other end is closed
        while part := os.read(leader, 1 << 16):  # while it runs: a terminal holds 4 KB, then whoever writes waits
            shown += part
    os.close(leader)
    out, _ = run.communicate(timeout=250)
    text = shown.decode()
    assert run.returncode == 0, text
    assert re.search(r"20/20.*loss [\d.e-]+ +scale 65536 +skipped 0", text), text
    assert re.search(r"epoch 0: loss [\d.e-]+, 3 of 3 applied, scale 65536, 0 reductions", text), text
    assert b"attempted" in out


def test_help_needs_no_torch():
    program = textwrap.dedent("""
        import sys
        from floatline.cli.main import main
        sys.argv = ["floatline", "train", "--help"]
        try:
            main()
        finally:
            print("torch" in sys.modules, file=sys.stderr)
    """)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stderr.strip() == "False"
    assert "--resume" in run.stdout


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("examples/small_gpt.py", "small_gpt"),
        ("package.module", "module"),
        ("package.module:tiny", "module-tiny"),
        ("a b.py:build", "a-b"),
        ("mmgcn:eps data=/my/folder passes=2", "mmgcn-eps-data--my-folder-passes-2"),
        ("mmgcn data=a:b", "mmgcn-data-a-b"),
    ],
)
def test_the_default_folder_is_named_after_the_target(text, name):
    from floatline.training.settings import name_folder

    assert name_folder(text) == name


def test_a_preset_has_a_folder_of_its_own(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ("layers=1", "num_batches=2", "batch_size=4", "held_out=4")
    for more in ((), ("--preset", "fixed")):
        code, _, err = command("conditioned", *more, "--plan", "fp32", "--steps", "2", *small)
        assert code == 0, err
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["conditioned", "conditioned-fixed"]
    code, _, err = command("conditioned", "--preset", "fixed", "--plan", "fp32", "--steps", "2", *small)
    assert code == 2 and "runs/conditioned-fixed already holds a run" in err
