"""Ctrl-C that falls into a finalizer, or into libcst, is heard; without floatline Python or libcst drops it."""

import os
import signal
import subprocess
import sys
import time

import libcst as cst
import pytest
from libcst.metadata import MetadataWrapper, PositionProvider
from tests.preloaded import COMMAND
from tests.slow import slow

from floatline.cli.main import hear_interrupts, main
from floatline.fixes.scope import find_positions

needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGINT to a process")

TARGET = """
import time
from pathlib import Path

class Slow:
    def __del__(self):
        Path("finalizing").touch()
        time.sleep(250)

def build(seed=0):
    Slow()
    Path("beyond").touch()
    time.sleep(float(Path("patience").read_text()))
    raise RuntimeError("nobody ended it")
"""


def press(folder, command, *, patience):
    """What is left of `floatline rescue` when Ctrl-C comes inside of a finalizer; it ends by itself after a while."""
    (folder / "patience").write_text(str(patience))
    (folder / "target.py").write_text(TARGET, encoding="utf-8")
    words = [sys.executable, "-c", command, "rescue", "target.py", "--folder", "out"]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not (folder / "finalizing").exists():
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGINT)
        said, complained = process.communicate(timeout=250)
    assert (folder / "beyond").exists()  # the finalizer swallowed the first one
    return process.returncode, said, complained


@slow
@needs_signals
def test_ctrl_c_in_a_finalizer_ends_the_command(tmp_path):
    code, said, complained = press(tmp_path, COMMAND, patience=240)
    assert (code, said) == (130, "")
    assert complained.splitlines() == [
        "floatline: running the target as it is",
        "floatline: interrupted. What is finished is kept: the same command goes on.",
    ]


@slow
@needs_signals
def test_without_the_hook_python_drops_it(tmp_path):
    deaf = "import floatline.cli.main as m; m.hear_interrupts = lambda: None; m.main()"
    code, _, complained = press(tmp_path, deaf, patience=3)
    assert code == 2
    assert "nobody ended it" in complained


NUMPY = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.3)  # it comes here
    is_whole = True
except KeyboardInterrupt:
    is_whole = False  # as torch, which goes on with what is there
"""
IMPORTING = """
import sys, time
sys.path.insert(0, ".")
from floatline.cli.main import hear_interrupts
{hear}
try:
    import numpy
    time.sleep({patience})
    print("dropped", numpy.is_whole)
except KeyboardInterrupt:
    print("heard", numpy.is_whole)
"""


@needs_signals
@pytest.mark.parametrize(
    ("hear", "patience", "said"), [("hear_interrupts()", 240, "heard True"), ("", 0, "dropped False")]
)
def test_ctrl_c_waits_until_numpy_is_imported(hear, patience, said, tmp_path):
    (tmp_path / "numpy.py").write_text(NUMPY, encoding="utf-8")
    words = [sys.executable, "-c", IMPORTING.format(hear=hear, patience=patience)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.stdout == f"{said}\n", done.stderr


@pytest.fixture
def wrapper(monkeypatch):
    """A file, and Ctrl-C while libcst is inside of its second function."""

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cst.Pass, "_codegen_impl", interrupt)
    return MetadataWrapper(cst.parse_module("def f():\n    return 1\n\ndef g():\n    pass\n"))


def test_ctrl_c_while_a_file_is_read_comes_through(wrapper):
    with pytest.raises(KeyboardInterrupt):
        find_positions(wrapper)


def test_libcst_raises_a_key_error_over_it(wrapper):
    with pytest.raises(KeyError):
        wrapper.resolve(PositionProvider)


def test_a_command_leaves_ctrl_c_as_it_was(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["floatline", "--version"])
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.startswith("floatline ") and signal.getsignal(signal.SIGINT) is before
    hear_interrupts()
    assert signal.getsignal(signal.SIGINT) is not before  # in the meantime
    signal.signal(signal.SIGINT, before)


def test_a_file_that_nobody_interrupts_has_its_positions():
    module = MetadataWrapper(cst.parse_module("x = 1\n"))
    assert any(isinstance(node, cst.Assign) for node in find_positions(module))
