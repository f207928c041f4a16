"""DBNet's loss: balanced cross-entropy with hard negatives, dice on the step, L1 on the threshold."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from floatline.systems.dbnet.model import ArithmeticName, Predicted

# Negatives for each positive as in the paper, and what the terms weigh as in the code of its authors.
_NEGATIVES = 3
_WEIGHT_BCE, _WEIGHT_THRESHOLD = 5.0, 10.0
_EPS = 1e-6


def compute_loss(
    predicted: Predicted, text: Tensor, text_mask: Tensor, threshold: Tensor, threshold_mask: Tensor
) -> Tensor:
    """The loss in FP32.

    Args:
        predicted: What the model says.
        text: 1 inside of shrunk words.
        text_mask: 0 where a word is to be ignored.
        threshold: The threshold to learn.
        threshold_mask: 1 where it is learnt.
    """
    with torch.autocast(text.device.type, enabled=False):
        wide = Predicted(*(each.float() for each in predicted))
        return add_terms(wide, text, text_mask, threshold, threshold_mask)


def compute_loss_as_it_comes(
    predicted: Predicted, text: Tensor, text_mask: Tensor, threshold: Tensor, threshold_mask: Tensor
) -> Tensor:
    """The same loss where `.float()` was forgotten: out of autocast's hands, and in the format of the predictions.

    Switching autocast off casts nothing. The predictions are FP16 already, and the targets and all sums follow them.
    """
    with torch.autocast(text.device.type, enabled=False):
        return add_terms(predicted, text, text_mask, threshold, threshold_mask)


def add_terms(
    predicted: Predicted, text: Tensor, text_mask: Tensor, threshold: Tensor, threshold_mask: Tensor
) -> Tensor:
    """The three terms, in the format of the predictions.

    Numerics:
        Every sum is over pixels. In FP16 a count above 65,504 is inf, and a term that is divided by it is 0, with a
        gradient of 0: no error, no NaN, and that term learns nothing from that batch.
    """
    text, text_mask, threshold, threshold_mask = (
        target.to(predicted.binary.dtype) for target in (text, text_mask, threshold, threshold_mask)
    )
    losses = F.binary_cross_entropy_with_logits(predicted.logits, text, reduction="none").flatten()
    positive, negative = (text * text_mask).flatten(), ((1 - text) * text_mask).flatten()
    # The hardest negatives, without waiting for the device; where there are fewer than that, the rest is 0.
    hardest = (losses * negative).sort(descending=True).values
    rank = torch.arange(len(hardest), device=hardest.device)
    chosen = (rank < _NEGATIVES * positive.count_nonzero()) & (hardest > 0)
    counted = torch.cat([positive, chosen.to(positive.dtype)])
    bce = (torch.cat([losses, hardest]) * counted).sum() / (counted.sum() + _EPS)
    binary = predicted.binary.flatten()
    dice = 1 - 2 * (binary * positive).sum() / ((binary * text_mask.flatten() + positive).sum() + _EPS)
    off = (predicted.threshold - threshold).abs() * threshold_mask
    l1 = off.sum() / (threshold_mask.sum() + _EPS)
    return dice + _WEIGHT_BCE * bce + _WEIGHT_THRESHOLD * l1


LOSSES: dict[ArithmeticName, Callable[..., Tensor]] = {
    "fp32": compute_loss,
    "as-it-comes": compute_loss_as_it_comes,
}
