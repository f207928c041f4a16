"""Two processes on one run folder: the second is refused in one line, and the first never hears of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from campaign.endings import Clean
from campaign.files import save_now_and_then
from campaign.groups import Group
from campaign.judge import BrokenError, Verdict, check_ledger, check_same
from campaign.plan import STEPS, Fault
from campaign.trial import Trial, read_witness, run_steps
from floatline.errors import FloatlineError
from floatline.guard.checkpoints import run_files


def try_pair(fault: Fault, clean: Clean, folder: Path) -> Verdict:
    """Start both; exactly one of them trains, with the bits of a run that was alone."""
    expected = clean.of(fault)[0]
    works = {"create": second_creates, "resume": second_creates, "saving": second_saves, "at-once": both_start}
    codes = Group(works[fault.details["how"]], 2, folder, (fault, folder), alone=True).wait()
    if None in codes:
        raise BrokenError("hang", f"exit codes {codes}")
    if any(codes):
        printed = " ".join(path.read_text("utf-8")[-300:] for path in folder.glob("printed-*.txt"))
        raise BrokenError("lost", f"exit codes {codes}: {' '.join(printed.split())}")
    found = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("pair-*.json"))]
    winners = [one for one in found if one["digests"]]
    refusals = [one["refused"] for one in found if one["refused"]]
    if len(winners) != 1 or len(refusals) != 1:
        raise BrokenError("lost", f"{len(winners)} trained, {len(refusals)} were refused")
    check_same(winners[0]["digests"], expected, "at the end")
    check_ledger(folder, [read_witness(folder / f"pair-witness-{winners[0]['rank']}.jsonl")])
    return Verdict("survived", 0, refusals[0])


def second_creates(rank: int, fault: Fault, folder: Path) -> None:
    """The first trains half way; the second comes; the first trains on."""
    if rank == 0:
        trial = _begin(rank, fault, folder)
        run_steps(trial, fault.step, save_now_and_then)
        _say(folder / "half-way")
        _wait(folder / "refused")
        run_steps(trial, STEPS, save_now_and_then)
        _end(trial)
        return
    _wait(folder / "half-way")
    _refused(rank, folder, lambda: Trial(fault.setting, folder=folder, resume=fault.details["how"] == "resume"))
    _say(folder / "refused")


def second_saves(rank: int, fault: Fault, folder: Path) -> None:
    """The second, which has another ledger, saves into the same place while the first is in the middle of saving."""
    if rank == 0:
        trial = _begin(rank, fault, folder)
        run_steps(trial, fault.step)
        save = run_files.save_file

        def pause(tensors: Any, path: Path) -> None:
            save(tensors, path)
            _say(folder / "half-way")
            _wait(folder / "refused")

        run_files.save_file = pause
        trial.save()
        run_files.save_file = save
        run_steps(trial, STEPS, save_now_and_then)
        _end(trial)
        return
    other = run_steps(Trial(fault.setting), fault.step)
    _wait(folder / "half-way")
    _refused(rank, folder, lambda: other.guard.save(folder / "checkpoints"))
    _say(folder / "refused")


def both_start(rank: int, fault: Fault, folder: Path) -> None:
    """Both begin at once; whoever is late is refused."""
    _say(folder / f"here-{rank}")
    _wait(folder / f"here-{1 - rank}")
    trials: list[Trial] = []
    _refused(rank, folder, lambda: trials.append(_begin(rank, fault, folder)))
    if trials:
        _wait(folder / f"pair-{1 - rank}.json")  # the lock is held until the other has been refused
        _end(run_steps(trials[0], STEPS, save_now_and_then))


def _begin(rank: int, fault: Fault, folder: Path) -> Trial:
    return Trial(fault.setting, folder=folder, witness=folder / f"pair-witness-{rank}.jsonl")


def _refused(rank: int, folder: Path, act: Any) -> None:
    """Take down the refusal, if there is one."""
    try:
        act()
    except FloatlineError as error:
        _write(folder, rank, {}, str(error))


def _end(trial: Trial) -> None:
    digests = trial.digests()
    trial.guard.close()
    rank = int(str(trial.witness)[-7])
    _write(trial.folder or Path(), rank, digests, "")


def _write(folder: Path, rank: int, digests: dict[str, str], refused: str) -> None:
    text = json.dumps({"rank": rank, "digests": digests, "refused": refused})
    draft = folder / f"draft-{rank}"
    draft.write_text(text)
    draft.rename(folder / f"pair-{rank}.json")


def _say(path: Path) -> None:
    path.touch()


def _wait(path: Path) -> None:
    while not path.exists():
        time.sleep(0.005)
