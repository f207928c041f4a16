"""What each process says of itself, so that processes can be told apart: its weights, and its first bad loss."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch

from floatline.manifests.samples import is_measured, sample
from floatline.optim.mesh import local_part
from floatline.precision.live_holdings import NamedWeight
from floatline.probe.watch.events import BackwardEvent
from floatline.probe.watch.loop import Watch


def digest_weights(weights: Iterable[NamedWeight]) -> str:
    """A digest of samples of the weights, those aside that processes hold parts of."""
    found = hashlib.sha256()
    with torch.no_grad():
        for weight in sorted(weights, key=lambda weight: weight.name):
            if is_measured(weight.tensor) and local_part(weight.tensor) is weight.tensor:
                bits = sample(weight.tensor).contiguous().view(torch.uint8).cpu().numpy()
                found.update(weight.name.encode())
                found.update(bits.tobytes())
    return found.hexdigest()[:16]


def find_bad_loss(seen: Watch) -> int | None:
    """The first step whose loss was not finite in this process; reads what is still on a device."""
    seen.settle()
    passes = (event for event in seen.events if isinstance(event, BackwardEvent))
    return next((event.step for event in passes if not math.isfinite(event.loss)), None)
