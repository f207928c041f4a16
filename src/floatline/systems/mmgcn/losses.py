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
    """The loss as the team began, and as MMGCN's published code has it: the scores are subtracted by a product.

    Numerics:
        Under autocast the product with +1 and -1 is FP16, and so is all up to the logarithm. Two scores beyond 65504
        are inf there, and inf - inf is NaN. sigmoid(x) is 0 below -17.4; log(0) is -inf, its gradient NaN.

    Args:
        scores: Of the item that was taken and of the other, of shape (B, 2).
    """
    difference = torch.matmul(scores, _signs(scores))
    return -torch.mean(torch.log(torch.sigmoid(difference)))


def log_of_sigmoid_eps(scores: Tensor) -> Tensor:
    """The same with the eps that was meant to keep it finite.

    Numerics:
        1e-8 is 0 in FP16, whose smallest number is 5.96e-8: the logarithm is still one of 0. NaN plus eps is NaN.

    Args:
        scores: Of the item that was taken and of the other, of shape (B, 2).
    """
    difference = torch.matmul(scores, _signs(scores))
    return -torch.mean(torch.log(torch.sigmoid(difference) + 1e-8))


def _signs(scores: Tensor) -> Tensor:
    return torch.tensor([[1.0], [-1.0]], device=scores.device, dtype=scores.dtype)


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "logsigmoid": bpr,
    "log-of-sigmoid": log_of_sigmoid,
    "log-of-sigmoid-eps": log_of_sigmoid_eps,
}
