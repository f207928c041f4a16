"""Seeds: a script begins from the same random numbers, and its own seeds are heard and shifted."""

import random

import numpy as np
import torch

from floatline.probe.watch.patches import Patches
from floatline.running.seeds import Seeds


def draw(seed=None, shift=0, own=None):
    """Random numbers of a script, and what was heard of its own seeds."""
    patches, seeds = Patches(), Seeds(seed, shift=shift)
    seeds.begin(patches)
    try:
        if own is not None:
            torch.manual_seed(own)
            random.seed(own)
            np.random.seed(own)
        return [torch.rand(1).item(), random.random(), np.random.rand()], seeds.own
    finally:
        patches.undo()


def test_a_seed_makes_runs_alike():
    assert draw(seed=3) == draw(seed=3)
    assert draw(seed=3) != draw(seed=4)


def test_without_a_seed_nothing_is_seeded():
    assert draw() != draw()


def test_own_seeds_win_and_are_heard_with_their_lines():
    numbers, heard = draw(seed=3, own=11)
    assert numbers == draw(seed=4, own=11)[0]
    assert len(heard) == 3
    assert all(line.endswith(": 11") and "test_seeds.py" in line for line in heard)


def test_own_seeds_are_shifted():
    assert draw(own=11, shift=2)[0] == draw(own=13)[0]
    assert draw(own=11, shift=2)[0] != draw(own=11)[0]


def test_functions_are_put_back():
    before = torch.manual_seed, random.seed, np.random.seed
    draw(seed=1, own=2)
    assert (torch.manual_seed, random.seed, np.random.seed) == before


def test_a_seed_by_torchs_other_name_is_heard_and_raised():
    patches, seeds = Patches(), Seeds(None, shift=5)
    try:
        seeds.begin(patches)
        torch.random.manual_seed(7)
        drawn = torch.rand(3)
    finally:
        patches.undo()
    torch.manual_seed(12)
    assert torch.equal(drawn, torch.rand(3))
    assert [line.rpartition(": ")[2] for line in seeds.own] == ["7"]
