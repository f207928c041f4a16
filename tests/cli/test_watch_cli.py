"""`floatline watch` and `floatline report`, as they are typed."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from tests.preloaded import COMMAND, run_preloaded
from tests.report.run.runs import make_run
from tests.slow import slow
from typer.testing import CliRunner

from floatline.cli.main import app

FLOATLINE = [sys.executable, "-c", COMMAND]


def run(*words: str, **env: str) -> subprocess.CompletedProcess:
    if env:  # Python reads some of it when it starts
        full = {**os.environ, "COLUMNS": "100", **env}
        return subprocess.run([*FLOATLINE, *words], capture_output=True, text=True, timeout=250, env=full)
    return run_preloaded(["-c", COMMAND, *words], env={**os.environ, "COLUMNS": "100"})


def ask(*words: str):
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, list(words))


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *words: str) -> None:
        import fcntl
        import pty
        import struct
        import termios

        self.end, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [*FLOATLINE, *words],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env={**env, "TERM": "xterm"},
            start_new_session=True,
        )
        os.close(inner)
        self.text = ""

    def wait_for(self, words: str) -> str:
        """What was shown up to these words, without colours; fails where they do not come."""
        until = time.monotonic() + 250
        while time.monotonic() < until:
            plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.text)
            if words in plain:
                return plain
            if select.select([self.end], [], [], 0.2)[0]:
                try:
                    self.text += os.read(self.end, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    break
        raise AssertionError(f"{words!r} was not shown in:\n{self.text}")

    def close(self) -> int:
        try:
            return self.process.wait(timeout=250)
        finally:
            if self.process.poll() is None:
                self.process.kill()
            os.close(self.end)


def test_a_pipe_gets_one_plain_summary(tmp_path):
    make_run(tmp_path / "run", planned=300)
    found = run("watch", str(tmp_path / "run"))
    assert found.returncode == 0 and found.stderr == ""
    assert "\x1b" not in found.stdout
    assert found.stdout.count("run  finished  step 300 of 300") == 1
    assert "skipped  7 of 300 (2.33 %): 6 overflow, 1 forward-nonfinite" in found.stdout


def test_a_pipe_without_unicode_gets_ascii(tmp_path):
    make_run(tmp_path / "run")
    found = run("watch", str(tmp_path / "run"), PYTHONIOENCODING="ascii")
    assert found.returncode == 0
    assert found.stdout.isascii() and "skipped" in found.stdout


def test_json_is_one_object(tmp_path):
    make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "runs" / "b", steps=20, planned=40)
    found = ask("watch", str(tmp_path / "runs"), "--format", "json")
    assert found.exit_code == 0
    runs = json.loads(found.stdout)["runs"]
    assert [(r["run"].rpartition("/")[2], r["state"], r["attempted"]) for r in runs] == [
        ("a", "finished", 300),
        ("b", "interrupted", 20),
    ]
    assert runs[0]["layers"][0]["headroom"] == pytest.approx(2.0, abs=0.01)


def test_a_folder_of_runs_is_all_of_them_each_once(tmp_path):
    make_run(tmp_path / "runs" / "a", steps=5)
    make_run(tmp_path / "runs" / "b", steps=5)
    (tmp_path / "runs" / "notes").mkdir()
    text = ask("watch", str(tmp_path / "runs"), str(tmp_path / "runs" / "a")).stdout
    assert text.count("a  finished") == 1 and text.count("b  finished") == 1


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    make_run(tmp_path / "first" / "run", steps=5)
    make_run(tmp_path / "second" / "run", steps=5)
    text = ask("watch", str(tmp_path / "first"), str(tmp_path / "second")).stdout
    assert "first/run  finished" in text and "second/run  finished" in text


@pytest.mark.parametrize(("stop", "code"), [("", 0), ("the loss is NaN", 1)])
def test_a_run_that_the_guard_stopped_is_exit_code_1(tmp_path, stop, code):
    make_run(tmp_path / "run", stop=stop)
    assert ask("watch", str(tmp_path / "run")).exit_code == code


@pytest.mark.parametrize("command", ["watch", "report"])
def test_a_folder_without_a_run_is_one_line_and_exit_code_2(tmp_path, command):
    found = run(command, str(tmp_path))
    assert found.returncode == 2 and found.stdout == ""
    assert found.stderr == f"floatline: There is no ledger in '{tmp_path}'. Give a run folder, such as runs/NAME.\n"
    found = run(command, str(tmp_path / "nowhere"))
    assert found.returncode == 2 and "is not a folder" in found.stderr


@slow
def test_watching_does_not_load_torch(tmp_path):
    make_run(tmp_path / "run", steps=5)
    code = f"""
import sys
sys.argv = ["floatline", "{{}}", "{tmp_path / "run"}"]
from floatline.cli.main import app
try:
    app(standalone_mode=False)
finally:
    print("torch" in sys.modules)
"""
    for command in ("watch", "report"):
        script = code.replace("{}", command)
        found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250)
        assert found.stdout.splitlines()[-1] == "False", found.stderr


def test_the_page_goes_where_it_is_told(tmp_path):
    make_run(tmp_path / "run", steps=30)
    found = ask("report", str(tmp_path / "run"), "--out", str(tmp_path / "a" / "page.html"), "--format", "json")
    assert found.exit_code == 0
    assert json.loads(found.stdout)["page"] == str(tmp_path / "a" / "page.html")
    assert (tmp_path / "a" / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert ask("report", str(tmp_path / "run")).exit_code == 0
    assert (tmp_path / "run" / "run.html").is_file()


def test_a_page_that_cannot_be_written_is_one_line(tmp_path):
    make_run(tmp_path / "run", steps=3)
    (tmp_path / "file").write_text("")
    found = run("report", str(tmp_path / "run"), "--out", str(tmp_path / "file" / "page.html"))
    assert found.returncode == 2
    assert len(found.stderr.splitlines()) == 1 and "--out" in found.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
def test_a_terminal_follows_the_run_to_its_end(tmp_path):
    ledger = make_run(tmp_path / "run", steps=20, planned=25, skips=False, close=False)
    terminal = Terminal("watch", str(tmp_path / "run"))
    assert "run  running  step 20 of 25" in terminal.wait_for("headroom in fp16")
    for _ in range(5):
        ledger.append(loss=0.5, scale=1024.0, grad_norm=1.0)
    ledger.flush()
    assert "running" in terminal.wait_for("step 25 of 25")
    assert "scale    1,024" in terminal.wait_for("1,024 to 65,536, 1 reduction")
    ledger.close()
    terminal.wait_for("run  finished  step 25 of 25 · took")
    assert terminal.close() == 0


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
def test_control_c_leaves_the_terminal_and_not_the_run(tmp_path):
    ledger = make_run(tmp_path / "run", steps=20, close=False)
    terminal = Terminal("watch", str(tmp_path / "run"))
    terminal.wait_for("run  running  step 20")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.close() == 0
    ledger.append(loss=0.5)
    ledger.close()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
def test_once_shows_a_run_that_goes_on_and_leaves(tmp_path):
    ledger = make_run(tmp_path / "run", steps=20, close=False)
    terminal = Terminal("watch", "--once", "--steps", "1000000", str(tmp_path / "run"))
    terminal.wait_for("run  running  step 20 of 1,000,000 · ETA")
    assert terminal.close() == 0
    ledger.close()
