"""Numbers of a run as texts: each is written here once, and terminal and page show the same characters."""

from __future__ import annotations

import math
from collections.abc import Sequence

from floatline.ledger.progress import Spread
from floatline.report.document.document import Tone
from floatline.report.run.facts import OVER, LayerFacts, RunFacts, State

UNKNOWN = "—"
TONES: dict[State, Tone] = {
    "running": "good",
    "silent": "warn",
    "finished": "good",
    "interrupted": "warn",
    "stopped": "bad",
    "died": "bad",
}
NEAR = 2.0
"""Doublings below which a layer is near the ceiling."""


def show_number(value: float | None) -> str:
    """A loss or a norm."""
    return UNKNOWN if value is None else "NaN" if math.isnan(value) else f"{value:.4g}"


def show_scale(value: float | None) -> str:
    """A loss scale: whole numbers in full."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if math.isfinite(value) and value == round(value) else f"{value:.4g}"


def show_percent(share: float) -> str:
    """A share; what is above zero is never shown as 0, nor what is below one as 100 %."""
    if share == 0:
        return "0 %"
    if share < 0.0001:
        return "< 0.01 %"
    return f"{math.floor(share * 10_000) / 100:.2f} %"


def show_seconds(seconds: float | None) -> str:
    """A time in the two units that matter."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    days, hours, minutes, rest = whole // 86_400, whole // 3600 % 24, whole // 60 % 60, whole % 60
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next((i for i, (number, _) in enumerate(parts) if number), 3)
    shown = parts[first : first + 2]
    return " ".join(f"{number} {unit}" for i, (number, unit) in enumerate(shown) if number or not i)


def show_pace(run: RunFacts) -> str:
    """Steps a second, or seconds a step."""
    pace = run.steps_per_second
    if pace is None:
        return UNKNOWN
    if pace >= 100:
        return f"{pace:,.0f} steps/s"
    return f"{pace:.3g} steps/s" if pace >= 1 else f"{1 / pace:.3g} s/step"


def place_of(run: RunFacts) -> str:
    """How far it is: 'step 1,200 of 4,000'."""
    text = f"step {run.account.attempted:,}"
    return f"{text} of {run.steps:,}" if run.steps is not None else text


def time_of(run: RunFacts) -> str:
    """How long it takes, or took."""
    if run.state in OVER:
        return f"took {show_seconds(run.seconds)}" + ", pauses included" * bool(run.num_resumes)
    if run.state == "silent":
        return f"no new line for {show_seconds(run.age)}"
    if run.eta is not None:
        return f"ETA {show_seconds(run.eta)}"
    return "ETA unknown: say --steps" if run.steps is None else "ETA unknown yet"


def skips_of(run: RunFacts) -> str:
    """How many steps were skipped, of how many, and why."""
    account = run.account
    if not account.attempted:
        return "no step yet"
    if not account.num_skipped:
        return f"none of {account.attempted:,} steps"
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in account.skipped.items() if count)
    share = show_percent(account.num_skipped / account.attempted)
    return f"{account.num_skipped:,} of {account.attempted:,} ({share}): {reasons}"


def loss_of(run: RunFacts) -> str:
    """Where the loss came from, and what was no number."""
    account = run.account
    if account.last_loss is None:
        return "not recorded"
    text = f"from {show_number(account.first_loss)}"
    text += f", {account.num_nan_losses:,} NaN" if account.num_nan_losses else ""
    return text + (f", {account.num_inf_losses:,} infinite" if account.num_inf_losses else "")


def scale_of(run: RunFacts) -> str:
    """Where the scale has been."""
    account = run.account
    if account.scale is None:
        return "not recorded"
    if account.lowest_scale == account.highest_scale:
        return "never moved"
    reductions = f"{account.num_scale_reductions:,} reduction" + "s" * (account.num_scale_reductions != 1)
    return f"{show_scale(account.lowest_scale)} to {show_scale(account.highest_scale)}, {reductions}"


def norm_of(run: RunFacts) -> str:
    """Where the gradient norm has been."""
    total = Spread()
    for stretch in run.stretches:
        total.join(stretch.norm)
    if total.last is None:
        return "not recorded"
    bad = total.num_nan + total.num_inf
    text = f"{show_number(total.low)} to {show_number(total.high)}" if total.num else "never finite"
    return text + (f", {bad:,} not finite" if bad else "")


def headroom_of(layer: LayerFacts) -> str:
    """How far the layer is from the ceiling."""
    if layer.highest is None:
        return "never finite" if layer.num_nonfinite else "always zero"
    if layer.headroom is None:
        return f"norm {show_number(layer.norm)}"
    if layer.headroom >= 0:
        return f"≥ {layer.headroom:.1f} doublings"
    # No element is known to be so large: the norm is that of all of them together.
    return f"unknown: norm {2.0**-layer.headroom:.2g}× max"


def trouble_of(layer: LayerFacts) -> str:
    """How often its norm was no number; '' where it never was."""
    if not layer.num_nonfinite:
        return ""
    return f"inf/NaN in {layer.num_nonfinite:,} of {layer.num_records:,} records"


def tone_of(layer: LayerFacts) -> Tone:
    """What a layer is to a reader. That it overflows now and then is how a scale is searched for."""
    if layer.num_nonfinite and layer.highest is None:
        return "bad"
    if layer.headroom is not None and layer.headroom < 0 and not layer.num_nonfinite:
        return "unsure"
    return "warn" if layer.num_nonfinite or (layer.headroom is not None and layer.headroom < NEAR) else "good"


def spark(values: Sequence[float | None], width: int, *, steps: str) -> str:
    """The values as a line of characters, averaged where there are more than columns; a gap where none is finite.

    Args:
        values: In order; None where there is none.
        width: Columns at most.
        steps: Characters from the lowest to the highest, such as '▁▂▃▄▅▆▇█'.
    """
    num = min(width, len(values))
    if num < 1:
        return ""
    means: list[float | None] = []
    for column in range(num):
        held = values[column * len(values) // num : (column + 1) * len(values) // num]
        finite = [value for value in held if value is not None]
        means.append(math.fsum(finite) / len(finite) if finite else None)
    known = [mean for mean in means if mean is not None]
    if not known:
        return " " * num
    low, high = min(known), max(known)
    span = high - low
    return "".join(
        " " if mean is None else steps[min(int((mean - low) / span * len(steps)), len(steps) - 1) if span else 0]
        for mean in means
    )
