"""The loss: cross-entropy and distillation, weighted; on the text alone where the distillation is not finite."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from floatline.systems.distill.model import LossTerms


@dataclass(frozen=True)
class DistillationLoss:
    """Weighted sum of the terms.

    Where the distillation terms are not finite, the batch is trained on the text alone; that is chosen on the device,
    and the next batch chooses anew. The loss is then what was trained on, the cross-entropy's part; it is never made
    finite: a cross-entropy that is not stays so. `Distiller.kd_failures` counts such batches.

    Args:
        ce_weight: Of the cross-entropy.
        kd_weight: Of the distillation.
        router_weight: Of the router's own loss, which reaches no other weights.
        feature_weight: Of the states.
        clamp: Folk remedy: the cross-entropy and the sum are clamped to it, as people write it; None does not.
    """

    ce_weight: float
    kd_weight: float
    router_weight: float
    feature_weight: float
    clamp: float | None = None

    def __call__(self, terms: LossTerms, labels: Tensor) -> Tensor:
        """The loss of one batch."""
        ce = F.cross_entropy(terms.logits.float().flatten(0, 1), labels.flatten())
        if self.clamp is not None:
            ce = torch.clamp(ce, 0, self.clamp)
        taught = self.kd_weight * terms.kd + self.router_weight * terms.router + self.feature_weight * terms.feature
        loss = self.ce_weight * ce + torch.where(terms.sound, taught, 0.0)
        return loss if self.clamp is None else torch.clamp(loss, 0, self.clamp)
