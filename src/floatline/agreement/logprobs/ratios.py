"""What two lists of log-probs say of each other: ratios out of a band, divergence, and the tokens that carry it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from floatline.agreement.logprobs.files import Scored

_MOST = 5


@dataclass(frozen=True)
class Carrier:
    """A token that carries part of the divergence.

    Args:
        sequence: Number of its sequence.
        position: Its place in the sequence.
        token: Its id.
        ratio: exp(ours - theirs).
        share: Its part of the whole divergence.
    """

    sequence: int
    position: int
    token: int
    ratio: float
    share: float


@dataclass(frozen=True)
class Ratios:
    """Ours against theirs, token by token.

    Args:
        num_tokens: Tokens that both have a log-prob of.
        outside: Share of ratios exp(ours - theirs) outside of the band.
        kl: Divergence of theirs from ours over one sequence, the mean over sequences.
        mean_gap: Mean of |ours - theirs|.
        largest: The ratio farthest from 1.
        carriers: The tokens that carry the most of the divergence.
    """

    num_tokens: int
    outside: float
    kl: float
    mean_gap: float
    largest: float
    carriers: tuple[Carrier, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "num_tokens": self.num_tokens,
            "outside": self.outside,
            "kl": self.kl,
            "mean_gap": self.mean_gap,
            "largest": self.largest,
            "carriers": [vars(one) for one in self.carriers],
        }


def measure_ratios(ours: Tensor, theirs: Tensor, sequences: Sequence[Scored], band: tuple[float, float]) -> Ratios:
    """Compare two lists of log-probs.

    Numerics:
        The divergence of a token is r - 1 - log r with r = exp(ours - theirs), which is never negative and, over tokens
        that theirs has drawn, estimates the divergence of theirs from ours without bias. Float64.
        Checked by tests/agreement/logprobs/test_ratios.py.

    Args:
        ours: Log-probs by the model, one after the other.
        theirs: Those of the file; NaN where there is none.
        sequences: What they belong to.
        band: Lowest and highest ratio that is inside.
    """
    known = theirs.isfinite()
    gap = torch.where(known, ours - theirs, 0.0)
    ratio = gap.exp()
    parts = torch.where(known, ratio - 1 - gap, 0.0)
    whole = float(parts.sum())
    outside = known & ((ratio < band[0]) | (ratio > band[1]))
    num = int(known.sum())
    places = [
        (i, one.start + k, int(one.tokens[one.start + k]))
        for i, one in enumerate(sequences)
        for k in range(len(one.logprobs))
    ]
    order = cast("list[int]", parts.argsort(descending=True)[:_MOST].tolist())
    carriers = tuple(
        Carrier(*places[i], ratio=float(ratio[i]), share=float(parts[i]) / whole)
        for i in order
        if whole and parts[i] > 0
    )
    return Ratios(
        num_tokens=num,
        outside=float(outside.sum()) / max(num, 1),
        kl=whole / max(len(sequences), 1),
        mean_gap=float(gap.abs().sum()) / max(num, 1),
        largest=float(ratio[int(gap.abs().argmax())]),
        carriers=carriers,
    )
