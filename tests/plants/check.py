"""Whether a plant is what its truth says: the script runs as it is, in 16 bits and in FP32, and results are compared.

A number of the results is wrong if 16 bits move it by more than 5 %, than five times what a change of the weights by
1e-6 does to it in FP32, and than three times what 16 bits do to it in the healthy host and in the harmless twin. It
is right within 2 %, or what those changes do. Between them nothing is said, and the draw is thrown away.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tests.plants.bare import Outcome, run_bare
from tests.plants.hosts_of_scripts import read_hosts
from tests.plants.planting import Plant, assemble

WRONG, RIGHT, TINY = 0.05, 0.02, 1e-9


@dataclass(frozen=True)
class Checked:
    """What the runs of a plant showed."""

    holds: bool
    loud: bool
    why: str
    results: dict[str, list[float]] = field(default_factory=dict)


class Checker:
    """Runs plants; what the healthy hosts do is kept.

    Args:
        kept: A folder where other processes find it, too; None keeps it here.
    """

    def __init__(self, kept: Path | None = None) -> None:
        self._hosts, self._kept = read_hosts(), kept
        self._healthy: dict[tuple[str, str], list[float]] = {}

    def healthy(self, host: str, precision: str) -> list[float]:
        """Results of a host without any plant."""
        if self._kept is None:
            return self._run_healthy(host, precision)
        path = self._kept / f"{host}-{precision}.json"
        if not path.exists():
            self._kept.mkdir(parents=True, exist_ok=True)
            new = path.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps(self._run_healthy(host, precision)), encoding="utf-8")
            new.replace(path)
        return json.loads(path.read_text(encoding="utf-8"))

    def _run_healthy(self, host: str, precision: str) -> list[float]:
        if (host, precision) not in self._healthy:
            text, _ = assemble(self._hosts[host], {}, set(), (), precision)
            outcome = _run(text, precision)
            if outcome.loud:
                raise RuntimeError(f"{host} in {precision} is not healthy: {outcome}")
            self._healthy[host, precision] = outcome.numbers(1)
        return self._healthy[host, precision]

    def check(self, plant: Plant) -> Checked:
        """Run a plant in its dtype and in FP32."""
        half = _run(plant.text, plant.dtype)
        if plant.control:
            return self._check_control(plant, half)
        if plant.hazard.loud is not None and half.loud != plant.hazard.loud:
            return Checked(False, half.loud, f"{'loud' if half.loud else 'not loud'}: {half.error[:80]}")
        if half.error and not (plant.hazard.raises and re.search(plant.hazard.raises, half.error)):
            return Checked(False, half.loud, f"another exception: {half.error[:80]}")
        full = _run(plant.text, "fp32")
        if plant.hazard.verdict == "not-precision":
            return self._check_bug(plant, half, full)
        if full.loud:
            return Checked(False, half.loud, f"FP32 fails too: {full.error[:80]}")
        if half.loud:
            return Checked(True, True, half.error[:80] or f"{half.num_bad_losses} losses, {half.num_skipped} skips")
        return self._compare(plant, half, full, wanted=True)

    def _check_control(self, plant: Plant, half: Outcome) -> Checked:
        if half.loud:
            return Checked(False, True, f"a control fails: {half.error[:80]} {half.num_skipped} skips")
        full = _run(plant.text, "fp32")
        if full.loud:
            return Checked(False, False, f"a control fails in FP32: {full.error[:80]}")
        return self._compare(plant, half, full, wanted=False)

    def _check_bug(self, plant: Plant, half: Outcome, full: Outcome) -> Checked:
        if plant.hazard.loud:
            return Checked(full.loud, half.loud, "fails in FP32 as well" if full.loud else "FP32 is healthy")
        sound, now = self.healthy(plant.host, "fp32"), full.numbers(1)
        moved = any(_moved(a, b) > 10 * WRONG for a, b in zip(now, sound, strict=False))
        return Checked(moved and not full.loud, False, "wrong in FP32 as well" if moved else "FP32 trains")

    def _compare(self, plant: Plant, half: Outcome, full: Outcome, *, wanted: bool) -> Checked:
        count = plant.num_results
        ours, theirs = half.numbers(count), full.numbers(count)
        near = len(ours) == len(theirs) and all(_moved(a, b) <= WRONG for a, b in zip(ours, theirs, strict=True))
        if wanted and near:
            return Checked(False, False, "right", {"half": ours, "fp32": theirs})
        seeds = (1, 2) if wanted else () if near else (1,)
        others = [_run(plant.text, "fp32", nudge=seed).numbers(count) for seed in seeds] or [theirs]
        results = {"half": ours, "fp32": theirs, "nudged": others[0]}
        if not ours or any(len(one) != len(theirs) for one in (ours, *others)):
            return Checked(False, False, "no results that can be compared", results)
        usual = self._usual(plant, theirs, wanted)
        wrong, right = False, True
        for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            spread = max(abs(one[at] - b) if math.isfinite(one[at] - b) else math.inf for one in others)
            size = max(abs(b), TINY)
            far = abs(a - b) if math.isfinite(a) else math.inf
            wrong |= far > max(WRONG * size, 5 * spread, 3 * usual[at])
            right &= far <= max(RIGHT * size, 3 * spread, 2 * usual[at])
        holds = wrong if wanted else right
        return Checked(holds, False, "wrong" if wrong else "right" if right else "between", results)

    def _usual(self, plant: Plant, results: list[float], wanted: bool) -> list[float]:
        """How far 16 bits move each result where nothing is wrong: in the healthy host, and in the harmless twin."""
        half, full = self.healthy(plant.host, plant.dtype), self.healthy(plant.host, "fp32")
        own = [abs(a - b) for a, b in zip(half, full, strict=True)]
        usual = [0.0] * (len(results) - len(own)) + own
        if not wanted:
            return usual
        twins = (_run(plant.twin, precision).numbers(plant.num_results) for precision in (plant.dtype, "fp32"))
        moved = [_moved(a, b) for a, b in zip(*twins, strict=False)]
        moved += [0.0] * (len(results) - len(moved))  # a twin that did not get so far
        return [max(known, abs(b) * share) for known, b, share in zip(usual, results, moved, strict=True)]


def _moved(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), TINY) if math.isfinite(a) else math.inf


def _run(text: str, precision: str, *, nudge: int = 0) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(text, encoding="utf-8")
        return run_bare(path, ("--precision", precision), nudge=nudge)
