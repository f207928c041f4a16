"""KeptWrites: a script that is tried reads back what it wrote, and none of its own files changes."""
# ruff: noqa: PTH104, PTH105, PTH107, PTH123
# Scripts call open and os themselves.

import os
import shutil
from pathlib import Path

import pytest
import torch

from floatline.probe.scripts.kept_writes import KeptWrites


@pytest.fixture
def place(tmp_path):
    """A folder with the files of an earlier run, and where writes go."""
    (tmp_path / "apart").mkdir()
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "log.txt").write_text("old\n")
    torch.save({"step": 1}, folder / "last.pt")
    return folder, KeptWrites(tmp_path / "apart")


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_by_open(folder):
    with open(folder / "log.txt", "w") as file:
        file.write("new\n")
    return (folder / "log.txt").read_text(), "new\n"


def append_by_open(folder):
    with open(str(folder / "log.txt"), "a") as file:
        file.write("new\n")
    return open(folder / "log.txt").read(), "old\nnew\n"


def write_by_pathlib(folder):
    (folder / "fresh.txt").write_text("new\n")
    return (folder / "fresh.txt").read_text(), "new\n"


def save_by_torch(folder):
    torch.save({"step": 2}, folder / "last.pt")
    return torch.load(folder / "last.pt"), {"step": 2}


def save_by_torch_to_an_open_file(folder):
    with open(folder / "last.pt", "wb") as file:
        torch.save({"step": 2}, file)
    return torch.load(f=str(folder / "last.pt")), {"step": 2}


def save_by_safetensors(folder):
    from safetensors.torch import load_file, save_file

    save_file({"x": torch.ones(2)}, folder / "last.safetensors")
    return load_file(folder / "last.safetensors")["x"].tolist(), [1.0, 1.0]


def replace_whole(folder):
    (folder / "log.new").write_text("new\n")
    os.replace(folder / "log.new", folder / "log.txt")
    return (folder / "log.txt").read_text(), "new\n"


def remove_what_was_written(folder):
    (folder / "lock").write_text("")
    (folder / "lock").unlink()
    return (folder / "lock").exists(), False


WAYS = [
    write_by_open, append_by_open, write_by_pathlib, save_by_torch, save_by_torch_to_an_open_file, save_by_safetensors,
    replace_whole, remove_what_was_written,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_is_written_comes_back_and_no_file_changes(way, place):
    folder, writes = place
    before = bytes_of(folder)
    with writes.kept():
        found, expected = way(folder)
    assert found == expected and not writes.refused
    assert bytes_of(folder) == before


@pytest.mark.parametrize("way", WAYS[:-1], ids=lambda way: way.__name__)
def test_without_it_each_of_them_changes_a_file(way, place):
    folder, _ = place
    before = bytes_of(folder)
    way(folder)
    assert bytes_of(folder) != before


@pytest.mark.parametrize(
    "way",
    [
        lambda folder: os.remove(folder / "log.txt"),
        lambda folder: os.rename(folder / "log.txt", folder / "log.1"),
        lambda folder: shutil.rmtree(folder),
        lambda folder: os.open(folder / "log.txt", os.O_WRONLY | os.O_TRUNC),
    ],
    ids=["remove", "rename", "rmtree", "os.open"],
)
def test_what_cannot_be_kept_apart_is_refused_and_named(way, place):
    folder, writes = place
    before = bytes_of(folder)
    with writes.kept(), pytest.raises(PermissionError, match="floatline tries a fix"):
        way(folder)
    assert len(writes.refused) == 1 and str(folder) in writes.refused[0]
    assert bytes_of(folder) == before


def test_new_folders_and_caches_are_let_through(place):
    folder, writes = place
    with writes.kept():
        (folder / "more").mkdir()
        (folder / ".cache").mkdir()
        (folder / ".cache" / "kernel").write_text("compiled")
    assert (folder / ".cache" / "kernel").read_text() == "compiled" and not writes.refused
