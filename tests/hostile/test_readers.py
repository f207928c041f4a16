"""Mutated artefacts: every reader gives a result or one clear line, runs nothing, and stays in its folder."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.hostile import trying
from tests.hostile.artefacts import READERS, Reader
from tests.hostile.trying import Watch, change, complaint, lay_out

from floatline.errors import FloatlineError

NAMES = sorted(READERS)
# The first of Random(seed) decides much, so seeds must not be near each other.
SEEDS = st.integers(0, 2**64 - 1)


@pytest.fixture(scope="module")
def watch():
    return Watch()


@pytest.fixture(scope="module", params=NAMES)
def made(request, tmp_path_factory):
    """A reader, a valid artefact of it, and a folder to put others into."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "made").mkdir()
    reader = READERS[request.param]
    return reader, reader.make(folder / "made"), folder / "try"


def test_a_valid_artefact_is_read(made):
    reader, parts, folder = made
    lay_out(reader, parts, folder)
    reader.read(folder)


@settings(max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(seed=SEEDS)
def test_a_mutated_artefact_gives_a_result_or_one_line(made, watch, seed):
    reader, parts, folder = made
    random = Random(seed)
    for _ in range(random.choice((1, 1, 3))):
        parts = change(parts, random, reader.tokens)
    lay_out(reader, parts, folder, random)
    with watch.over(folder):
        said = complaint(reader, folder)
    assert said == ""
    assert watch.seen == []


def test_a_file_that_is_cut_off_gives_a_result_or_one_line(made, watch):
    reader, parts, folder = made
    lay_out(reader, parts, folder)
    files = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    # One file of many is like another.
    for path, data in list(files.items())[:6]:
        for size in {0, 1, len(data) // 3, len(data) - 1}:
            lay_out(reader, parts, folder)
            path.write_bytes(data[:size])
            with watch.over(folder):
                assert complaint(reader, folder) == ""
            assert watch.seen == []


def _reader(read) -> Reader:
    return Reader("made up", lambda _: {"a": b""}, read, ())


def _raise(error):
    raise error


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda _: _raise(KeyError("x")), "KeyError"),
        (lambda _: _raise(MemoryError()), "MemoryError"),
        (lambda _: _raise(FloatlineError("one\ntwo")), "not one line"),
        (lambda _: _raise(FloatlineError("")), "not one line"),
        (lambda _: _raise(FloatlineError("x" * 4000)), "4,000 characters"),
    ],
)
def test_what_is_wrong_would_be_seen(tmp_path, read, said):
    assert said in complaint(_reader(read), tmp_path)


def test_what_hangs_would_be_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(trying, "SECONDS", 0.05)

    def wait(_: Path) -> None:
        while True:
            pass

    assert complaint(_reader(wait), tmp_path).startswith("TooSlow")


def test_what_leaves_the_folder_or_runs_code_would_be_seen(tmp_path, watch):
    import os
    import pickle
    import subprocess
    import sys

    inner, outer = tmp_path / "inner", tmp_path / "outer.txt"
    inner.mkdir()
    outer.write_text("x")
    (inner / "own.txt").write_text("x")

    def heard(act) -> bool:
        with watch.over(inner):
            act()
        return bool(watch.seen)

    assert heard(lambda: outer.read_text())
    assert heard(lambda: (inner / ".." / "outer.txt").read_text())
    assert heard(lambda: (tmp_path / "new.txt").write_text("x"))
    assert heard(lambda: (tmp_path / "new.txt").unlink())
    assert heard(lambda: eval("1 + 1"))
    assert heard(lambda: exec("pass"))
    assert heard(lambda: os.system("true"))
    assert heard(lambda: subprocess.run([sys.executable, "-c", ""]))
    assert heard(lambda: pickle.loads(pickle.dumps(Path)))
    assert not heard(lambda: (inner / "own.txt").read_text())
    assert not heard(lambda: (inner / "own.txt").write_text("y"))
