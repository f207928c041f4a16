"""Faults that end a process: signals, a loss that raises on one rank, and a second process on the folder."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import floatline as fl
from campaign.files import save_now_and_then
from campaign.groups import PATIENCE, Group
from campaign.judge import BrokenError, Verdict, check_ledger, check_same
from campaign.plan import STEPS, Fault
from campaign.plants import Kill, RaisesAlone, die
from campaign.trial import Trial, read_witness, run_steps
from floatline.errors import FloatlineError
from floatline.guard.checkpoints import run_files

GROUP_TIMEOUT = 4.0  # seconds that a process waits for one that does not come


def run_and_end(rank: int, fault: Fault, folder: Path) -> None:
    """The run that is ended; called in a process of its own."""
    trial = Trial(fault.setting, rank=rank, folder=folder, witness=folder / f"witness-{rank}.jsonl")
    trial.save()
    struck = rank == fault.rank
    run_steps(trial, fault.step, save_now_and_then)
    if fault.kind == "term" or fault.details.get("where") == "saving":
        run_steps(trial, fault.step + 1)
        if struck:
            _strike_while_saving(fault)
        trial.save()
        die(signal.SIGKILL)  # the save had fewer calls; or another process was struck
    plants = {"kill": Kill, "lone-exception": RaisesAlone}
    trial.step(plants[fault.kind](fault.details["where"]) if struck else None)
    if struck:
        die(signal.SIGKILL)
    run_steps(trial, STEPS)  # the others: until they notice


def _strike_while_saving(fault: Fault) -> None:
    """Send the signal at the n-th call to the system: files that are opened, synced, renamed, half written."""
    number = signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM
    if fault.details.get("handler"):
        signal.signal(number, lambda *_: sys.exit(143))
    left = itertools.count(fault.details.get("call", fault.number % 28), -1)

    def count() -> None:
        if next(left) == 0:
            die(number)

    def audit(event: str, _: Any) -> None:
        if event in ("open", "os.rename", "os.mkdir", "os.chmod", "os.listdir", "os.scandir", "os.remove"):
            count()

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def do(*args: Any) -> Any:
            count()
            return call(*args)

        return do

    def half(tensors: Any, path: Path) -> None:
        save(tensors, path)
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        count()
        path.write_bytes(data)

    save, run_files.save_file = run_files.save_file, half
    os.fsync = counted(os.fsync)
    sys.addaudithook(audit)


def run_on(rank: int, fault: Fault, folder: Path, resume: bool) -> None:
    """The run that goes on, or the one that was never ended; leaves its digests in the folder."""
    witness = folder / f"witness-{rank}-again.jsonl"
    trial = Trial(fault.setting, rank=rank, folder=folder, resume=resume, witness=witness)
    if resume:
        trial.load()
    place = trial.place
    run_steps(trial, STEPS, save_now_and_then)
    found = trial.digests()
    trial.guard.close()
    (folder / f"digests-{rank}.json").write_text(json.dumps({"place": place, "digests": found}))


class Clean:
    """Digests of runs that were never ended, by setting."""

    def __init__(self, room: Path) -> None:
        self._room = room
        self._known: dict[Any, list[dict[str, str]]] = {}

    def of(self, fault: Fault) -> list[dict[str, str]]:
        """For each rank."""
        setting = fault.setting
        if setting not in self._known:
            folder = self._room / f"clean-{len(self._known)}"
            codes = Group(run_on, setting.world, folder, (fault, folder, False)).wait()
            if any(codes):
                raise BrokenError("lost", f"the run without a fault ended with {codes}: {_printed(folder)}")
            self._known[setting] = [found["digests"] for found in _digests(folder, setting.world)]
        return self._known[setting]


def try_ending(fault: Fault, clean: Clean, folder: Path) -> Verdict:
    """End processes, see that none is left waiting, go on, and compare with the run that was never ended."""
    expected, world = clean.of(fault), fault.setting.world
    group = Group(run_and_end, world, folder, (fault, folder), timeout=GROUP_TIMEOUT)
    if fault.details.get("where") == "after" and fault.kind == "lone-exception":
        group.wait_for_one()
        group.end(fault.rank)
    codes = group.wait()
    if None in codes:
        raise BrokenError("hang", f"exit codes {codes} after {PATIENCE:g} s")
    if codes[fault.rank] == 0:
        raise BrokenError("lost", f"the fault did not end the process: {codes}")
    before = [read_witness(folder / f"witness-{rank}.jsonl") for rank in range(world)]
    codes = Group(run_on, world, folder, (fault, folder, True)).wait()
    if None in codes:
        raise BrokenError("hang", f"the resumed run: exit codes {codes}")
    if any(codes):
        raise BrokenError("lost", f"the resumed run: exit codes {codes}: {_printed(folder)}")
    found = _digests(folder, world)
    for rank in range(world):
        check_same(found[rank]["digests"], expected[rank], f"rank {rank} at the end")
    place = found[0]["place"]
    after = [read_witness(folder / f"witness-{rank}-again.jsonl") for rank in range(world)]
    behind = _check_both(folder, before, after, place)
    return Verdict("survived", max(map(len, before)) - place, f"went on from step {place}; {behind} lines behind")


def _check_both(folder: Path, before: list[Any], after: list[Any], place: int) -> int:
    """The ledger: of the first run a beginning that the checkpoint is in; then all of the second.

    Returns:
        Steps before the fault whose lines had not reached the system when the process was killed.
    """
    num = len(check_read(folder)) - (STEPS - place)
    completed = max(map(len, before))
    if not place <= num <= completed:
        raise BrokenError(
            "false ledger", f"{num} lines of {completed} steps before the fault; the checkpoint has {place}"
        )
    # A process that died with the others may not have taken down the last step that they completed.
    firsts = [[*first, *[None] * num][:num] for first in before]
    check_ledger(folder, [first + second for first, second in zip(firsts, after, strict=True)])
    return completed - num


def check_read(folder: Path) -> list[int]:
    """The steps of a ledger."""
    try:
        return fl.Ledger.read(folder).attempt
    except FloatlineError as error:
        raise BrokenError("false ledger", str(error)) from None


def _digests(folder: Path, world: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"digests-{rank}.json").read_text("utf-8")) for rank in range(world)]


def _printed(folder: Path) -> str:
    """The last line that a process printed."""
    lines = [line for path in sorted(folder.glob("printed-*.txt")) for line in path.read_text("utf-8").splitlines()]
    return next((line for line in reversed(lines) if "Error" in line), "") or (lines or [""])[-1]
