"""Faults of the disk: checkpoints that are damaged, a ledger that is torn, and no room."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from campaign.disks import no_room
from campaign.judge import BrokenError, Verdict, check_ledger, check_row, check_same
from campaign.numbers import Ranks, References
from campaign.plan import LONG, SAVE_EVERY, STEPS, Fault
from campaign.trial import Trial, run_steps
from floatline.errors import FloatlineError, GuardError, LedgerError
from floatline.guard.checkpoints.run_files import list_checkpoints

FILES = {"tensors": "tensors.safetensors", "state": "state.json"}


def save_now_and_then(trial: Trial) -> None:
    """A checkpoint every third step."""
    if trial.place % SAVE_EVERY == 0:
        trial.save()


def damage(path: Path, how: str, where: float, older: Path) -> None:
    """Damage one file.

    Args:
        path: The file.
        how: One of DAMAGES.
        where: From 0 to 1, for what is hit at random.
        older: The same file of the checkpoint before.
    """
    data = bytearray(path.read_bytes())
    size = len(data)
    spans = {"length": (0, 8), "header": (8, min(200, size)), "middle": (0, size), "last": (size - 1, size)}
    if how.startswith("flip"):
        low, high = spans[how.split()[1]]
        bits = 8 * (high - low)
        data[low + int(where * bits) // 8] ^= 1 << int(where * bits) % 8
    elif how.startswith("cut"):
        ends = {
            "cut to 0": 0,
            "cut header": int(1 + where * 100),
            "cut middle": int(where * size),
            "cut last": size - 1,
        }
        data = data[: ends[how]]
    elif how == "append":
        data += b"\0" * int(1 + where * 100)
    elif how == "zeros":
        start = int(where * size) // 512 * 512
        data[start : start + 512] = b"\0" * len(data[start : start + 512])
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "older":
        shutil.copyfile(older, path)
    elif how != "delete":
        path.write_bytes(data)


def try_damage(fault: Fault, ranks: Ranks, references: References, folder: Path) -> Verdict:
    """The newest checkpoint is damaged: it is refused, or loads with every bit, and the one before it goes on."""
    expected = references.clean(fault.setting, STEPS)
    trial = Trial(fault.setting, rank=ranks.rank, folder=folder)
    run_steps(trial, 2 * SAVE_EVERY, save_now_and_then)
    trial.guard.close()
    own = trial.checkpoints if ranks.world == 1 else trial.checkpoints / f"rank-{ranks.rank:05d}"
    older, newest = list_checkpoints(own)[-2:]
    if ranks.rank == fault.rank:
        name = FILES[fault.details["file"]]
        damage(newest / name, fault.details["how"], fault.details["where"], older / name)
    ranks.gather(None)  # the damage is done before anyone reads
    again = Trial(fault.setting, rank=ranks.rank, folder=folder, resume=True)
    again.seen = trial.seen
    refused, lost = _try_load(again), 0
    if len({bool(words) for words in ranks.gather(refused)}) > 1:
        raise BrokenError("lost", "some processes have loaded the checkpoint, and some have not")
    if refused:
        _check_words(refused, older, by=ranks.rank == fault.rank)
        if ranks.rank == fault.rank:
            shutil.rmtree(newest)
        ranks.gather(None)
        again.load()
    lost = 2 * SAVE_EVERY - again.place
    run_steps(again, STEPS)
    again.guard.close()
    check_row([seen.weights for seen in again.seen[2 * SAVE_EVERY + lost :]], expected.weights[2 * SAVE_EVERY :])
    check_same(again.digests(), expected.digests, "at the end")
    witnesses = ranks.gather(again.seen)
    if ranks.rank == 0:
        check_ledger(folder, witnesses)
    return Verdict("survived", lost, refused or "harmless: it loads with every bit")


def _try_load(trial: Trial) -> str:
    """The refusal; '' where it was loaded."""
    try:
        trial.load()
    except GuardError as error:
        return str(error)
    return ""


def _check_words(words: str, older: Path, *, by: bool) -> None:
    """The process whose part is damaged says so in one line, and names the one before; or it is not seen any more."""
    if by and ("\n" in words or str(older) not in words):
        raise BrokenError("lost", f"the refusal does not name the checkpoint before: {words}")


def try_torn_ledger(fault: Fault, _: Ranks, references: References, folder: Path) -> Verdict:
    """The ledger ends in mid-line: what is whole stays, and the run goes on from its checkpoint."""
    expected = references.clean(fault.setting, STEPS)
    trial = Trial(fault.setting, folder=folder)
    run_steps(trial, 2 * SAVE_EVERY + 1, save_now_and_then)
    trial.guard.close()
    path = folder / "ledger-00000.jsonl"
    data = path.read_bytes()
    size = int(fault.details["where"] * len(data))
    path.write_bytes(data[:size])
    whole = data[:size].count(b"\n")
    note = f"cut to {size} of {len(data)} bytes"
    try:
        again = Trial(fault.setting, folder=folder, resume=True)
    except LedgerError as error:
        if whole:
            raise BrokenError("lost", str(error)) from None
        path.unlink()  # not even the header is whole, and the message says to delete it
        again, note = Trial(fault.setting, folder=folder), f"{note}: {error}"
    again.load()
    lost = trial.place - again.place
    kept = trial.seen[: max(0, min(whole - 1, len(trial.seen)))]
    again.seen = list(kept)
    run_steps(again, STEPS)
    again.guard.close()
    check_same(again.digests(), expected.digests, "at the end")
    check_ledger(folder, [again.seen])
    return Verdict("survived", lost, note)


def try_full_disk(fault: Fault, ranks: Ranks, references: References, folder: Path) -> Verdict:
    """No room for a checkpoint, or for a line of the ledger; then there is room again."""
    of_ledger = fault.details["target"] == "ledger"
    last = LONG if of_ledger else STEPS
    expected = references.clean(fault.setting, last)
    trial = Trial(fault.setting, rank=ranks.rank, folder=folder)
    run_steps(trial, SAVE_EVERY, save_now_and_then)
    run_steps(trial, max(fault.step, SAVE_EVERY + 1))
    struck = ranks.rank == fault.rank
    before = trial.digests()
    with no_room(folder, fault.details) if struck else contextlib.nullcontext():
        refused = _refusal((lambda: _write_ledger(trial)) if of_ledger else trial.save)
    if not all(ranks.gather(bool(refused))):
        raise BrokenError("lost", "there was room after all, or some processes do not know that there was none")
    if of_ledger and trial.guard.ledger is not None:
        trial.guard.ledger.flush()
    else:
        check_same(trial.digests(), before, "after a checkpoint that could not be written")
        _check_older(trial, ranks, references)
    trial = trial.resumed()
    run_steps(trial, last)
    trial.guard.close()
    check_row([seen.weights for seen in trial.seen], expected.weights)
    check_same(trial.digests(), expected.digests, "at the end")
    witnesses = ranks.gather(trial.seen)
    if ranks.rank == 0:
        check_ledger(folder, witnesses)
    return Verdict("survived", 0, refused)


def _refusal(act: Callable[[], Any]) -> str:
    try:
        act()
    except FloatlineError as error:
        return str(error)
    return ""


def _write_ledger(trial: Trial) -> None:
    """Steps until the ledger has no room, and one more: it is made, and raises what the thread has found."""
    ledger = trial.guard.ledger
    while trial.place < LONG - 2 and ledger is not None:
        trial.step()
        try:
            ledger.flush()
        except LedgerError:
            trial.step()


def _check_older(trial: Trial, ranks: Ranks, references: References) -> None:
    """The checkpoint before is whole: another run goes on from it."""
    random = torch.get_rng_state()
    other = Trial(trial.setting, rank=ranks.rank)
    other.load(trial.checkpoints)
    if other.place != SAVE_EVERY:
        raise BrokenError("corrupted", f"the newest checkpoint is of step {other.place}, not of step {SAVE_EVERY}")
    check_row([other.weights()], [references.clean(trial.setting, SAVE_EVERY).weights[-1]])
    torch.set_rng_state(random)  # the other run has set its own
