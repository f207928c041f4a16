"""Processes that train together: which of them tells the story, and what they do not have in common. Without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from floatline.causes import find_cause
from floatline.diagnosis.gaps import Shown
from floatline.diagnosis.scripts.fp32_runs import LOSSES, READS
from floatline.findings import Finding
from floatline.running.ranks import find_ranks, path_of


@dataclass(frozen=True)
class RankReports:
    """What the processes of a command wrote down; one process is a list of one.

    Args:
        reports: By rank; {} where none could be written.
        path: Of rank 0's.
    """

    reports: dict[int, dict[str, Any]]
    path: Path

    @classmethod
    def read(cls, path: Path) -> RankReports:
        """Read what is there, in the order in which it was written: who ends by itself comes before who ends for it."""
        found = sorted(find_ranks(path).items(), key=lambda item: item[1].stat().st_mtime_ns)
        return cls({rank: json.loads(one.read_text(encoding="utf-8")) for rank, one in found}, path)

    @property
    def teller(self) -> int:
        """The rank whose report is told: where it went wrong first, in its own loss before in what all reduced.

        Where nothing did, the one that ended first with an error; else rank 0.
        """

        if "missing" in self.told_by(0):
            return 0
        ended = [rank for rank, one in self.reports.items() if one["exit_code"] and not one["ended_by"]]
        if ended and self._first_bad is None:
            return ended[0]

        def order(rank: int) -> tuple[float, bool, bool, int]:
            seen = self.reports[rank]
            bad = seen["first_bad_step"]
            return _or_never(bad), seen["bad_loss"] != bad, not seen["findings"], rank

        return min(self.reports, key=order, default=0)

    @property
    def told(self) -> dict[str, Any]:
        """The report that is told; {} where there is none."""
        return self.told_by(self.teller) if self.reports else {}

    def told_by(self, rank: int) -> dict[str, Any]:
        """The report of a rank."""
        return self.reports.get(rank, {})

    def read_shown(self, *, cut: bool = False) -> Shown:
        """What the process showed whose report is told."""
        own = path_of(self.path, self.teller)
        return Shown.read(own.with_name(LOSSES), own.with_name(READS), cut=cut)

    def find_apart(self) -> list[Finding]:
        """What is wrong with processes that are each fine: they began as one, and train apart."""
        first = self.told_by(0)
        if not first or self._first_bad is not None:
            return []  # what is not finite is not the same bits everywhere
        apart = [
            rank
            for rank, one in sorted(self.reports.items())
            if one["num_steps"] == first["num_steps"] > 0
            and one["digests"][0] == first["digests"][0]
            and one["digests"][1] != first["digests"][1]
        ]
        if not apart:
            return []
        steps = first["num_steps"]
        seen = f"{_name(apart)} and rank 0 begin with the same weights, and have others after {steps:,} steps"
        fix = "Reduce every gradient before the optimizer steps: DistributedDataParallel does, from loss.backward() on."
        return [Finding(find_cause("distributed-desync"), seen, fix)]

    def describe(self) -> Iterator[str]:
        """What is not the same in all processes, and which of them is told of; nothing of one process."""
        if len(self.reports) < 2:
            return
        first = self.told_by(0)
        yield from self._describe_loss()
        for rank, one in sorted(self.reports.items()):
            if one["precision"] != first.get("precision", one["precision"]):
                yield f"rank {rank} computes in {one['precision']}, rank 0 in {first['precision']}"
            if one["digests"][0] != first.get("digests", one["digests"])[0]:
                yield f"rank {rank} begins with other weights than rank 0"
            if one["num_steps"] != first.get("num_steps", one["num_steps"]):
                yield f"rank {rank} made {one['num_steps']:,} steps, rank 0 {first['num_steps']:,}"
        told = f"what is said of steps and operations is rank {self.teller}'s"
        yield f"{len(self.reports)} processes were observed; {told}"

    @property
    def _first_bad(self) -> int | None:
        bad = [one["first_bad_step"] for one in self.reports.values() if one["first_bad_step"] is not None]
        return min(bad, default=None)

    def _describe_loss(self) -> Iterator[str]:
        step = self._first_bad
        if step is None:
            return
        own = [rank for rank, one in sorted(self.reports.items()) if _or_never(one["bad_loss"]) <= step]
        others = [rank for rank in sorted(self.reports) if rank not in own]
        if own and others:
            whose = f"the loss of {_name(own)} is not finite and that of {_name(others)} is"
            yield f"in step {step:,} {whose}: it went wrong before the reduction"
        elif others:
            yield f"in step {step:,} the loss of every process is finite, and what comes after it is not"


def _or_never(step: int | None) -> float:
    return math.inf if step is None else step


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
