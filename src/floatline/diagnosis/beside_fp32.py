"""Beside: what a script showed, held against what it shows in FP32 from the same seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from floatline.base.texts import percent
from floatline.diagnosis.gaps import (
    APART,
    APART_READ,
    Gap,
    Shown,
    find_line_gaps,
    find_slight_gaps,
    goes_nowhere,
    is_printed,
    measure_line,
    measure_loss_gap,
    spread_like,
)

# Weights that are moved once by so much, which is what BF16 rounds away, show how far FP32 goes apart by itself.
NUDGE = 2.0**-8
_FEWEST = 4
# A run that makes fewer steps than this share of FP32's is apart from it, whatever its losses are.
_FEWER = 0.5

# Losses are slightly apart by this share of FP32's way, if it is so many times what a nudge does. Healthy scripts with
# a small floor have less; it is told of where a line is known that FP32 takes it away in.
_SLIGHTLY, _MANY_TIMES = 0.02, 20.0
# The same of one number, or a few, of their size.
_SLIGHTLY_READ = 0.03

DIVERGENCE = "optimization-divergence"
# A run in FP32 that does not grow by so much does not diverge.
_GROWN = 5.0

# Losses whose gap is to the second their own rounding are not apart, if gradients are FP32's but for the first: those
# of a model that has converged are small, and some rounding.
_SOUND, _EXPLAINED = 0.5, 0.5
# A step shows why losses are apart if it is by this share of what they are later.
_APART_YET = 0.5

# A mean of losses as it is printed is within them but for this share.
_NEAR = 0.01

RunInFP32 = Callable[[float], Shown | str]


@dataclass(frozen=True)
class StepErrors:
    """How far recorded steps are from their FP32 twins, which have the same weights and batch.

    Args:
        losses: By step: the error of the loss, of its size.
        gradients: The largest error of all gradients together; inf where it is not known.
    """

    losses: Mapping[int, float] = field(default_factory=dict[int, float])
    gradients: float = math.inf

    def explain(self, own: Shown, fp32: Shown) -> bool:
        """Whether a gap is but the rounding of the loss itself, which no gradient depends on.

        `1 - cosine` of a model that has converged is all rounding in 16 bits, and its gradients are not. Those of one
        that learns nothing more in FP32, either, are not asked.
        """
        num = min(len(own.losses), len(fp32.losses))
        apart = [abs(a - b) for a, b in zip(own.losses, fp32.losses, strict=False)]
        late = statistics.median(apart[num // 2 :]) if num else 0.0
        # Of a step in which nothing is apart yet, all that there is is rounding.
        steps = [step for step in self.losses if step < num and apart[step] > _APART_YET * late]
        shares = [self.losses[step] * abs(fp32.losses[step]) / max(apart[step], 1e-30) for step in steps]
        sound = self.gradients < _SOUND or goes_nowhere(fp32.losses)
        return bool(shares) and sound and statistics.median(shares) > _EXPLAINED


@dataclass(frozen=True)
class Beside:
    """What a comparison with FP32 came to.

    Args:
        reason: Why there is none; '' where there is one.
        gap: How far the losses are apart; None where there is no comparison.
        floor: The same of FP32 after a nudge of its weights; None where nobody asked.
        lines: Lines at which numbers are read that are apart, by 'FILE:LINE', farther than after a nudge.
        floors: The same of these after a nudge, where somebody asked.
        num_steps: Steps that were made, and those in FP32, where these are many more; None where they are not.
        least: The share of FP32's way from which losses are apart.
    """

    reason: str = ""
    gap: Gap | None = None
    floor: Gap | None = None
    lines: Mapping[str, Gap] = field(default_factory=dict[str, Gap])
    floors: Mapping[str, float] = field(default_factory=dict[str, float])
    num_steps: tuple[int, int] | None = None
    least: float = APART

    @property
    def is_apart(self) -> bool:
        """Whether 16 bits change what is learnt."""
        return self.gap is not None and self.gap.is_apart(self.least, self.floor)

    @property
    def is_only_printed(self) -> bool:
        """Whether nothing is apart but numbers that the script prints, which may be times."""
        return not self.is_apart and bool(self.lines) and all(is_printed(line) for line in self.lines)

    @property
    def apart(self) -> str:
        """What is apart, in words; '' where nothing is."""
        if self.num_steps is not None:
            own, fp32 = self.num_steps
            return f"it makes {own:,} steps, and in FP32, from the same seed, {fp32:,}"
        if self.gap is not None and self.is_apart:
            gap = self.gap
            seen = f"after {gap.num:,} steps the loss is {gap.own_last:.4g}, and in FP32, from the same seed, "
            return f"{seen}{gap.last:.4g} from {gap.first:.4g}; {self._nudged}"
        for line, gap in self.lines.items():
            own = f"{gap.own_last:.4g}" if math.isfinite(gap.own_last) else "what is not finite"
            read = f"{Path(line).name.partition('#')[0]} shows {own}, and in FP32, from the same seed, {gap.last:.4g}"
            apart = "" if self.gap is None else f"; the losses are apart by {percent(self.gap.spread, 1)} of FP32's way"
            return read + apart
        return ""

    @property
    def _nudged(self) -> str:
        floor = 0.0 if self.floor is None else self.floor.spread
        share = 0.0 if self.gap is None else self.gap.share
        return f"that is {percent(share)} of FP32's way, and a nudge of FP32's weights makes {percent(floor, 1)}"

    @property
    def together(self) -> str:
        """That nothing is apart, in words."""
        if self.gap is None:
            return ""
        apart = percent(self.gap.share, 1)
        words = f"beside FP32 from the same seed, {self.gap.num:,} steps: the losses are apart by {apart}"
        return f"{words} of the way that FP32's go" + ("" if self.floor is None else f"; {self._nudged}")


def compare_with_fp32(own: Shown, run: RunInFP32, errors: StepErrors | None = None) -> Beside:
    """Hold what a run showed against FP32.

    Args:
        own: What it showed.
        run: Runs the script in FP32 with a nudge of the weights, or 0; gives a text where that cannot be done.
        errors: What is known of recorded steps; None: nothing.
    """
    fp32 = run(0.0)
    if isinstance(fp32, str) or fp32.error:
        return Beside(fp32 if isinstance(fp32, str) else f"it ended with {fp32.error}")
    if len(own.losses) < _FEWER * len(fp32.losses) and len(fp32.losses) >= _FEWEST:
        return Beside(num_steps=(len(own.losses), len(fp32.losses)))
    gap, lines = measure_loss_gap(own, fp32), find_line_gaps(own, fp32)
    if gap is None and not lines:
        return Beside(f"too few steps have a finite loss, {len(own.losses)} here and {len(fp32.losses)} in FP32")
    if gap is not None and gap.is_apart(APART, None) and errors is not None and errors.explain(own, fp32):
        gap = replace(gap, share=0.0)
        lines = {line: found for line, found in lines.items() if not _shows_losses(line, own, fp32)}
    if gap is not None and not gap.is_apart(APART, None) and not lines:
        return Beside(gap=gap)
    nudged = run(NUDGE)
    if isinstance(nudged, str):
        return Beside(gap=gap, lines=lines)
    floor = measure_loss_gap(nudged, fp32)
    lines = _keep_apart(lines, own, fp32, nudged)
    is_apart = gap is not None and gap.is_apart(APART, floor)
    if lines or is_apart:  # one nudge may do little by chance
        other = run(-NUDGE)
        if not isinstance(other, str):
            floor = _wider(floor, measure_loss_gap(other, fp32))
            lines = _keep_apart(lines, own, fp32, other)
    floors = {line: spread_like(found, measure_line(line, nudged, fp32)) for line, found in lines.items()}
    return Beside(gap=gap, floor=floor, lines=lines, floors=floors)


def _wider(one: Gap | None, other: Gap | None) -> Gap | None:
    """The gap that spreads farther."""
    return max((gap for gap in (one, other) if gap is not None), key=lambda gap: gap.spread, default=None)


def _shows_losses(line: str, own: Shown, fp32: Shown) -> bool:
    """Whether the numbers of a line may be the losses, or means of them: in both runs they are within those."""
    return all(
        one.losses and min(one.losses) <= value * (1 + _NEAR) and value * (1 - _NEAR) <= max(one.losses)
        for one in (own, fp32)
        for value in one.lines.get(line, ())
    )


def look_closer(beside: Beside, own: Shown, run: RunInFP32) -> Beside | None:
    """The same with what is slightly apart as such, if a nudge makes next to nothing of that; None where nothing is.

    Args:
        beside: What a comparison came to.
        own: What the run showed.
        run: As in `compare_with_fp32`.
    """
    fp32 = run(0.0)
    if beside.gap is None or isinstance(fp32, str):
        return None
    lines = find_slight_gaps(own, fp32, _SLIGHTLY_READ)
    if beside.gap.share < _SLIGHTLY and not lines:
        return None
    nudged, other = run(NUDGE), run(-NUDGE)
    if isinstance(nudged, str) or isinstance(other, str):
        return None
    floor = _wider(measure_loss_gap(nudged, fp32), measure_loss_gap(other, fp32))
    if floor is not None and beside.gap.share > max(_SLIGHTLY, _MANY_TIMES * floor.spread):
        return replace(beside, floor=floor, least=_SLIGHTLY)
    floors = {
        line: max(spread_like(gap, measure_line(line, one, fp32)) for one in (nudged, other))
        for line, gap in lines.items()
    }
    lines = {line: gap for line, gap in lines.items() if gap.share > _MANY_TIMES * floors[line]}
    return replace(beside, floor=floor, lines=lines, floors=floors) if lines else None


def _keep_apart(lines: Mapping[str, Gap], own: Shown, fp32: Shown, nudged: Shown) -> dict[str, Gap]:
    """The lines whose numbers are farther from FP32's than after a nudge, and apart from those after a nudge, too."""
    kept: dict[str, Gap] = {}
    for line, found in lines.items():
        floors, again = measure_line(line, nudged, fp32), measure_line(line, own, nudged)
        near = math.isfinite(found.share) and not any(gap.is_apart(APART_READ, None) for gap in again)
        if not near and all(found.is_apart(APART_READ, floor) for floor in floors):
            kept[line] = found
    return kept


def keep_steady(beside: Beside, own: Shown, again: Shown | str) -> Beside:
    """What is apart without the numbers that are others when the same run is made again, such as times.

    Args:
        beside: What is apart.
        own: What the run showed.
        again: What it showed again, unwatched; a text where that could not be done.
    """
    if isinstance(again, str):
        return beside
    lines: dict[str, Gap] = {}
    for line, gap in beside.lines.items():
        moved = measure_line(line, again, own)
        if moved and all(gap.is_apart(APART_READ, floor) for floor in moved):
            lines[line] = gap
    return replace(beside, lines=lines)


def stays_sound(own: Shown, fp32: Shown, *, first_bad: int | None) -> str:
    """That FP32 does not fail or diverge where a run does, in words; '' where it does, or did not get as far.

    Args:
        own: What the run showed.
        fp32: The same in FP32.
        first_bad: The step at which something was not finite; None where all was.
    """
    losses = [abs(loss) for loss in fp32.losses]
    ours = [abs(loss) for loss in own.losses[: len(losses)]]
    grew = len(losses) >= len(own.losses) or max(ours, default=0.0) > _GROWN * max(ours[:1], default=0.0)
    reached = len(losses) > first_bad + 1 if first_bad is not None else grew
    if fp32.error or len(losses) < _FEWEST or not reached or not all(map(math.isfinite, losses)):
        return ""
    if max(losses) > _GROWN * max(losses[0], 1e-12):
        return ""
    way = f"from {fp32.losses[0]:.4g} to {fp32.losses[-1]:.4g}"
    return f"in FP32, from the same seed, all is finite: the loss goes {way} in {len(losses):,} steps"
