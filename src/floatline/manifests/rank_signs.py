"""What each process says of itself, so that processes can be told apart: its weights, and its first bad loss."""

from __future__ import annotations

import math
from collections.abc import Iterable

from floatline.precision.live_holdings import NamedWeight
from floatline.probe.scripts.weight_digest import digest_weights
from floatline.probe.watch.events import BackwardEvent
from floatline.probe.watch.loop import Watch


def digest_named(weights: Iterable[NamedWeight]) -> str:
    """A digest of the weights of modules, by their names."""
    return digest_weights((weight.name, weight.tensor) for weight in sorted(weights, key=lambda weight: weight.name))


def find_bad_loss(seen: Watch) -> int | None:
    """The first step whose loss was not finite in this process; reads what is still on a device."""
    seen.settle()
    passes = (event for event in seen.events if isinstance(event, BackwardEvent))
    return next((event.step for event in passes if not math.isfinite(event.loss)), None)
