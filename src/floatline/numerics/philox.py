"""Random bits that depend on a key alone: Philox-4x32-10, the generator behind torch.cuda and triton."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(counters: tuple[Tensor, Tensor, Tensor, Tensor], *, seed: int) -> tuple[Tensor, ...]:
    """Four 32-bit words for each 128-bit counter, under a 64-bit key.

    Numerics:
        Bit for bit the Philox-4x32-10 of Salmon et al. 2011 (doi:10.1145/2063384.2063405), checked against
        its published vectors by tests/numerics/test_philox.py. Words are kept in int64 tensors, 0 to 2**32 - 1:
        torch has no arithmetic on uint32, and int64 products wrap to the right low 64 bits.

    Args:
        counters: Four int64 tensors of one shape, each 0 to 2**32 - 1.
        seed: The key, 0 to 2**64 - 1.
    """
    a, b, c, d = counters
    low, high = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, c = ((second >> 32) & _MASK) ^ b ^ low, ((first >> 32) & _MASK) ^ d ^ high
        b, d = second & _MASK, first & _MASK
        low, high = (low + _KEY_STEPS[0]) & _MASK, (high + _KEY_STEPS[1]) & _MASK
    return a, b, c, d


def random_words(
    count: int, *, seed: int, step: int = 0, stream: int = 0, start: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """`count` random 32-bit words, the i-th of which depends on (seed, step, stream, start + i) alone.

    Numerics:
        Uniform on 0 … 2**32 - 1. The same key gives the same words on every device and for every way of
        cutting the index range into pieces: a shard passes its offset as `start`.

    Args:
        count: How many words.
        seed: 64-bit key of the whole run.
        step: Training step, 0 to 2**32 - 1.
        stream: Which tensor, 0 to 2**32 - 1.
        start: Index of the first word.
        device: Where to make them.
    """
    first, last = start // 4, (start + count + 3) // 4
    index = torch.arange(first, last, dtype=torch.int64, device=device)
    constant = torch.zeros_like(index)
    counters = (index & _MASK, (index >> 32) & _MASK, constant + (step & _MASK), constant + (stream & _MASK))
    words = torch.stack(philox(counters, seed=seed), dim=1).flatten()
    return words[start - 4 * first :][:count]
