"""`floatline diagnose -- python train.py`: the command taken apart, exit codes, streams, signals, wrong use."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.slow import slow

from floatline.diagnosis.scripts.main import _say_unexplained
from floatline.diagnosis.scripts.script import diagnose_script
from floatline.diagnosis.scripts.script_report import ScriptDiagnosis
from floatline.errors import TargetError
from floatline.running.command import parse_command
from floatline.running.quiet_runs import QuietRuns

SCRIPTS = Path(__file__).parents[1] / "loops"
START = [sys.executable, "-c", "from floatline.cli.main import main; main()", "diagnose"]


def run(*words: str, cwd: Path = SCRIPTS) -> subprocess.CompletedProcess:
    return subprocess.run([*START, *words], capture_output=True, text=True, cwd=cwd, timeout=600)


@pytest.mark.parametrize(
    ("words", "options", "rest"),
    [
        ([sys.executable, "late_exp.py", "--lr", "1e-3"], (), ("late_exp.py", "--lr", "1e-3")),
        ([sys.executable, "-u", "-W", "ignore", "late_exp.py"], ("-u", "-W", "ignore"), ("late_exp.py",)),
        ([sys.executable, "-X", "dev", "-m", "a.b", "-m", "x"], ("-X", "dev"), ("-m", "a.b", "-m", "x")),
        (["late_exp.py", "--", "-c"], (), ("late_exp.py", "--", "-c")),
    ],
)
def test_a_command_is_taken_apart(monkeypatch, words, options, rest):
    monkeypatch.chdir(SCRIPTS)
    command = parse_command(words)
    assert (command.python, command.options, command.words) == (sys.executable, options, rest)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "No command was given"),
        (["bash", "run.sh"], "Command 'bash' is not Python"),
        (["torchrun", "--nproc-per-node=1", "late_exp.py"], "Command 'torchrun' is not Python"),
        (["no_such.py"], "There is no script 'no_such.py'"),
        ([sys.executable, "no_such.py"], "There is no script 'no_such.py'"),
        ([sys.executable, "."], "is a folder without __main__.py"),
        ([sys.executable], "alone runs no script"),
        ([sys.executable, "-c", "print(1)"], "leaves no script to observe"),
        (["./python9.9", "late_exp.py"], "There is no interpreter './python9.9'"),
    ],
)
def test_a_command_that_cannot_be_observed_is_refused(monkeypatch, words, said):
    monkeypatch.chdir(SCRIPTS)
    with pytest.raises(TargetError, match=said.replace(".", r"\.")):
        parse_command(words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--"], "No command was given after '--'"),
        (["--", "bash", "run.sh"], "is not Python"),
        (["--steps", "3", "--", "python", "late_exp.py"], "--steps does not reach into a script"),
    ],
)
def test_wrong_use_is_one_line_and_exits_with_2(words, said):
    result = run(*words)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert said in result.stderr


@slow
def test_a_script_that_trains_nothing_has_no_verdict_and_exits_with_2(tmp_path):
    (tmp_path / "prints.py").write_text("print('hello')\n", encoding="utf-8")
    result = run("--", "prints.py", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout.startswith("hello\nno verdict  no backward pass was seen: the command does not train, or")
    said = run("--format", "json", "--", "prints.py", cwd=tmp_path)
    assert json.loads(said.stdout)["verdict"] == "no-verdict"


@slow
def test_json_is_alone_on_stdout_and_a_finding_exits_with_1(tmp_path):
    trace = tmp_path / "step.npz"
    words = [sys.executable, "-m", "log_of_softmax"]
    result = run("--format", "json", "--trace", str(trace), "--", *words)
    answer = json.loads(result.stdout)
    assert (result.returncode, answer["exit_code"], answer["verdict"]) == (1, 0, "precision")
    assert answer["target"] == " ".join(words)
    assert answer["findings"][0]["cause"] == "rounded-onto-singularity"
    assert result.stderr.startswith("floatline: log_of_softmax runs as it is, under observation; ")
    assert result.stderr.splitlines()[1].startswith("0 ")  # what the script prints
    assert trace.stat().st_size > 1000


@slow
def test_a_script_that_fails_keeps_its_exit_code():
    result = run("--", "stops_on_nan.py")
    assert result.returncode == 3
    assert result.stdout.startswith("reduction-overflow")
    assert "loss is inf at step 23" in result.stderr


@pytest.mark.parametrize(
    ("exit_code", "unexplained", "fails_in_fp32", "status"),
    [(0, "", None, 0), (0, "nan", False, 1), (3, "nan", False, 3), (0, "nan", None, 2), (3, "nan", None, 2)],
)
def test_the_exit_code_of_the_command(exit_code, unexplained, fails_in_fp32, status):
    given = {"exit_code": exit_code, "unexplained": unexplained, "fails_in_fp32": fails_in_fp32}
    diagnosis = ScriptDiagnosis("x", "fp16-mixed", (), 1.0, **given)
    assert diagnosis.status == status
    assert (diagnosis.verdict == "healthy") == (not unexplained)


ENDLESS = """
import itertools, sys, torch
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for step in itertools.count():
    opt.zero_grad(); net(torch.randn(8, 4)).square().mean().backward(); opt.step()
    if step == 30:
        print("under way", flush=True)
"""


@slow
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_ends_the_script_and_what_was_seen_is_told(tmp_path, number):
    (tmp_path / "endless.py").write_text(ENDLESS, encoding="utf-8")
    command = [*START, "--", "endless.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=tmp_path, **pipes, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "under way\n"
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    try:
        rest, complained = process.communicate(timeout=600)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a script without end must not outlive its test
    assert process.returncode == 2
    assert complained.splitlines()[-1].endswith(". Nothing is kept: the same command begins again.")
    assert rest.startswith(f"no verdict  the script was ended by {number.name} after ")
    assert "steps recorded (step 0, 2, 9" in rest
    assert ("Ctrl-C again ends that, too" in complained) == (number == signal.SIGINT)


@pytest.mark.parametrize("is_last", [True, False])
def test_ctrl_c_before_anything_was_seen_ends_the_diagnosis_and_a_crash_does_not(tmp_path, monkeypatch, is_last):
    (tmp_path / "train.py").write_text("import torch\n", encoding="utf-8")
    words = [sys.executable, str(tmp_path / "train.py")]
    monkeypatch.setattr(QuietRuns, "run_aloud", lambda *_, **__: 130)
    with pytest.raises(KeyboardInterrupt):
        diagnose_script(words, is_last=is_last)
    monkeypatch.setattr(QuietRuns, "run_aloud", lambda *_, **__: 139)
    assert diagnose_script(words, is_last=is_last).no_verdict.startswith("the script was ended by SIGSEGV")


def test_the_command_does_not_load_torch_itself():
    code = "import sys, floatline.diagnosis.scripts.script; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


SHORT = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
for step in range(int(sys.argv[1])):
    with torch.autocast("cpu", dtype=torch.float16):
        large = model(torch.ones(8, 4)) * 3e4
        loss = (large * large).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


@slow
@pytest.mark.parametrize("steps", ["2", pytest.param("3", marks=pytest.mark.slow)])
def test_a_loss_that_is_not_finite_is_explained_by_the_step_after_it(tmp_path, steps):
    (tmp_path / "short.py").write_text(SHORT)
    done = run("--", "short.py", steps, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "product-overflow" in done.stdout and "short.py:12" in done.stdout


def test_a_failing_step_that_could_not_be_recorded_is_said():
    given = SimpleNamespace(first_bad_step=4, bad_gradient=4, searches_in_loss=False, loss_steps=[0, 1, 2, 3, 4])
    said = _say_unexplained(SimpleNamespace(given=given, captured=[]))
    assert said.startswith("loss, gradients or weights were not finite from step 4 on")
    assert said.endswith("none of the 5 steps could be recorded")


@pytest.mark.skipif(os.name == "nt", reason="the interpreter is a shell script")
def test_an_interpreter_without_torch_is_told_which_one_floatline_runs_in(tmp_path):
    (tmp_path / "short.py").write_text(SHORT)
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    done = run("--", str(bare), "short.py", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "cannot import" in done.stderr and sys.executable in done.stderr


READS_ITSELF = """
import os, sys, pickle, torch
class Net(torch.nn.Linear): ...
os.chdir("elsewhere")
print(len(open(__file__).read()), sys.argv, __name__, __spec__, type(pickle.loads(pickle.dumps(Net(1, 1)))) is Net)
"""


@slow
def test_a_script_that_goes_elsewhere_finds_its_own_file_and_arguments_as_under_python(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "train.py").write_text(READS_ITSELF, encoding="utf-8")
    bare = subprocess.run([sys.executable, "train.py", "-x"], capture_output=True, text=True, cwd=tmp_path, check=True)
    code = "from floatline.cli.main import main; main()"
    words = [sys.executable, "-c", code, "diagnose", "--", sys.executable, "train.py", "-x"]
    watched = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert watched.stdout.startswith(bare.stdout), watched.stderr
