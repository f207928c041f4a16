"""All hazards, and the draw of the plant that a seed and a number stand for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

from tests.plants.choices import CHOICES
from tests.plants.hosts_of_scripts import read_hosts
from tests.plants.loops import LOOPS
from tests.plants.losses import LOSSES
from tests.plants.planting import Hazard, Plant, draw
from tests.plants.states import STATES

HAZARDS: tuple[Hazard, ...] = (*STATES, *CHOICES, *LOSSES, *LOOPS)
hosts = cache(read_hosts)


def draw_number(seed: int, number: int, attempt: int, *, control: bool, hazards: Sequence[Hazard] = HAZARDS) -> Plant:
    """The plant of this seed and number; the same in every process.

    Args:
        seed: Of the whole set.
        number: Of the plant; numbers walk through all hazards, in an order that the seed draws.
        attempt: How many draws of it were thrown away before.
        control: Draw the harmless form.
        hazards: What is drawn from.
    """
    order = list(hazards)
    random.Random(f"{seed} order {number // len(order)}").shuffle(order)
    hazard = order[number % len(order)]
    rng = random.Random(f"{seed} {number} {attempt} {control}")
    return draw(hazard, hosts(), rng, control=control)
