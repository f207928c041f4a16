"""Links, pipes and paths in untrusted folders: nothing outside is read, written, deleted or run, and nothing waits."""

import json
import os
from pathlib import Path

import pytest
import torch
from tests.hostile.artefacts import READERS, RESCUE, inside, make_bundle, pack_bundle
from tests.hostile.trying import Watch, complaint, lay_out

from floatline.errors import ApprovalError, GuardError, LedgerError, ReplayError, RescueError
from floatline.guard.checkpoints.rank_files import _find
from floatline.guard.checkpoints.run_files import load_checkpoint, prune_checkpoints, save_checkpoint
from floatline.guard.policy import DEFAULT
from floatline.ledger.folder_lock import FolderLock
from floatline.plans.presets import PLANS
from floatline.probe.bundles.bundle import open_target, read_bundle
from floatline.report.document.html import put_in_place
from floatline.rescuing.finished_stages import Kept
from floatline.training.settings import save_settings
from floatline.validation.signoff.records import ISSUES, append_issue
from floatline.validation.study.store import Store
from floatline.validation.verdict.pairs import ArmRun

TENSORS = {"w": torch.ones(3)}


@pytest.fixture
def outside(tmp_path):
    """A folder of the user's, with a file and a folder that must stay."""
    folder = tmp_path / "outside"
    (folder / "photos").mkdir(parents=True)
    (folder / "photos" / "one.jpg").write_text("x")
    (folder / "notes.txt").write_text("mine")
    return folder


def is_untouched(outside: Path) -> bool:
    names = sorted(path.relative_to(outside).as_posix() for path in outside.rglob("*"))
    return names == ["notes.txt", "photos", "photos/one.jpg"] and (outside / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", sorted(READERS))
def test_a_pipe_a_folder_or_an_endless_device_in_place_of_a_file_is_not_waited_for(tmp_path, name):
    reader = READERS[name]
    (tmp_path / "made").mkdir()
    parts = reader.make(tmp_path / "made")
    lay_out(reader, parts, tmp_path / "try")
    files = [path for path in sorted((tmp_path / "try").rglob("*")) if path.is_file()]
    # A log comes through a pipe, and what lint looks at is chosen by its caller.
    named_by_the_user = {"log.txt", "train.py", "ds_config.json", "trainer.yaml", "settings.toml", "baseline.json"}
    for path in [path for path in files if path.name not in named_by_the_user][:6]:
        for put in (os.mkfifo, os.mkdir, lambda place: place.symlink_to("/dev/zero"), os.remove):
            lay_out(reader, parts, tmp_path / "try")
            if put is not os.remove:
                path.unlink()
            put(path)
            assert complaint(reader, tmp_path / "try") == "", path.name


def test_saving_does_not_empty_the_folder_that_a_link_leads_to(tmp_path, outside):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".saving").symlink_to(outside)
    with pytest.raises(GuardError, match=r"\.saving is a link. Delete it"):
        save_checkpoint(tmp_path / "run", 1, TENSORS, {})
    (tmp_path / "run" / ".saving").unlink()
    for number in (1, 2):
        save_checkpoint(tmp_path / "run", number, TENSORS, {})
    (tmp_path / "run" / ".saving" / "lock").unlink()
    (tmp_path / "run" / ".saving").rmdir()
    (tmp_path / "run" / ".saving").symlink_to(outside)
    with pytest.raises(GuardError, match=r"\.saving is a link"):
        prune_checkpoints(tmp_path / "run", 1)
    assert is_untouched(outside)


def test_what_is_left_over_in_the_folder_itself_is_removed(tmp_path):
    """The twin: without a link, the same call does delete."""
    (tmp_path / ".saving" / "photos").mkdir(parents=True)
    save_checkpoint(tmp_path, 1, TENSORS, {})
    assert not (tmp_path / ".saving" / "photos").exists()


def test_a_rescue_does_not_empty_the_folder_that_its_stages_lead_to(tmp_path, outside):
    folder = tmp_path / "rescue"
    folder.mkdir()
    (folder / "rescue.json").write_text("{}")
    (folder / "stages").symlink_to(outside)
    with pytest.raises(RescueError, match="stages' is a link"):
        Kept(folder, asked=RESCUE, prove=False)
    assert is_untouched(outside)


@pytest.mark.parametrize("name", ["plan.yaml", "fix.patch", "rescue.json", "report.html", "stages/trials.json"])
def test_a_rescue_writes_through_no_link(tmp_path, outside, name):
    folder = tmp_path / "rescue"
    Kept(folder, asked=RESCUE, prove=False).close()
    (folder / name).symlink_to(outside / "notes.txt")
    with pytest.raises(RescueError, match="is a link"):
        Kept(folder, asked=RESCUE, prove=False)
    (folder / name).unlink()
    Kept(folder, asked=RESCUE, prove=False).close()
    assert is_untouched(outside)


@pytest.mark.parametrize("name", ["plan.yaml", "policy.json", "config.yaml"])
def test_a_run_writes_its_settings_through_no_link(tmp_path, outside, name):
    settings = (PLANS["fp16-mixed"], DEFAULT, {"x": 1})
    (tmp_path / name).symlink_to(outside / "notes.txt")
    with pytest.raises(GuardError, match="is a link"):
        save_settings(tmp_path, *settings)
    (tmp_path / name).unlink()
    save_settings(tmp_path, *settings)
    assert is_untouched(outside)


def test_a_page_replaces_a_link(tmp_path, outside):
    (tmp_path / "run.html").symlink_to(outside / "notes.txt")
    put_in_place(tmp_path / "run.html", "page")
    assert is_untouched(outside)
    assert (tmp_path / "run.html").read_text() == "page" and not (tmp_path / "run.html").is_symlink()


def test_a_lock_is_not_written_through_a_link(tmp_path, outside):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ledger.lock").symlink_to(outside / "notes.txt")
    with pytest.raises(LedgerError, match="cannot be locked"):
        FolderLock(tmp_path / "run")
    assert is_untouched(outside)
    (tmp_path / "run" / "ledger.lock").unlink()
    FolderLock(tmp_path / "run").release()
    assert (tmp_path / "run" / "ledger.lock").read_text().startswith("process ")


def test_the_issue_log_is_not_written_through_a_link(tmp_path, outside):
    (tmp_path / ISSUES).symlink_to(outside / "new.md")
    with pytest.raises(ApprovalError, match="cannot be written"):
        append_issue(tmp_path, "x", {})
    assert is_untouched(outside)


@pytest.mark.parametrize("arm", ["../../escaped", "/tmp/escaped", "..", ".", "a/../../b", "a\x00b", "con/", "%2e%2e"])
def test_the_name_of_an_arm_is_no_path(tmp_path, arm):
    watch = Watch()
    folder = tmp_path / "study"
    folder.mkdir()
    with Store(folder, asked={}) as store, watch.over(folder):
        store.add(ArmRun(arm, 0, 1.0))
    assert watch.seen == []
    with Store(tmp_path / "other", asked={}) as store:
        assert list(store.runs()) == []
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("study", "other")] == []
    assert len(list((folder / "runs").rglob("0.json"))) == 1


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "state.safetensors/../../x", "more.safetensors"]
)
def test_a_bundle_names_no_file_but_its_own(tmp_path, name):
    (tmp_path / "made").mkdir()
    parts = make_bundle(tmp_path / "made")
    fields = json.loads(parts["bundle/bundle.json"])
    fields["files"][name] = fields["files"]["state.safetensors"]
    (tmp_path / "bundle").mkdir()
    for part, data in parts.items():
        (tmp_path / part).write_bytes(data)
    (tmp_path / "bundle" / "bundle.json").write_text(json.dumps(fields))
    with pytest.raises(ReplayError, match="it names a file"):
        read_bundle(tmp_path / "bundle")


@pytest.mark.parametrize("name", ["bundle.json", "state.safetensors"])
def test_a_bundle_is_not_read_through_a_link(tmp_path, name):
    (tmp_path / "made").mkdir()
    lay_out(READERS["bundle"], make_bundle(tmp_path / "made"), tmp_path / "try")
    path = tmp_path / "try" / "bundle" / name
    path.rename(tmp_path / name)
    path.symlink_to(tmp_path / name)
    with pytest.raises(ReplayError, match="is no replay bundle|is missing"):
        read_bundle(path.parent)
    path.unlink()
    (tmp_path / name).rename(path)
    read_bundle(path.parent)


@pytest.mark.parametrize(
    "text",
    ["{bundle}/evil.py", "bundle/evil.py:build", "bundle.evil", "bundle.evil:build", "bundle:build", "link/evil.py"],
)
def test_code_in_a_bundle_is_not_run(tmp_path, text):
    (tmp_path / "made").mkdir()
    parts = make_bundle(tmp_path / "made")
    fields = json.loads(parts["bundle/bundle.json"])
    fields["origin"]["target"] = text.format(bundle=tmp_path / "bundle")
    pack_bundle({**parts, "bundle/bundle.json": json.dumps(fields).encode()}, tmp_path)
    for name in ("evil.py", "__init__.py"):
        (tmp_path / "bundle" / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef build(): pass\n")
    (tmp_path / "link").symlink_to(tmp_path / "bundle")
    with inside(tmp_path), pytest.raises(ReplayError, match="lies in the bundle itself"):
        open_target(read_bundle(tmp_path / "bundle"))
    assert not (tmp_path / "ran").exists()
    with inside(tmp_path):  # the twin: what is named by the user is run
        open_target(read_bundle(tmp_path / "bundle"), str(tmp_path / "bundle" / "evil.py"))
    assert (tmp_path / "ran").exists()


def test_a_bundle_whose_target_lies_elsewhere_is_opened(tmp_path):
    (tmp_path / "made").mkdir()
    pack_bundle(make_bundle(tmp_path / "made"), tmp_path)
    assert open_target(read_bundle(tmp_path / "bundle")).builder is not None


def test_a_folder_that_is_called_like_a_checkpoint_is_none(tmp_path):
    (tmp_path / "checkpoint-x").mkdir()
    assert _find(tmp_path, 3) == tmp_path
    path = save_checkpoint(tmp_path, 3, TENSORS, {})
    assert _find(tmp_path, 3) == path
    assert load_checkpoint(path)[1] == {}
