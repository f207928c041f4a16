"""Interactions: who took what, split into training and held-out, and the items' features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Interactions:
    """The data of a recommender.

    Args:
        num_users: Users are 0 to num_users - 1.
        num_items: Items are 0 to num_items - 1.
        train: Pairs (user, item) of shape (2, E), each once.
        held_out: Pairs that the metric asks for, of shape (2, H).
        features: Modality to features of shape (num_items, width).
    """

    num_users: int
    num_items: int
    train: Tensor
    held_out: Tensor
    features: dict[str, Tensor]

    def train_keys(self) -> Tensor:
        """One sorted number for each training pair, to look pairs up by."""
        return (self.train[0] * self.num_items + self.train[1]).sort().values


def split(pairs: Tensor, *, holdout: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Training and held-out pairs, by chance; a user whose pairs would all be held out keeps them all."""
    out = torch.rand(pairs.shape[1], generator=generator) < holdout
    num_users = int(pairs[0].max()) + 1
    kept = torch.bincount(pairs[0][~out], minlength=num_users)
    out &= kept[pairs[0]] > 0
    return pairs[:, ~out], pairs[:, out]
