"""Batches of triples: a user, an item that was taken, and one that was not."""

from __future__ import annotations

import torch
from torch import Tensor

from floatline.errors import TargetError
from floatline.systems.mmgcn.interactions import Interactions

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
