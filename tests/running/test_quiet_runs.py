"""Runs without output: forks of one process that has loaded what they need, or processes of their own."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from floatline.running import command, quiet_runs
from floatline.running.command import Command
from floatline.running.quiet_runs import QuietRuns

MODULE = "tests.running.quiet_module"
ROOT = str(Path(__file__).parents[2])


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setattr(quiet_runs, "_has_untried_gpu", lambda: False)
    monkeypatch.setenv("PYTHONPATH", ROOT)
    with QuietRuns(Command(sys.executable, (), ("train.py", "--lr", "1")), [MODULE]) as runs:
        yield runs


@pytest.fixture
def run(tmp_path):
    def run(quiet, how="ends", **env):
        report = tmp_path / "report.json"
        report.unlink(missing_ok=True)
        problem = quiet.run(MODULE, str(report), how, env={**os.environ, **env})
        return problem, json.loads(report.read_text()) if report.exists() else {}

    return run


def is_running(process):
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


linux = pytest.mark.skipif(sys.platform != "linux", reason="runs are forked on Linux alone")


@linux
def test_runs_are_forks_of_one_process_that_is_gone_at_the_end(quiet, run):
    (first, one), (second, other) = run(quiet), run(quiet)
    assert (first, second) == ("", "")
    assert one["parent"] == other["parent"] != os.getpid()
    assert one["process"] != other["process"]
    quiet.__exit__(None, None, None)
    assert not is_running(one["parent"])


@linux
def test_a_first_run_forks_off_the_process_that_later_runs_are_forks_of(quiet, run, tmp_path, capfd):
    report = tmp_path / "first.json"
    assert quiet.run_aloud(MODULE, str(report), "ends", keep_stdout=False) == 0
    assert capfd.readouterr().out == "nobody sees this"
    first = json.loads(report.read_text())
    assert (first["parent"], first["has_child"], first["pipes"]) == (os.getpid(), False, None)
    (_, one), (_, other) = run(quiet), run(quiet)
    assert one["parent"] == other["parent"] not in (os.getpid(), first["process"])
    quiet.__exit__(None, None, None)
    while is_running(one["parent"]):  # it is not told to end: nobody is left to ask for anything
        time.sleep(0.01)


@linux
def test_a_first_run_that_raises_gives_its_exit_code(quiet, run, tmp_path):
    assert quiet.run_aloud(MODULE, str(tmp_path / "first.json"), "raises", keep_stdout=False) == 1
    assert run(quiet)[0] == ""


def test_a_run_has_its_own_environment_words_and_no_input(quiet, run, tmp_path):
    _, seen = run(quiet, MARK="one", TMPDIR=str(tmp_path))
    assert (seen["mark"], seen["temporary"]) == ("one", str(tmp_path))
    assert (seen["words"], seen["stdin"]) == (["train.py", "--lr", "1"], "")
    assert run(quiet)[1]["mark"] is None


def test_what_a_run_raises_ends_it_alone(quiet, run, capfd):
    assert run(quiet, "raises")[0] == ""
    assert run(quiet)[1]["words"]
    assert capfd.readouterr() == ("", "")


@linux
def test_what_a_run_leaves_behind_is_ended(quiet, run):
    seen = run(quiet, "leaves a process")[1]
    assert seen["left"]
    while is_running(seen["left"]):  # it was told to end, and does so by itself
        time.sleep(0.01)


def test_a_run_that_does_not_end_is_ended_and_said(quiet, run, monkeypatch):
    run(quiet)
    with monkeypatch.context() as limited:
        limited.setattr(quiet_runs, "LIMIT", 2.0)
        limited.setattr(command, "LIMIT", 2.0)
        problem, seen = run(quiet, "never ends")
    assert problem == "it took longer than 2 s"
    assert not is_running(seen.get("process", 0))
    assert run(quiet)[0] == ""


@linux
def test_beside_an_untried_gpu_on_ranks_and_without_the_process_that_forks_a_run_is_a_process_of_its_own(
    quiet, run, monkeypatch
):
    parent = run(quiet)[1]["parent"]
    os.kill(parent, signal.SIGKILL)
    assert run(quiet)[1]["parent"] == os.getpid()
    monkeypatch.setattr(quiet_runs, "_has_untried_gpu", lambda: True)
    with QuietRuns(Command(sys.executable, (), ("train.py",)), [MODULE]) as beside_gpu:
        assert run(beside_gpu)[1]["parent"] == os.getpid()
    monkeypatch.setattr(quiet_runs, "_has_untried_gpu", lambda: False)
    with QuietRuns(Command(sys.executable, (), ("train.py",), ("env",)), [MODULE]) as launched:
        assert run(launched)[1]["parent"] == os.getpid()


def test_what_cannot_be_loaded_is_told_by_the_report_of_the_run(run, monkeypatch, tmp_path):
    monkeypatch.setattr(quiet_runs, "_has_untried_gpu", lambda: False)
    with QuietRuns(Command(sys.executable, (), ("train.py",)), ["nowhere"]) as quiet:
        quiet.run("nowhere", str(tmp_path / "report.json"), "", env=os.environ)
    assert json.loads((tmp_path / "report.json").read_text()) == {"missing": "nowhere"}


@pytest.mark.parametrize(("has_torch", "late"), [(1, ["torch._dynamo"]), (0, [])])
def test_what_torch_loads_late_is_loaded_once_for_all_runs(has_torch, late, monkeypatch):
    loaded = []
    monkeypatch.setattr(quiet_runs.importlib, "import_module", loaded.append)
    monkeypatch.setattr(quiet_runs.sys, "modules", {"torch": None} if has_torch else {})
    quiet_runs._load(["one"])
    monkeypatch.undo()
    assert loaded == ["one", *late]
