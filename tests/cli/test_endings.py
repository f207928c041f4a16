"""Ctrl-C and SIGTERM leave a word on how to go on."""

import contextlib
import os
import signal
import sys
import threading

import pytest
import typer
from typer.testing import CliRunner

from floatline import __main__
from floatline.causes import find_cause
from floatline.cli import diagnose, explain, fit, fold, manifest, parity, replay, rescue, train, validate
from floatline.cli.endings import saying_how_to_go_on
from floatline.cli.help import AllCommands
from floatline.cli.main import app
from floatline.diagnosis.scripts.script_report import ScriptDiagnosis
from floatline.findings import Finding
from floatline.running import command


@pytest.mark.parametrize(
    ("number", "says", "code"), [(signal.SIGINT, "interrupted", 130), (signal.SIGTERM, "ended by SIGTERM", 143)]
)
def test_an_ended_command_says_how_to_go_on_and_has_the_exit_code_of_the_signal(number, says, code, capsys):
    with pytest.raises(typer.Exit) as left, saying_how_to_go_on("The same command goes on."):
        signal.raise_signal(number)
    assert left.value.exit_code == code
    assert capsys.readouterr().err == f"floatline: {says}. The same command goes on.\n"


def test_what_was_done_at_sigterm_before_is_done_again_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    with saying_how_to_go_on("Again."):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_thread_has_no_handler_and_ends_as_it_did(capsys):
    codes = []

    def work():
        with contextlib.suppress(typer.Exit), saying_how_to_go_on("Again."):
            codes.append(0)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert codes == [0]


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (diagnose, ["diagnose", "net.py"]),
        (diagnose, ["diagnose", "--forward", "net.py"]),
        (diagnose, ["diagnose", "--would-fit", "fp16", "net.py"]),
        (diagnose, ["diagnose", "--", "python", "net.py"]),
        (rescue, ["rescue", "net.py"]),
        (replay, ["replay", "bundle"]),
        (validate, ["validate", "net.py"]),
        (train, ["train", "net.py"]),
        (manifest, ["manifest", "--", "python", "net.py"]),
        (fold, ["fold", "model", "--tokens", "ids.json", "--out", "folded"]),
        (fit, ["fit", "models", "--tokens", "ids.json"]),
        (parity, ["parity", "a.py", "b.py"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_every_long_command_has_a_word(module, words, monkeypatch, tmp_path):
    said = []

    @contextlib.contextmanager
    def hear(text):
        said.append(text)
        raise typer.Exit(7)
        yield

    for folder in ("model", "models"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "saying_how_to_go_on", hear)
    assert CliRunner().invoke(app, words).exit_code == 7
    assert len(said) == 1 and said[0].strip()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_without_a_word_of_its_own_has_one(number, code):
    done = CliRunner().invoke(typer_of(lambda: signal.raise_signal(number)), ["work"])
    assert done.exit_code == code
    assert "The same command begins again" in done.stderr


def typer_of(command):
    """An app of one command, made as floatline's own are."""
    own = typer.Typer(cls=AllCommands)
    own.callback()(lambda: None)
    own.command("work")(command)
    return own


def test_the_word_of_a_command_itself_is_the_only_one():
    def command():
        with saying_how_to_go_on("Go on with --resume."):
            signal.raise_signal(signal.SIGINT)

    assert CliRunner().invoke(typer_of(command), ["work"]).stderr == "floatline: interrupted. Go on with --resume.\n"


def test_every_command_ends_with_a_word():
    assert app.info.cls is AllCommands


def test_ctrl_c_while_the_commands_are_imported_is_one_line(monkeypatch, capsys):
    class Interrupted:
        def find_spec(self, name, path=None, target=None):
            if name == "floatline.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "floatline.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as left:
        __main__.main()
    assert left.value.code == 130
    assert capsys.readouterr().err == "floatline: interrupted. The same command begins again.\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a fork")
def test_a_fork_is_ended_without_a_word(capfd):
    with saying_how_to_go_on("Again."):
        child = os.fork()
        if not child:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert capfd.readouterr().err == ""


def test_a_command_that_has_none_would_be_found():
    assert not hasattr(explain, "saying_how_to_go_on")


@pytest.mark.parametrize(("code", "says"), [(130, "interrupted"), (143, "ended by SIGTERM"), (139, "")])
def test_a_script_that_was_ended_before_anything_was_seen_says_how_to_go_on(code, says, monkeypatch):
    ended = ScriptDiagnosis("train.py", "", (), 1.0, exit_code=code, no_verdict="the script was ended")
    monkeypatch.setattr(diagnose, "_diagnose_command", lambda *_, **__: ended)
    done = CliRunner().invoke(app, ["diagnose", "--", "python", "train.py"])
    assert done.exit_code == 2
    assert done.stderr == (f"floatline: {says}. Nothing is kept: the same command begins again.\n" if says else "")


def test_a_script_that_was_ended_after_its_cause_was_seen_is_told_that_alone(monkeypatch):
    found = Finding(find_cause("eps-underflow"), "seen", "fix")
    ended = ScriptDiagnosis("train.py", "", (found,), 1.0, exit_code=130, no_verdict="the script was ended")
    monkeypatch.setattr(diagnose, "_diagnose_command", lambda *_, **__: ended)
    done = CliRunner().invoke(app, ["diagnose", "--", "python", "train.py"])
    assert done.exit_code == 130 and done.stderr == ""
    assert done.stdout.startswith("eps-underflow")


@pytest.mark.parametrize(("code", "says"), [(130, "interrupted"), (143, "ended by SIGTERM"), (1, "")])
def test_a_script_that_is_run_and_ended_says_how_to_go_on_and_keeps_its_exit_code(code, says, monkeypatch):
    monkeypatch.setattr(command, "run_to_end", lambda *_, **__: code)
    done = CliRunner().invoke(app, ["run", "--plan", "bf16-mixed", "--", sys.executable, __file__])
    words = "What the script saved is its own; the same command runs it again."
    assert done.exit_code == code
    assert done.stderr == (f"floatline: {says}. {words}\n" if says else "")
