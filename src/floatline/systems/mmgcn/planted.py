"""Planted tastes: users and items in clusters that features show and popularity does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from floatline.systems.mmgcn.interactions import Interactions, split

# Popularity inside a taste falls with the rank as rank^-SKEW: some are liked far more than others, in every taste.
_SKEW = 0.6
# How often one hub is taken by one user.
_HUB_SHARE = 0.9
# Features are not centred, as those that come out of a ReLU are not: all items share a part.
_SHARED, _SPREAD = 1.0, 0.6


def plant(
    *,
    num_users: int,
    num_items: int,
    num_tastes: int,
    interactions: int,
    noise: float,
    hubs: int,
    modalities: Mapping[str, int],
    feature_scale: float,
    feature_offset: float,
    holdout: float,
    seed: int,
) -> Interactions:
    """Interactions of users who take what is of their taste, and features that show an item's taste.

    Each modality shows the taste with noise of its own, so that several say more than one. A list of the most popular
    items serves each taste with a fraction of its places: what is learnt about tastes is what beats it.
    """
    generator = torch.Generator().manual_seed(seed)
    user_taste = torch.randint(num_tastes, (num_users,), generator=generator)
    # Dealt out in turn, so that no taste is without items.
    item_taste = torch.arange(num_items)[torch.randperm(num_items, generator=generator)] % num_tastes
    drawn = _draw(user_taste, item_taste, num_tastes, interactions, noise, generator)
    # The hubs are the first items: which taste they are of was dealt out by chance.
    popular = torch.rand(num_users, hubs, generator=generator) < _HUB_SHARE
    hub_user, hub_item = popular.nonzero(as_tuple=True)
    keys = cast("Tensor", torch.cat([drawn, hub_user * num_items + hub_item]).unique())
    pairs = torch.stack([keys // num_items, keys % num_items])
    train, held_out = split(pairs, holdout=holdout, generator=generator)
    features = {
        name: feature_offset + feature_scale * _features(item_taste, num_tastes, width, generator)
        for name, width in modalities.items()
    }
    return Interactions(num_users, num_items, train, held_out, features)


def _draw(
    user_taste: Tensor, item_taste: Tensor, num_tastes: int, interactions: int, noise: float, generator: torch.Generator
) -> Tensor:
    """Keys of pairs, with repetitions: places in the list of a taste, those at the front more often."""
    num_users, num_items = len(user_taste), len(item_taste)
    by_taste = item_taste.argsort(stable=True)
    sizes = torch.bincount(item_taste, minlength=num_tastes)
    starts = sizes.cumsum(0) - sizes
    users = torch.arange(num_users).repeat_interleave(interactions)
    tastes = user_taste[users]
    strays = torch.rand(len(users), generator=generator) < noise
    tastes[strays] = torch.randint(num_tastes, (int(strays.sum()),), generator=generator)
    # u ** (1 / (1 - skew)) has the density of ranks that fall as rank ** -skew.
    place = torch.rand(len(users), generator=generator).pow(1 / (1 - _SKEW)) * sizes[tastes]
    items = by_taste[starts[tastes] + place.long().clamp(max=sizes[tastes] - 1)]
    return users * num_items + items


def _features(item_taste: Tensor, num_tastes: int, width: int, generator: torch.Generator) -> Tensor:
    shared = torch.rand(width, generator=generator)
    centres = torch.randn(num_tastes, width, generator=generator)
    noise = torch.randn(len(item_taste), width, generator=generator)
    return _SHARED * shared + _SPREAD * (centres[item_taste] + noise)
