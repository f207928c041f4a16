"""The BPR loss, as it should be written and as the team wrote it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def bpr(scores: Tensor) -> Tensor:
    """Bayesian personalised ranking: what was taken scores higher than what was not.

    Numerics:
        `logsigmoid` takes no logarithm of a rounded number: finite for all finite differences.

    Args:
        scores: Of the item that was taken and of the other, of shape (B, 2).
    """
    return -F.logsigmoid(scores[:, 0] - scores[:, 1]).mean()


def log_of_sigmoid(scores: Tensor) -> Tensor:
    """The team's loss, with the eps that was meant to keep it finite.

    Numerics:
        Under autocast the product with +1 and -1 is FP16, and so is all up to the logarithm. sigmoid(x) is 0 there
        below -17.4, and 1e-8 is 0 too: the smallest FP16 number is 5.96e-8. log(0) is -inf, its gradient NaN.

    Args:
        scores: Of the item that was taken and of the other, of shape (B, 2).
    """
    weight = torch.tensor([[1.0], [-1.0]], device=scores.device, dtype=scores.dtype)
    difference = torch.matmul(scores, weight)
    return -torch.mean(torch.log(torch.sigmoid(difference) + 1e-8))


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {"logsigmoid": bpr, "log-of-sigmoid": log_of_sigmoid}
