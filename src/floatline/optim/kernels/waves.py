"""Many tensors worked on as a few flat ones of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from floatline.numerics import foreach
from floatline.numerics.rounding import philox
from floatline.optim.survey import BLOCK, Entry

# Elements worked on at a time: what lies in between stays in the cache, and takes a bounded amount of memory.
WAVE = 1 << 20
_MASK = 0xFFFFFFFF


@dataclass(slots=True)
class WavePart:
    """An entry, the number of its step, and its tensors by name, flat and in one order."""

    entry: Entry
    step: float
    flat: dict[str, Tensor]


@dataclass(slots=True)
class Slice:
    """Elements `low` to `low + size` of a part, at `offset` in the wave."""

    part: WavePart
    low: int
    size: int
    offset: int

    def of(self, name: str) -> Tensor:
        """The slice of one tensor."""
        flat = self.part.flat[name]
        return flat if self.size == flat.numel() else flat[self.low : self.low + self.size]

    def scales_of(self, name: str) -> Tensor:
        """The scales of the blocks that the slice covers."""
        return self.part.flat[f"{name}_scale"][self.low // BLOCK : -(-(self.low + self.size) // BLOCK)]


@dataclass(slots=True)
class Wave:
    """Slices of one group and one kind.

    Args:
        slices: The slices.
        widths: What each takes in the wave: its size, or whole blocks where the wave is padded.
    """

    slices: list[Slice]
    widths: list[int]

    def views(self, name: str) -> list[Tensor]:
        """The slices of one tensor of each part."""
        return [s.of(name) for s in self.slices]

    def gather(self, name: str) -> Tensor:
        """The slices in one flat tensor; a view where there is only one and it needs no padding."""
        views = self.views(name)
        if any(width != s.size for s, width in zip(self.slices, self.widths, strict=True)):
            flat = torch.zeros(sum(self.widths), dtype=views[0].dtype, device=views[0].device)
            foreach.copy_(self.cut(flat), views)
            return flat
        return views[0] if len(views) == 1 else torch.cat(views)

    def cut(self, flat: Tensor) -> list[Tensor]:
        """The slices of a tensor that is laid out like the wave."""
        pieces = cast("tuple[Tensor, ...]", flat.split(self.widths))
        return [p if s.size == p.numel() else p[: s.size] for s, p in zip(self.slices, pieces, strict=True)]

    def scatter(self, name: str, flat: Tensor) -> None:
        """Write the slices back."""
        foreach.copy_(self.views(name), self.cut(flat))

    def gather_scales(self, name: str) -> Tensor:
        """The scales of all slices; whole blocks only."""
        return torch.cat([s.scales_of(name) for s in self.slices])

    def scatter_scales(self, name: str, scales: Tensor) -> None:
        """Write the scales back."""
        pieces = cast("tuple[Tensor, ...]", scales.split([width // BLOCK for width in self.widths]))
        foreach.copy_([s.scales_of(name) for s in self.slices], list(pieces))

    def random_words(self, seed: int, streams: list[int]) -> Tensor:
        """A random number of 32 bits for each element.

        Numerics:
            The same as `numerics.philox.random_words` for the element's stream, its parameter's step and its place
            in the whole tensor, however tensors are cut into waves or shards.

        Args:
            seed: Key of the run.
            streams: Stream of each slice.
        """
        return self._words(seed, streams, shared_by=1)

    def state_words(self, seed: int, streams: list[int]) -> Tensor:
        """A random number of 32 bits for each element's states, of which each state takes one half.

        Numerics:
            Elements 2·i and 2·i + 1 of the whole tensor share word i of `numerics.rounding.random_words`, the second
            with its halves exchanged. So the bits of one state are independent between elements, and within an element
            those of its two states; only the first state of an element has the bits of its neighbour's second.

        Args:
            seed: Key of the run.
            streams: Stream of each slice's states.
        """
        return self._words(seed, streams, shared_by=2)

    def _words(self, seed: int, streams: list[int], *, shared_by: int) -> Tensor:
        device = self.slices[0].part.entry.weight.device
        starts = [s.part.entry.start + s.low for s in self.slices]
        each = 4 * shared_by  # elements that a counter serves
        counters = [
            torch.arange(start // each, -(-(start + s.size) // each), device=device)
            for s, start in zip(self.slices, starts, strict=True)
        ]
        index = torch.cat(counters)
        counts = torch.tensor([len(c) for c in counters], device=device)
        steps = torch.tensor([int(s.part.step) for s in self.slices], device=device)
        stream = torch.tensor(streams, device=device).repeat_interleave(counts)
        key = (index & _MASK, index >> 32, steps.repeat_interleave(counts), stream)
        random = torch.stack(philox(key, seed=seed), dim=1).flatten()
        if shared_by == 2:
            random = torch.stack((random, (random >> 16) | ((random & 0xFFFF) << 16)), dim=1).flatten()
        if len(self.slices) == 1 and starts[0] % each == 0 and self.widths[0] == len(random):
            return random
        words = torch.zeros(sum(self.widths), dtype=torch.int64, device=device)
        place = 0
        for target, start, counter in zip(self.cut(words), starts, counters, strict=True):
            target.copy_(random[place + start % each :][: len(target)])
            place += each * len(counter)
        return words


def half_of(words: Tensor, index: int) -> Tensor:
    """The random numbers of one state of two: half of each word, where the upper half is read.

    Numerics:
        16 bits and a half: as many as bfloat16 cuts off, and a chance in 8 bits is right to 2**-17.

    Args:
        words: Numbers of 32 bits.
        index: 0 for the upper half, 1 for the lower.
    """
    half = words & 0xFFFF0000 if index == 0 else (words & 0xFFFF) << 16
    return half | 0x8000


def cut_into_waves(parts: list[WavePart], *, padded: bool) -> Iterator[Wave]:
    """Cut the parts into slices of whole blocks, the last of each excepted, and collect them.

    Args:
        parts: What to cut.
        padded: Whether every slice takes whole blocks in the wave.
    """
    slices: list[Slice] = []
    widths: list[int] = []
    total = 0
    for part in parts:
        numel = part.entry.weight.numel()
        low = 0
        while low < numel:
            room = WAVE - total
            size = min(numel - low, room - room % BLOCK)
            slices.append(Slice(part, low, size, total))
            widths.append(-(-size // BLOCK) * BLOCK if padded else size)
            total += widths[-1]
            low += size
            if total > WAVE - BLOCK:
                yield Wave(slices, widths)
                slices, widths, total = [], [], 0
    if slices:
        yield Wave(slices, widths)
