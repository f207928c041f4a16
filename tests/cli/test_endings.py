"""Ctrl-C and SIGTERM leave a word on how to go on."""

import contextlib
import signal
import threading

import pytest
import typer
from typer.testing import CliRunner

from floatline.cli import diagnose, explain, fit, fold, manifest, parity, replay, rescue, train, validate
from floatline.cli.endings import saying_how_to_go_on
from floatline.cli.main import app


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


def test_a_command_that_has_none_would_be_found():
    assert not hasattr(explain, "saying_how_to_go_on")
