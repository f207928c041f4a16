"""Samples: which samples were in batches that were skipped as outliers, so that none is lost for good."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from floatline.numerics.moving import send

# Samples of skipped batches that are remembered.
ROOM = 4096
# Steps after which a batch that comes again is no repetition of the fault that it may be.
APART = 32
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = (Tensor, nn.Parameter)
# Elements of a sample are summed in so many parts, by turns, and the sums joined by an odd factor: order counts.
_PARTS = 4
_ODD = 0x9E3779B97F4A7C15 - 2**64


class Samples:
    """Looks at what the model is given, and remembers the samples of batches that are skipped.

    A sample is known by a number that is made of its bits, whatever batch it is in and wherever it stands there: what
    is shuffled again in each epoch is recognised, what is augmented at random is not. Nothing waits for the device.

    Numerics:
        Sums and products of integers, modulo 2**64: exact, in any order. Two different samples have the same number
        hardly ever for floating-point data, and seldom for short rows of small integers. Checked by
        tests/guard/step/test_samples.py.

    Args:
        model: Its forward passes in training are looked at.
        device: Where the numbers are kept.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.skipped = torch.zeros(2, ROOM, dtype=torch.int64, device=device)
        """Numbers of samples, and the step in which each was skipped first, counted from 1; 0 where there is none."""
        self._step = torch.ones((), dtype=torch.int64, device=device)
        self._now: list[Tensor] = []
        self._hook = model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and module.training and not torch.compiler.is_compiling():
            found = number_samples([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])
            if found is not None:
                self._now.append(send(found, self.skipped.device))

    @torch.no_grad()
    def were_skipped(self) -> Tensor:
        """Whether a sample of the batch was in one that was skipped, some time ago."""
        if not self._now:
            return torch.zeros((), dtype=torch.bool, device=self.skipped.device)
        long_ago = (self.skipped[1] > 0) & (self._step - self.skipped[1] >= APART)
        return ((torch.cat(self._now)[:, None] == self.skipped[0]) & long_ago).any()

    @torch.no_grad()
    def note(self, skipped: Tensor) -> None:
        """The step is over; remember its samples where it was skipped as an outlier."""
        if self._now:
            numbers = torch.cat(self._now)[-ROOM:]
            again = (numbers[:, None] == self.skipped[0]).any(1)  # the step in which it was skipped first counts
            rows = torch.stack([numbers, torch.where(again, 0, self._step)])
            moved = torch.cat([self.skipped[:, len(numbers) :], rows], 1)
            self.skipped.copy_(torch.where(skipped, moved, self.skipped))
        self._step += 1
        self._now.clear()

    def drop(self) -> None:
        """Forget what a step that raised has shown."""
        self._now.clear()

    def remove(self) -> None:
        """Look no further."""
        self._hook.remove()

    def state(self) -> dict[str, Tensor]:
        """What is carried from step to step, by name."""
        return {"samples.skipped": self.skipped, "samples.step": self._step}


@torch.no_grad()
def number_samples(tensors: Sequence[Tensor]) -> Tensor | None:
    """A number for each sample, int64; None where there is no tensor whose first dimension is that of samples."""
    plain = [t for t in tensors if t.ndim and t.numel() and type(t) in _PLAIN and t.layout is torch.strided]
    total: Tensor | None = None
    for tensor in (t for t in plain if len(t) == len(plain[0]) and t.element_size() in _INTS):
        bits = tensor.detach().contiguous().view(_INTS[tensor.element_size()]).view(len(tensor), -1)
        for part in range(_PARTS):
            own = bits[:, part::_PARTS].sum(1, dtype=torch.int64)
            total = own if total is None else send(total, own.device) * _ODD + own
    return total
