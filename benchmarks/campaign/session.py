"""Many faults one after another in one group of processes; and the whole campaign, group by group."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from campaign.disks import mount_small_disk
from campaign.endings import Clean, try_ending
from campaign.files import try_damage, try_full_disk, try_torn_ledger
from campaign.groups import PATIENCE, Group
from campaign.judge import GOOD, BrokenError, Verdict, worst
from campaign.memory import try_flip
from campaign.numbers import Ranks, References, try_clock, try_numbers
from campaign.pairs import try_pair
from campaign.plan import Fault

IN_GROUP: dict[str, Callable[[Fault, Ranks, References, Path], Verdict]] = {
    **dict.fromkeys(("forward", "backward", "reduced", "batch", "exception"), try_numbers),
    **dict.fromkeys(("weight-flip", "state-flip"), try_flip),
    "clock": try_clock,
    "damage": try_damage,
    "torn-ledger": try_torn_ledger,
    "full-disk": try_full_disk,
}


@dataclass(frozen=True)
class Result:
    """A fault and what became of the run."""

    fault: Fault
    verdict: Verdict
    seconds: float


def run_campaign(
    faults: list[Fault], room: Path, *, patience: float = PATIENCE, tell: Callable[[Result], None]
) -> None:
    """Plant every fault.

    Args:
        faults: What is planted.
        room: An empty folder.
        patience: Seconds without a sign of life after which a run counts as hanging.
        tell: Called with each result.
    """
    sessions: dict[tuple[Any, ...], list[Fault]] = {}
    for fault in faults:
        if fault.kind in IN_GROUP:
            # A small disk is seen by one process only; what needs it has a process of its own.
            small_disk = fault.kind == "full-disk" and fault.setting.world == 1
            sessions.setdefault((fault.setting.layout, fault.setting.world, small_disk), []).append(fault)
    for (_, world, small_disk), own in sessions.items():
        while own:
            own = _run_session(own, world, room, patience=patience, small_disk=small_disk, tell=tell)
    clean = Clean(room / "clean")
    for fault in faults:
        if fault.kind not in IN_GROUP:
            tell(_try_alone(fault, clean, room))


def _run_session(
    faults: list[Fault],
    world: int,
    room: Path,
    *,
    patience: float,
    small_disk: bool,
    tell: Callable[[Result], None],
) -> list[Fault]:
    """Run faults in one group; gives back those that are left when a process has died or hangs."""
    folder = room / f"session-{faults[0].number}"
    files = [folder / f"verdicts-{rank}.jsonl" for rank in range(world)]

    def read() -> list[list[Any]]:
        return [path.read_text("utf-8").splitlines() if path.exists() else [] for path in files]

    group = Group(work_in_group, world, folder, (world, faults, folder, small_disk))
    codes = group.wait(patience=patience, sign=lambda: [len(lines) for lines in read()])
    rows = [[json.loads(line) for line in lines] for lines in read()]
    done = min(map(len, rows))
    for index in range(done):
        verdicts = [Verdict(**row[index]["verdict"]) for row in rows]
        tell(Result(faults[index], worst(verdicts), max(row[index]["seconds"] for row in rows)))
    if done == len(faults):
        shutil.rmtree(folder, ignore_errors=True)
        return []
    if any(row and Verdict(**row[-1]["verdict"]).outcome not in GOOD for row in rows) and max(map(len, rows)) == done:
        return faults[done:]  # every process has told the last verdict before it left
    told = [Verdict(**row[done]["verdict"]) for row in rows if len(row) > done]
    bad = [verdict for verdict in told if verdict.outcome not in GOOD]
    verdict = worst(bad) if bad else Verdict("hang" if None in codes else "lost", note=f"exit codes {codes}")
    tell(Result(faults[done], verdict, 0.0))
    return faults[done + 1 :]


def work_in_group(rank: int, world: int, faults: list[Fault], folder: Path, small_disk: bool) -> None:
    """One process of a session; it leaves after a verdict that is not good, because the others may be elsewhere."""
    ranks = Ranks(rank, world)
    references = References(ranks)
    runs = folder / "runs"
    kind = "tmpfs" if small_disk and mount_small_disk(runs) else "limit"
    for fault in faults:
        began, own = time.monotonic(), runs / str(fault.number)
        try:
            verdict = IN_GROUP[fault.kind](fault, ranks, references, own)
        except BrokenError as broken:
            verdict = broken.verdict
        except Exception as error:
            verdict = Verdict("lost", note=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        if fault.kind == "full-disk":
            verdict = Verdict(verdict.outcome, verdict.steps_lost, f"{kind}: {verdict.note}")
        with (folder / f"verdicts-{rank}.jsonl").open("a") as file:
            file.write(json.dumps({"verdict": asdict(verdict), "seconds": time.monotonic() - began}) + "\n")
        if verdict.outcome not in GOOD:
            return
        ranks.gather(None)
        if rank == 0:
            shutil.rmtree(own, ignore_errors=True)


def _try_alone(fault: Fault, clean: Clean, room: Path) -> Result:
    folder, began = room / f"alone-{fault.number}", time.monotonic()
    try:
        verdict = (try_pair if fault.kind == "two-processes" else try_ending)(fault, clean, folder)
        shutil.rmtree(folder, ignore_errors=True)
    except BrokenError as broken:
        verdict = broken.verdict
    except Exception as error:
        verdict = Verdict("lost", note=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return Result(fault, verdict, time.monotonic() - began)
