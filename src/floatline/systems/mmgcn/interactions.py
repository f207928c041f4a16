"""Interactions: who took what, split into training and held-out, the items' features, and batches of triples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from floatline.errors import TargetError


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


_MOST_DRAWS = 50

Batch = tuple[tuple[Tensor, Tensor, Tensor], tuple[()]]


def make_batches(data: Interactions, *, batch_size: int, passes: int, seed: int) -> list[Batch]:
    """Training pairs, each with an item that the user did not take; order and items follow from the seed.

    Args:
        data: The pairs.
        batch_size: Triples in a batch; the last of a pass may have fewer.
        passes: How often every pair is there, each time with another item beside it: a few fixed ones are learnt by
            heart.
        seed: Of order and items.
    """
    generator = torch.Generator().manual_seed(seed)
    batches: list[Batch] = []
    for _ in range(passes):
        order = torch.randperm(data.train.shape[1], generator=generator)
        users, positives = data.train[:, order]
        negatives = _draw_negatives(data, users, generator)
        for start in range(0, len(users), batch_size):
            part = slice(start, start + batch_size)
            batches.append(((users[part], positives[part], negatives[part]), ()))
    return batches


def _draw_negatives(data: Interactions, users: Tensor, generator: torch.Generator) -> Tensor:
    keys = data.train_keys()
    negatives = torch.randint(data.num_items, users.shape, generator=generator)
    for _ in range(_MOST_DRAWS):
        wanted = users * data.num_items + negatives
        found = keys[torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)] == wanted
        if not bool(found.any()):
            return negatives
        negatives[found] = torch.randint(data.num_items, (int(found.sum()),), generator=generator)
    raise TargetError("Some users took nearly every item, so that none is left to compare with. Add items.")
