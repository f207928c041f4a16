"""Commands that torchrun, accelerate or an MPI start several times, taken apart."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from floatline.errors import TargetError
from floatline.running.command import ask_to_end, parse_launched, pass_on_ending

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
ACCELERATE = str(Path(sys.executable).with_name("accelerate"))
BY_MODULE = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture(autouse=True)
def in_folder_with_script(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("")
    for name in ("torchrun", "mpirun"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)


def torchrun(*words):
    return parse_launched(["./torchrun", *words])


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ([], []),
        (["--standalone"], ["--standalone"]),
        (["--nproc-per-node", "2"], ["--nproc-per-node", "2"]),
        (["--nproc_per_node=2", "--standalone"], ["--nproc_per_node=2", "--standalone"]),
        (["-r", "3", "-t3"], ["-r", "3", "-t3"]),
        (["--rdzv-conf", "a=1,b=2"], ["--rdzv-conf", "a=1,b=2"]),
        (["--run-path"], []),
        (["--virtual_local_rank"], ["--virtual_local_rank"]),
    ],
)
def test_options_of_torchrun_stay_with_it(options, given):
    command = torchrun(*options, "train.py", "--standalone", "a b", "-m")
    assert command.launcher == ("./torchrun", *given, "--no-python")
    assert command.words == ("train.py", "--standalone", "a b", "-m")
    assert command.options == ("-u",)  # as torchrun runs scripts


def test_every_option_of_this_torchrun_is_known():
    from torch.distributed.run import get_args_parser

    for action in get_args_parser()._actions:
        for option in action.option_strings:
            if option in ("-h", "--help", "-m", "--module", "--no-python", "--no_python"):
                continue
            given = [option] if action.nargs == 0 else [option, "1"]
            assert torchrun(*given, "train.py").words == ("train.py",)


def test_a_module_is_run_as_one():
    assert torchrun("--standalone", "-m", "package.train", "-x").words == ("-m", "package.train", "-x")
    assert torchrun("--module", "package.train").launcher == ("./torchrun", "--no-python")


def test_the_interpreter_is_that_of_the_launcher():
    assert parse_launched([*BY_MODULE, "--standalone", "train.py"]).python == sys.executable
    assert parse_launched([*BY_MODULE, "train.py"]).launcher == (*BY_MODULE, "--no-python")
    assert torchrun("train.py").python == sys.executable  # there is none beside it
    if Path(TORCHRUN).exists():
        assert parse_launched([TORCHRUN, "train.py"]).python == str(Path(TORCHRUN).with_name("python"))


def test_other_commands_are_those_of_python():
    command = parse_launched([sys.executable, "-u", "train.py", "a b"])
    assert (command.launcher, command.options, command.words) == ((), ("-u",), ("train.py", "a b"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["./torchrun"], "names no Python script"),
        (["./torchrun", "--standalone"], "names no Python script"),
        (["./torchrun", "--no-python", "train.py"], "names no Python script"),
        (["./torchrun", "none.py"], "There is no script 'none.py'"),
        (["./none/torchrun", "train.py"], "There is no program './none/torchrun'"),
        ([], "No command was given"),
        (["accelerate", "config"], "is not Python"),
        ([ACCELERATE, "launch", "none.py"], "There is no script 'none.py'"),
        ([ACCELERATE, "launch", "--no_such_option", "3"], "There is no script|does not know"),
        ([ACCELERATE, "launch", "--no_python", "train.py"], "names no Python script"),
        (["./mpirun", "-n", "2", "train"], "names no Python"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(words, said):
    with pytest.raises(TargetError, match=said) as raised:
        parse_launched(words)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("words", "launcher", "script"),
    [
        (["--cpu", "train.py", "--lr", "3"], ["--cpu"], ("train.py", "--lr", "3")),
        (["--num_processes", "2", "--mixed_precision=no", "train.py"], ["--num_processes", "2", "--mixed_precision=no"],
         ("train.py",)),
        (["--cpu", "-m", "package.train", "--cpu"], ["--cpu"], ("-m", "package.train", "--cpu")),
    ],
)  # fmt: skip
def test_options_of_accelerate_stay_with_it(words, launcher, script):
    command = parse_launched([ACCELERATE, "launch", *words])
    assert command.launcher == (ACCELERATE, "launch", *launcher, "--no_python")
    assert command.words == script


def test_what_stands_before_python_is_an_mpis():
    command = parse_launched(["./mpirun", "-n", "2", sys.executable, "-u", "train.py", "3"])
    assert command.launcher == ("./mpirun", "-n", "2")
    assert (command.python, command.options, command.words) == (sys.executable, ("-u",), ("train.py", "3"))


def test_the_command_line_runs_floatlines_module_with_the_words():
    line = torchrun("--standalone", "train.py", "a b").inside("floatline.running.main", "", "{}")
    assert line[:5] == ["./torchrun", "--standalone", "--no-python", sys.executable, "-u"]
    assert line[-4:] == ["1", "{}", "train.py", "a b"]


LAUNCHER = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)

def end(*_):
    if sys.argv[2] == "minds":
        child.kill()
        child.wait()
    sys.exit(1)

signal.signal(signal.SIGTERM, end)
open(sys.argv[1], "w").write(str(child.pid))
signal.pause()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals between processes")
@pytest.mark.parametrize("minds", [True, False])
def test_a_launcher_that_is_asked_to_end_ends_its_processes(minds, tmp_path):
    """Those are in sessions of their own, as torchrun's are: nobody else would end them."""
    known = tmp_path / "child"
    words = [sys.executable, "-c", LAUNCHER, str(known), "minds" if minds else "forgets"]
    with subprocess.Popen(words) as process:
        while not known.exists() or not known.read_text(encoding="utf-8"):
            time.sleep(0.02)
        ask_to_end(process)
    child = int(known.read_text(encoding="utf-8"))
    try:
        os.kill(child, signal.SIGKILL)
        lived = True
    except ProcessLookupError:
        lived = False
    assert lived != minds


def test_ctrl_c_while_it_loads_ends_a_process_without_a_traceback(tmp_path):
    (tmp_path / "loads_slowly.py").write_text("raise KeyboardInterrupt")
    command = parse_launched([sys.executable, "train.py"]).inside("loads_slowly", "")
    ended = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True)
    assert (ended.returncode, ended.stderr) == (130, b"")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_ended_the_script_is_heard_here_where_somebody_listens(number):
    heard = []
    before = signal.signal(number, lambda given, _: heard.append(given))
    try:
        pass_on_ending(128 + number)
        pass_on_ending(1)
        signal.signal(number, signal.SIG_IGN)
        pass_on_ending(128 + number)
    finally:
        signal.signal(number, before)
    assert heard == [number]
