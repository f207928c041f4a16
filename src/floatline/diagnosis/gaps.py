"""Gap: how far the losses of a run, or the numbers that a script reads, are from those of the same run in FP32."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# A run is apart where its later losses are, all on one side, by this share of the way that FP32's go, and by so many
# times what a nudge of the weights does. On healthy scripts in 16 bits it is 0.02 at most.
APART, TIMES = 0.05, 4.0
# The same of numbers that a script reads, which have a smaller part of the run in them; and of a few numbers, which
# have no way: a share of their size. Many that are compared all together scatter more.
APART_READ, APART_FEW, APART_ALL = 0.1, 0.1, 0.25
# Numbers that go nearly nowhere have a way of this share of their size.
_LEVEL = 0.02
_NUM_WINDOWS, _FEWEST = 10, 4
# Rows of numbers are apart where the mean of their differences is this many times its own error.
_STEADY = 4.0
# Printed numbers are apart if their last digits are, by more than this.
_FEW_DIGITS = 3.0
_NEAR_LOSS = 2.0
# A loss that has gone down to less than this share of its way is judged by its way: what is left of it is chance.
_NEAR_NOTHING = 0.05
# Scaled losses and gradients that a script reads are powers of two larger than FP32's, at least by the first.
_SCALED, _NEAR_POWER, _AT_POWER, _MOST = 4.0, 0.2, 0.03, 0.8


@dataclass(frozen=True)
class Shown:
    """What a run showed.

    Args:
        losses: One for each step; NaN where it is not known.
        skipped: Numbers of the steps that were left out.
        lines: The numbers that were read in each place, by 'FILE:LINE', or printed; see `ReadValues`.
        quanta: The last digit of those that were printed.
        error: What ended it; '' where it came to its end, or was ended after enough steps.
        cut: Whether it was ended after enough steps.
        sizes: Of some weights of each optimizer, after so many steps.
    """

    losses: tuple[float, ...]
    skipped: tuple[int, ...] = ()
    lines: Mapping[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    error: str = ""
    quanta: Mapping[str, float] = field(default_factory=dict[str, float])
    cut: bool = False
    sizes: Mapping[int, tuple[float, ...]] = field(default_factory=dict[int, "tuple[float, ...]"])

    def until_failure(self) -> Shown:
        """The same without the steps from the first one on whose loss is not finite."""
        bad = (i for i, loss in enumerate(self.losses) if not math.isfinite(loss))
        return replace(self, losses=self.losses[: next(bad, len(self.losses))])

    @classmethod
    def read(cls, log: Path, reads: Path, *, error: str = "", cut: bool = False) -> Shown:
        """What LossLog and ReadValues wrote; a line that was cut short is left out."""
        text = log.read_text(encoding="utf-8") if log.exists() else ""
        written: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        rows = [row for row in written if "loss" in row]
        numbers: dict[str, Any] = (
            json.loads(reads.read_text("utf-8")) if reads.exists() else {"lines": {}, "quanta": {}}
        )
        lines: dict[str, list[float | None]] = numbers["lines"]
        return cls(
            tuple(_number(row["loss"]) for row in rows),
            tuple(number for number, row in enumerate(rows) if not row["applied"]),
            {key: tuple(map(_number, values)) for key, values in lines.items()},
            error,
            numbers["quanta"],
            cut,
            {row["after"]: tuple(map(_number, row["sizes"])) for row in written if "sizes" in row},
        )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


@dataclass(frozen=True)
class Gap:
    """How far numbers are from FP32's.

    Args:
        share: Of the way that FP32's go; of few numbers, of their size. 0 where they lie on both sides of FP32's.
        first: FP32's mean at the beginning.
        last: The same at the end.
        own_last: The run's own there.
        num: Numbers that were compared.
        is_few: Whether these are too few to have a way.
        spread: The share whether or not they lie on one side: what chance does goes both ways.
    """

    share: float
    first: float
    last: float
    own_last: float
    num: int
    is_few: bool = False
    spread: float = 0.0

    def is_apart(self, least: float, floor: Gap | None) -> bool:
        """Whether it is more than a nudge of FP32's weights does."""
        if self.is_few:
            least = APART_FEW if self.num < _FEWEST else APART_ALL
        return self.share > max(least, TIMES * (floor.spread if floor is not None else 0.0))


def share_like(gap: Gap, others: Sequence[Gap]) -> float | None:
    """The largest share of gaps that are measured as one is, or of all where none is; None where there are none."""
    return max((one.share for one in _alike(gap, others)), default=None)


def spread_like(gap: Gap, others: Sequence[Gap]) -> float:
    """The same of spreads; 0 where there are none."""
    return max((one.spread for one in _alike(gap, others)), default=0.0)


def _alike(gap: Gap, others: Sequence[Gap]) -> Sequence[Gap]:
    return [one for one in others if one.is_few == gap.is_few] or others


def measure_gap(own: Sequence[float], fp32: Sequence[float], *, late: float = 0.0) -> Gap | None:
    """How far numbers are from FP32's; None where too few are finite in both.

    Numbers are held against those at the same place, which belong to the same batch.

    Args:
        own: Of a run.
        fp32: The same in FP32.
        late: The share of steps that the run left out beyond those that FP32 did: it may lag behind by as many; or be
            ahead, where that is below 0.
    """
    num = min(len(own), len(fp32))
    kept = [i for i in range(num) if math.isfinite(own[i]) and math.isfinite(fp32[i])]
    if not kept or len(kept) < num // 2:
        return None
    size = max(1, len(kept) // _NUM_WINDOWS)
    ours, theirs = _windows([own[i] for i in kept], size), _windows([fp32[i] for i in kept], size)
    level = max(*map(abs, theirs), 1e-30)
    is_few = len(kept) < _FEWEST
    way = level if is_few else max(max(theirs) - min(theirs), _LEVEL * level)
    lag, lead = math.ceil(max(late, 0.0) * len(ours)), math.ceil(max(-late, 0.0) * len(ours))
    near = [theirs[max(0, i - lag) : i + lead + 1] for i in range(len(ours))]
    apart = [_signed(ours[i], near[i]) / way for i in range(len(ours) // 2, len(ours))]
    one_sided = all(x > 0 for x in apart) or all(x < 0 for x in apart)
    spread = statistics.median(map(abs, apart))
    return Gap(spread if one_sided else 0.0, theirs[0], theirs[-1], ours[-1], len(kept), is_few, spread)


def goes_nowhere(losses: Sequence[float]) -> bool:
    """Whether losses stay where they are."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return not finite or max(finite) - min(finite) < _LEVEL * max(map(abs, finite))


def measure_difference(own: Sequence[float], fp32: Sequence[float]) -> Gap | None:
    """The same of numbers that are no row, such as one for each weight: all their differences, of all their sizes."""
    pairs = [(a, b) for a, b in zip(own, fp32, strict=False) if math.isfinite(a) and math.isfinite(b)]
    if not pairs:
        return None
    difference, size = sum(abs(a - b) for a, b in pairs), sum(abs(b) for _, b in pairs)
    ours, theirs = statistics.fmean(a for a, _ in pairs), statistics.fmean(b for _, b in pairs)
    share = difference / max(size, 1e-30)
    return Gap(share, theirs, theirs, ours, len(pairs), is_few=True, spread=share)


def _windows(numbers: Sequence[float], size: int) -> list[float]:
    return [statistics.fmean(numbers[i : i + size]) for i in range(0, len(numbers) - size + 1, size)]


def _signed(own: float, near: Sequence[float]) -> float:
    """How far a number lies above or below some; 0 between them."""
    return max(0.0, own - max(near)) + min(0.0, own - min(near))


def measure_loss_gap(own: Shown, fp32: Shown) -> Gap | None:
    """How far the losses of a run are from FP32's; None where there are too few."""
    gap = measure_gap(own.losses, fp32.losses, late=_share_left_out(own, fp32))
    return None if gap is None or gap.is_few else gap


def find_line_gaps(own: Shown, fp32: Shown) -> dict[str, Gap]:
    """Lines at which a script reads numbers that are far from FP32's."""
    found: dict[str, Gap] = {}
    for line in own.lines:
        if not _can_be_apart(line, own, fp32):
            continue
        if lost := _find_lost(own.lines[line], fp32.lines.get(line, ()), skipped=len(own.skipped)):
            found[line] = lost
            continue
        for gap in measure_line(line, own, fp32, late=_share_left_out(own, fp32)):
            if gap.is_apart(APART_READ, None):
                found.setdefault(line, gap)
    return found


def find_slight_gaps(own: Shown, fp32: Shown, least: float) -> dict[str, Gap]:
    """Lines at which a script reads a few numbers that are apart from FP32's by some of their size."""
    found: dict[str, Gap] = {}
    for line in own.lines:
        if _can_be_apart(line, own, fp32):
            for gap in measure_line(line, own, fp32):
                if gap.is_few and gap.num < _FEWEST and gap.share > least:
                    found.setdefault(line, gap)
    return found


def _can_be_apart(line: str, own: Shown, fp32: Shown) -> bool:
    """Whether numbers differ by more than digits, a loss scale, or roundings of what FP32 has as 0."""
    ours, theirs = own.lines[line], fp32.lines.get(line, ())
    if _are_near(ours, theirs, _FEW_DIGITS * own.quanta.get(line, 0.0)):
        return False
    return not _are_scaled(ours, theirs) and not _are_roundings(ours, theirs)


def measure_line(line: str, own: Shown, fp32: Shown, *, late: float = 0.0) -> list[Gap]:
    """The gaps of numbers that a line reads: as a row in time, then, where each has its partner, of all together.

    Where one row is longer though neither run was cut, as of a loop that ends early, numbers at the same place belong
    to different batches.
    """
    ours, theirs = own.lines.get(line, ()), fp32.lines.get(line, ())
    aligned = len(ours) == len(theirs) or own.cut or fp32.cut
    paired = aligned and not late
    gaps = [measure_gap(ours, theirs, late=late), measure_difference(ours, theirs) if paired else None]
    gaps = [gap and _as_loss(gap, fp32.losses) for gap in gaps]
    return [gap for gap in gaps if gap is not None and (gap.is_few or _is_steady(ours, theirs, aligned=aligned))]


def _as_loss(gap: Gap, losses: Sequence[float]) -> Gap:
    """A few numbers that are near the last losses are losses: what went to nearly 0 is apart by a share of its way."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not gap.is_few or gap.num >= _FEWEST or len(finite) < _FEWEST:
        return gap
    ends = statistics.median(finite[-max(1, len(finite) // _NUM_WINDOWS) :])
    if not 1 / _NEAR_LOSS < abs(gap.last) / max(abs(ends), 1e-30) < _NEAR_LOSS:
        return gap
    way = max(finite) - min(finite)
    if abs(gap.last) > _NEAR_NOTHING * way:
        return gap
    share = min(gap.share, abs(gap.own_last - gap.last) / max(way, 1e-30))
    return replace(gap, share=share, spread=min(gap.spread, share))


def _is_steady(own: Sequence[float], fp32: Sequence[float], *, aligned: bool) -> bool:
    """Whether the later numbers of a row are off to one side by more than they scatter; unaligned rows do so each."""
    ours, theirs = _later(own), _later(fp32)
    if not aligned and min(len(ours), len(theirs)) >= _FEWEST:
        error = math.sqrt(statistics.variance(ours) / len(ours) + statistics.variance(theirs) / len(theirs))
        return abs(statistics.fmean(ours) - statistics.fmean(theirs)) > _STEADY * error
    pairs = [*zip(own, fp32, strict=False)]
    off = [a - b for a, b in pairs[len(pairs) // 2 :] if math.isfinite(a) and math.isfinite(b)]
    if len(off) < _FEWEST:
        return True
    return abs(statistics.fmean(off)) > _STEADY * statistics.stdev(off) / math.sqrt(len(off))


def _later(numbers: Sequence[float]) -> list[float]:
    return [number for number in numbers[len(numbers) // 2 :] if math.isfinite(number)]


def is_printed(line: str) -> bool:
    """Whether numbers are what a line prints, not what it reads out of a tensor."""
    return line.endswith(")")


def _are_near(own: Sequence[float], fp32: Sequence[float], least: float) -> bool:
    """Whether numbers are no farther apart than the digits that are shown of them tell."""
    return all(abs(a - b) <= least or (math.isnan(a) and math.isnan(b)) for a, b in zip(own, fp32, strict=False))


def _find_lost(own: Sequence[float], fp32: Sequence[float], *, skipped: int) -> Gap | None:
    """The gap of numbers that are not finite, and are in FP32, more often than steps were left out for it."""
    lost = [b for a, b in zip(own, fp32, strict=False) if math.isfinite(b) and not math.isfinite(a)]
    return Gap(math.inf, lost[0], lost[-1], math.nan, len(lost), is_few=True) if len(lost) > skipped else None


def _share_left_out(own: Shown, fp32: Shown) -> float:
    return (len(own.skipped) - len(fp32.skipped)) / max(1, len(own.losses))


def _are_roundings(own: Sequence[float], fp32: Sequence[float]) -> bool:
    """Whether a row is 0 in FP32 from beginning to end, and no count: what a 16-bit copy differs by from its master."""
    return len(fp32) >= _FEWEST and not any(fp32) and not all(x.is_integer() for x in own)


def _are_scaled(own: Sequence[float], fp32: Sequence[float]) -> bool:
    """Whether numbers are FP32's times a loss scale."""
    pairs = [(a, b) for a, b in zip(own, fp32, strict=False) if a * b > 0 and math.isfinite(a * b)]
    powers = [math.log2(a / b) for a, b in pairs]
    near = _NEAR_POWER if len(powers) > _FEWEST else _AT_POWER  # one of a few is near a power of two by chance
    scaled = [p for p in powers if p > _SCALED and abs(p - round(p)) < near]
    return bool(powers) and len(scaled) > _MOST * len(powers)
