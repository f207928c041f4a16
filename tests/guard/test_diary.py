"""The diary: a ledger that cannot be written for a while loses no step, and a checkpoint holds none that it lacks."""

import errno
import functools
import math

import pytest
import torch

import floatline as fl
from floatline.errors import LedgerError
from floatline.findings import GuardStop
from floatline.ledger.parts import PartWriter


@pytest.fixture
def disk(monkeypatch):
    """A disk that is full while `disk.append(True)` holds."""
    full = []
    drain = PartWriter.drain

    def drain_if_room(self):
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        drain(self)

    monkeypatch.setattr(PartWriter, "drain", drain_if_room)
    return full


@pytest.fixture
def lazy_ledger(monkeypatch):
    """A ledger that writes nothing by itself for an hour."""
    create = functools.partial(fl.Ledger.create, flush_seconds=3600.0)
    monkeypatch.setattr("floatline.guard.diary.Ledger.create", create)


def make_guard(folder):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    return fl.Guard(model, fl.optim.AdamW(model.parameters(), lr=1e-2), plan="fp32", folder=folder)


def step(guard, factor=1.0):
    return guard.step(lambda x: guard.model(x).square().mean() * factor, torch.randn(8, 4))


def test_a_step_that_a_full_disk_refused_is_in_the_ledger_once_there_is_room(tmp_path, disk):
    guard = make_guard(tmp_path)
    step(guard)
    disk.append(True)
    with pytest.raises(LedgerError, match="No space left"):
        guard.ledger.flush()
    refused = 0
    for _ in range(3):  # made, and told that the ledger does not have them
        before = guard.model.weight.clone()
        with pytest.raises(LedgerError, match="make room"):
            step(guard)
        refused += int(not torch.equal(before, guard.model.weight))
    disk.clear()
    guard.ledger.flush()
    step(guard, math.nan)
    guard.close()
    history = fl.Ledger.read(tmp_path)
    assert refused == 3
    assert history.attempt == [1, 2, 3, 4, 5]
    assert history.reason == [None] * 4 + ["forward-nonfinite"]


def test_what_waits_is_written_when_the_guard_closes(tmp_path, disk):
    guard = make_guard(tmp_path)
    disk.append(True)
    step(guard)
    with pytest.raises(LedgerError):
        guard.ledger.flush()
    with pytest.raises(LedgerError):
        step(guard)
    disk.clear()
    guard.close()
    assert fl.Ledger.read(tmp_path).attempt == [1, 2]


def test_a_disk_that_stays_full_is_told_when_the_guard_closes(tmp_path, disk):
    guard = make_guard(tmp_path)
    disk.append(True)
    step(guard)
    with pytest.raises(LedgerError, match="not on the disk"):
        guard.close()


def test_a_checkpoint_holds_no_step_that_the_ledger_lacks(tmp_path, lazy_ledger):
    guard = make_guard(tmp_path)
    for _ in range(3):
        step(guard)
    assert fl.Ledger.read(tmp_path).attempt == []  # so that what follows can fail
    guard.save(tmp_path / "checkpoints")
    assert fl.Ledger.read(tmp_path).attempt == [1, 2, 3]
    guard.close()


def test_a_checkpoint_is_written_although_the_ledger_cannot_be(tmp_path, disk):
    guard = make_guard(tmp_path)
    step(guard)
    disk.append(True)
    with pytest.raises(LedgerError, match="No space left"):
        guard.save(tmp_path / "checkpoints")
    again = make_guard(None)
    again.load(tmp_path / "checkpoints")
    assert torch.equal(again.model.weight, guard.model.weight)
    disk.clear()
    guard.close()


def test_a_stop_is_heard_although_the_ledger_cannot_be_written(tmp_path, disk):
    guard = make_guard(tmp_path)
    step(guard)
    disk.append(True)
    guard.model.weight.data[0, 0] = math.nan
    with pytest.raises(GuardStop, match=r"(?s)weights.*No space left"):
        step(guard)
    disk.clear()
    guard.close()
