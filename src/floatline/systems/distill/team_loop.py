"""The team's whole fix as their document has it: FP16 weights, AdamW, clamps, clipping, and batches left out."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch

from floatline.systems.distill import VARIANTS, Config, build

_log = logging.getLogger(__name__)
_CLIP, _LARGEST_NORM, _MOST_NAN = 0.5, 2.0, 10


@dataclass(frozen=True)
class TeamRun:
    """What their loop came to.

    Args:
        losses: Of every batch, as it was.
        applied: Batches whose step was made.
        skipped: Batches left out for their norm.
        perplexity: Of the student at the end; NaN where its weights are.
    """

    losses: tuple[float, ...]
    applied: int
    skipped: int
    perplexity: float

    @property
    def first_nan(self) -> int | None:
        """The first batch, counted from 1, whose loss is not finite."""
        return next((i for i, loss in enumerate(self.losses, 1) if not math.isfinite(loss)), None)


def train(steps: int = 30, seed: int = 0) -> TeamRun:
    """Their loop and their numbers on FP16 weights.

    Args:
        steps: Batches.
        seed: Of weights and batches; `distill:broken` and the plans of this project begin with the same weights.
    """
    workload = build(Config.model_validate(VARIANTS["team-fix"]), seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = workload.model.to(device).half()
    optimizer = workload.make_optimizer(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    losses: list[float] = []
    applied = skipped = in_a_row = 0
    for step in range(steps):
        inputs, targets = workload.batches[step % len(workload.batches)]
        optimizer.zero_grad()
        loss = workload.compute_loss([x.to(device) for x in inputs], [y.to(device) for y in targets])
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            in_a_row += 1
            if in_a_row >= _MOST_NAN:
                _log.warning("Too many NaN batches, stopping training")
                break
            continue
        in_a_row = 0
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, _CLIP)
        if float(norm) > _LARGEST_NORM or bool(torch.isnan(norm)):
            _log.warning("Skipping unstable gradient step")
            skipped += 1
            continue
        optimizer.step()
        applied += 1
    with torch.no_grad():
        metric = workload.evaluate(model) if workload.evaluate is not None else math.nan
    return TeamRun(tuple(losses), applied, skipped, metric)
