"""KeptWrites: a script that is tried reads back what it wrote, and none of its own files changes."""
# ruff: noqa: PTH104, PTH105, PTH107, PTH123
# Scripts call open and os themselves.

import errno
import multiprocessing
import os
import shutil
import tempfile
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


def write_again_what_was_removed(folder):
    for name in ("a", "b"):
        (folder / name).write_text("old\n")
    (folder / "a").unlink()
    (folder / "a").write_text("new\n")
    return (folder / "a").read_text(), "new\n"


def write_again_what_was_renamed(folder):
    for name in ("a", "b"):
        (folder / name).write_text(f"{name}\n")
    os.replace(folder / "a", folder / "b")
    (folder / "c").write_text("c\n")
    return (folder / "b").read_text() + (folder / "c").read_text(), "a\nc\n"


def replace_by_a_temporary_file(folder):
    number, name = tempfile.mkstemp(dir=folder)
    with os.fdopen(number, "w") as file:
        file.write("new\n")
    os.replace(name, folder / "log.txt")
    return (folder / "log.txt").read_text(), "new\n"


def replace_by_a_file_of_a_cache(folder):
    with tempfile.TemporaryDirectory(prefix=".hidden-") as cache:
        Path(cache, "log.txt").write_text("new\n")
        os.replace(Path(cache, "log.txt"), folder / "log.txt")
    return (folder / "log.txt").read_text(), "new\n"


def rename_a_new_file_to_a_new_name(folder):
    os.close(os.open(folder / "lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    os.rename(folder / "lock", folder / "lock.1")
    return (folder / "lock.1").open().read(), ""


WAYS = [
    write_by_open, append_by_open, write_by_pathlib, save_by_torch, save_by_torch_to_an_open_file, save_by_safetensors,
    replace_whole, write_again_what_was_removed, write_again_what_was_renamed, replace_by_a_temporary_file,
    replace_by_a_file_of_a_cache, rename_a_new_file_to_a_new_name, remove_what_was_written,
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
        (folder / ".cache" / "kernel.new").write_text("compiled")
        (folder / ".cache" / "kernel.new").rename(folder / ".cache" / "kernel")
    assert (folder / ".cache" / "kernel").read_text() == "compiled" and not writes.refused


def test_files_of_a_project_that_lies_in_a_hidden_folder_are_kept(tmp_path, monkeypatch):
    project = tmp_path / ".worktrees" / "project"
    project.mkdir(parents=True)
    (project / "log.txt").write_text("old\n")
    (tmp_path / "apart").mkdir()
    monkeypatch.chdir(project)
    writes = KeptWrites(tmp_path / "apart")
    with writes.kept():
        Path("log.txt").write_text("new\n")
    assert (project / "log.txt").read_text() == "old\n"


def test_a_folder_that_the_script_made_can_be_renamed_and_removed_with_what_was_written_there(place):
    folder, writes = place
    with writes.kept():
        (folder / "new").mkdir()
        (folder / "new" / "last.pt").write_text("weights")
        (folder / "new").rename(folder / "checkpoint")
        assert (folder / "checkpoint" / "last.pt").read_text() == "weights"
        shutil.rmtree(folder / "checkpoint")
        with pytest.raises(FileNotFoundError):
            (folder / "checkpoint" / "last.pt").read_text()
    assert not writes.refused and sorted(path.name for path in folder.iterdir()) == ["last.pt", "log.txt"]


def test_a_new_folder_does_not_take_the_place_of_one_that_is_there(place):
    folder, writes = place
    (folder / "checkpoint").mkdir()
    with writes.kept():
        (folder / "new").mkdir()
        with pytest.raises(PermissionError, match="would be replaced"):
            (folder / "new").rename(folder / "checkpoint")
    assert len(writes.refused) == 1


def test_a_folder_of_temporary_files_is_removed_though_one_has_the_name_of_a_file_of_the_script(place, monkeypatch):
    folder, writes = place
    monkeypatch.chdir(folder)
    with writes.kept(), tempfile.TemporaryDirectory(prefix=".hidden-") as cache:
        Path(cache, "log.txt").write_text("temporary")
    assert not writes.refused and not Path(cache).exists() and (folder / "log.txt").read_text() == "old\n"


def test_a_file_that_is_not_there_is_missed_as_without_a_trial(place):
    folder, writes = place
    with writes.kept():
        with pytest.raises(FileNotFoundError):
            os.rename(folder / "none", folder / "log.txt")
        assert (folder / "log.txt").read_text() == "old\n"
    assert not writes.refused


def test_a_file_is_renamed_from_one_disk_to_another(place):
    folder, writes = place
    rename = os.rename

    def rename_on_one_disk(source, target):
        if Path(source).parent == folder:
            raise OSError(errno.EXDEV, "another disk")
        rename(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", rename_on_one_disk)
        with writes.kept():
            found, expected = rename_a_new_file_to_a_new_name(folder)
    assert found == expected and not (folder / "lock").exists()


@pytest.mark.parametrize("way", ["spawn", "forkserver"])
def test_a_process_that_would_write_by_itself_is_not_started(way, place):
    _, writes = place
    process = multiprocessing.get_context(way).Process(target=print)
    with writes.kept(), pytest.raises(PermissionError, match=f"started by {way}"):
        process.start()
    assert writes.refused == [f"what a process started by {way} writes cannot be kept apart"]


def test_a_fork_writes_apart_as_the_script_does(place):
    folder, writes = place
    before = bytes_of(folder)
    with writes.kept():
        forks = [multiprocessing.get_context("fork").Process(target=write_by_open, args=(folder,)) for _ in range(2)]
        for fork in forks:
            fork.start()
        for fork in forks:
            fork.join()
    assert [fork.exitcode for fork in forks] == [0, 0] and bytes_of(folder) == before
