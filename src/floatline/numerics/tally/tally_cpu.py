"""How often each bit pattern occurs in a 16- or 8-bit tensor on a CPU: by torch, or by a compiled loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

_SMALL = 1 << 20  # values: below, threads cost more than they bring
_LARGE = 1 << 25  # values: from here on a compiled loop is worth the wait for its compiler
_WORD = 8  # bytes
_MOST_WORDS = 1 << 30  # in a part: a word adds 2 to a 32-bit counter at most


def pattern_counts(x: Tensor) -> Tensor:
    """How often each pattern occurs; 16-bit ones without their sign bit.

    Numerics:
        Exact, and the same by either way. Checked by tests/numerics/test_tally_cpu.py over every pattern.

    Args:
        x: A 16- or 8-bit tensor on a CPU, of any layout.
    """
    flat = x.contiguous().view(-1)
    if flat.numel() >= _LARGE:
        loop = compiled_loop()
        if loop is not None:
            return count_compiled(flat, loop)
    return count_by_torch(flat)


def count_by_torch(flat: Tensor) -> Tensor:
    """`bincount` of the patterns."""
    carrier, mask = (torch.int16, 0x7FFF) if flat.element_size() == 2 else (torch.uint8, 0xFF)
    patterns = flat.view(carrier) & mask
    if patterns.numel() < _SMALL:
        return torch.bincount(patterns.to(torch.int64), minlength=mask + 1)
    # torch counts on one core; the parts are counted side by side (the interpreter lock is released).
    parts = patterns.chunk(torch.get_num_threads())
    with ThreadPoolExecutor(len(parts)) as pool:
        return torch.stack(list(pool.map(functools.partial(torch.bincount, minlength=mask + 1), parts))).sum(dim=0)


@functools.cache
def compiled_loop() -> Callable[..., None] | None:
    """The loop, compiled on the first call; None where numba is not installed, does not load, or must not compile."""
    try:
        import numba
    except ImportError:  # also raised by a numba that is too old for the NumPy beside it
        return None
    if cast("Any", numba).config.DISABLE_JIT:  # the plain loop would take minutes
        return None
    from floatline.numerics.tally import tally_numba

    return cast("Callable[..., None]", cast("ModuleType", tally_numba).count_words)


def count_compiled(flat: Tensor, loop: Callable[..., None]) -> Tensor:
    """The patterns counted four to a word, by as many threads as torch may use.

    Bytes are counted in pairs, as 16-bit patterns: how often each byte occurs follows from how often each pair does.
    """
    import numpy as np

    bytes_ = flat.view(torch.uint8)
    first = -bytes_.data_ptr() % _WORD  # a view may begin inside a word
    num_words = max(bytes_.numel() - first, 0) // _WORD
    end = first + num_words * _WORD
    rest = torch.cat([bytes_[:first], bytes_[end:]]).view(flat.dtype)
    words = cast("Any", bytes_[first:end].numpy()).view(np.uint64)

    pairs = flat.element_size() == 1
    mask = 0xFFFF if pairs else 0x7FFF
    num_parts = max(min(torch.get_num_threads(), num_words), -(-num_words // _MOST_WORDS), 1)
    parts = np.array_split(words, num_parts)
    tables = [np.zeros((2, mask + 1), dtype=np.uint32) for _ in parts]
    masks = [np.uint64(mask)] * num_parts
    with ThreadPoolExecutor(min(torch.get_num_threads(), num_parts)) as pool:
        list(pool.map(loop, parts, masks, tables))
    total = torch.from_numpy(np.sum(tables, axis=(0, 1), dtype=np.int64))
    if pairs:
        square = total.view(0x100, 0x100)
        total = square.sum(dim=0) + square.sum(dim=1)
    return total + count_by_torch(rest)
