"""The campaign as a page: a row for each kind, and what the figures mean."""

from __future__ import annotations

import os
import platform
import re
from datetime import datetime, timezone

import torch

from campaign.judge import GOOD, Verdict
from campaign.plan import KINDS, LAYOUTS, Fault

Rows = list[tuple[Fault, Verdict]]
HEADER = (
    "| fault | plain | DDP | FSDP2 | tried | survived | stopped, sound | noticed | not seen | steps lost | deadlocks "
    "| corrupted weights | false ledgers | lost |"
)


def render(rows: Rows, *, command: str, seconds: float, processes: int) -> str:
    """The page.

    Args:
        rows: Faults and verdicts.
        command: Plants the same faults again.
        seconds: The campaign took.
        processes: Parts that ran at once.
    """
    date = datetime.now(timezone.utc).date().isoformat()
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    disks = sorted({verdict.note.split(":")[0] for fault, verdict in rows if fault.kind == "full-disk"})
    lines = [
        "# The fault campaign",
        "",
        f"{date}, torch {torch.__version__}, {machine}, gloo: {len(rows):,} faults in {seconds:,.0f} s, "
        f"{processes} at once. `{command}` plants the same ones.",
        "",
        HEADER,
        "|---" * HEADER.count(" |") + "|",
        *(_row(kind, title, rows) for kind, (title, _) in KINDS.items() if any(f.kind == kind for f, _ in rows)),
        _line("all", rows),
        "",
        *([f"Full disk: {' and '.join(_DISKS[disk] for disk in disks if disk in _DISKS)}.", ""] if disks else []),
        *_about_flips(rows),
    ]
    bad = [(fault, verdict) for fault, verdict in rows if verdict.outcome not in GOOD]
    lines += [
        f"- {fault.number} {fault.kind}, {fault.setting}: {verdict.outcome}: {verdict.note}" for fault, verdict in bad
    ]
    return "\n".join(lines).rstrip()


_DISKS = {
    "tmpfs": "a tmpfs of 1 MiB, filled (ENOSPC)",
    "limit": "a limit on the size of files (EFBIG)",
}


def _row(kind: str, title: str, rows: Rows) -> str:
    return _line(title, [(fault, verdict) for fault, verdict in rows if fault.kind == kind])


def _line(title: str, rows: Rows) -> str:
    layouts = [sum(fault.setting.layout == layout for fault, _ in rows) for layout in LAYOUTS]
    outcomes = [verdict.outcome for _, verdict in rows]
    counts = [
        *layouts,
        len(rows),
        *(outcomes.count(name) for name in ("survived", "stopped", "noticed", "not seen")),
        sum(verdict.steps_lost for _, verdict in rows),
        *(outcomes.count(name) for name in ("hang", "corrupted", "false ledger", "lost")),
    ]
    return f"| {title} | " + " | ".join(f"{count:,}" if count else "0" for count in counts) + " |"


def _about_flips(rows: Rows) -> list[str]:
    """How far apart the losses of runs came in which a flipped bit was not seen."""
    notes = [verdict.note for _, verdict in rows if verdict.outcome == "not seen"]
    apart = sorted(float(found[1]) for note in notes if (found := re.search(r"losses within (\S+)", note)))
    if not apart:
        return []
    middle, high = apart[len(apart) // 2], apart[int(0.95 * (len(apart) - 1))]
    return [
        f"Bits that flipped and were not seen: {len(apart)}. The largest difference of a later loss from the run "
        f"without the fault: median {middle:.2g}, 95 % within {high:.2g}, most {apart[-1]:.2g}.",
        "",
    ]
