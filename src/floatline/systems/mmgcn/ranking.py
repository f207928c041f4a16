"""Ranking: recall@K and NDCG@K over all items."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from floatline.systems.mmgcn.interactions import Interactions

_USERS_AT_ONCE = 1024


class Ranking:
    """Ranks every item for users, but for those that they have in training, and looks for what was held out.

    Args:
        data: Pairs of training are not ranked, held-out ones are asked for.
        top_k: Places of the list that are looked at.
        num_users: Users who are ranked, at most: the first ones with something held out.
    """

    def __init__(self, data: Interactions, *, top_k: int, num_users: int = 10_000) -> None:
        self._data = data
        self.top_k = min(top_k, data.num_items)
        self._users = data.held_out[0].unique()[:num_users]

    def recall(self, model: Any) -> float:
        """Mean share of a user's held-out items that are among the first K."""
        return self.measure(model)[0]

    def measure(self, model: Any) -> tuple[float, float]:
        """Recall@K and NDCG@K of a model: in the latter, hits count less further down, and the best order has 1."""
        nodes: Tensor = model.represent().float()
        users, items = nodes[: self._data.num_users], nodes[self._data.num_users :]
        device = nodes.device
        train, held_out = self._data.train.to(device), self._data.held_out.to(device)
        discounts = 1 / torch.arange(2, self.top_k + 2, device=device).log2()
        recalls: list[Tensor] = []
        ndcgs: list[Tensor] = []
        parts = cast("tuple[Tensor, ...]", self._users.to(device).split(_USERS_AT_ONCE))
        for part in parts:
            scores = (users[part] @ items.T).masked_fill(_rows(train, part, self._data), -torch.inf)
            asked = _rows(held_out, part, self._data)
            hits = asked.gather(1, scores.topk(self.top_k).indices).float()
            num_asked = asked.sum(1)
            recalls.append(hits.sum(1) / num_asked)
            best = discounts.cumsum(0)[num_asked.clamp(max=self.top_k) - 1]
            ndcgs.append((hits * discounts).sum(1) / best)
        return float(torch.cat(recalls).mean()), float(torch.cat(ndcgs).mean())


def _rows(pairs: Tensor, users: Tensor, data: Interactions) -> Tensor:
    """Which items these users have, as a table of users and items; users are sorted."""
    place = torch.searchsorted(users, pairs[0]).clamp(max=len(users) - 1)
    known = users[place] == pairs[0]
    table = torch.zeros(len(users), data.num_items, dtype=torch.bool, device=pairs.device)
    table[place[known], pairs[1][known]] = True
    return table
