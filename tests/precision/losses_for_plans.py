"""Functions that plans in test_applied_plan.py name; with one that another module has imported by name."""

import torch
from torch import nn


def dice(logits, target):
    p = torch.sigmoid(logits)
    both = (p * target).sum()
    return 1 - 2 * both / (p.sum() + target.sum())


def seen_dtypes(x, *, more=None):
    """What it computes with."""
    return x.dtype, None if more is None else more.dtype, torch.is_autocast_enabled("cpu")


def squares(x):
    big = x * 300
    total = (big * big).mean()
    return total * 1.0


def adversary(logits):
    return -torch.log(1 - torch.sigmoid(logits)).mean()


def numbers(x):
    yield x


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 300)

    def scores(self, x):
        return x @ self.weight

    @staticmethod
    def norm(x):
        return x / x.square().sum(-1, keepdim=True).sqrt()

    def forward(self, x):
        return self.norm(self.scores(x))


def make_scaled(factor):
    def scaled(x):
        return (x * factor).sum()

    return scaled
