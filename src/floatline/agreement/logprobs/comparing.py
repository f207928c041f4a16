"""A model's log-probs against a file that another engine made: drift, who is nearer to FP32, and what helps."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from floatline.agreement.arithmetic import Nudged, Widened
from floatline.agreement.distances import measure_apart, measure_distance, measure_excess, measure_noise
from floatline.agreement.logprobs.files import read_scored
from floatline.agreement.logprobs.ratios import Ratios, measure_ratios
from floatline.agreement.logprobs.remedies import TriedRemedy, try_remedies
from floatline.agreement.logprobs.scoring import score
from floatline.agreement.reading import Reading
from floatline.agreement.result import say
from floatline.errors import ParityError
from floatline.probe.watch.patches import unwrap

BAND = (0.9, 1.1)
NOT_SHOWN = (
    "What this does not show: whether training is worse for it. Ratios out of the band are a drift of numbers; compare "
    "rewards over seeds (floatline validate) before paying for a remedy."
)
_BF16 = 2**16  # units of float32


@dataclass(frozen=True)
class LogprobParity:
    """A model (A) and the log-probs that another engine (B) gave to the same tokens.

    Args:
        file: Where B's came from.
        reading: Distances to FP32, over the log-probs of all tokens.
        ratios: Token by token.
        band: Lowest and highest ratio that is inside.
        remedies: What was tried on the model's side.
        notes: What a reader must know.
        seconds: How long it took.
    """

    file: str
    reading: Reading
    ratios: Ratios
    band: tuple[float, float]
    remedies: tuple[TriedRemedy, ...] = ()
    notes: tuple[str, ...] = (NOT_SHOWN,)
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """'agree', 'farther' or 'wrong'."""
        return self.reading.verdict

    @property
    def best(self) -> TriedRemedy | None:
        """The remedy with the least divergence; None where none takes away a tenth of the model's as it is."""
        tried = [one for one in self.remedies if one.ratios is not None and one.ratios.kl < 0.9 * self.ratios.kl]
        return min(tried, key=lambda one: one.ratios.kl if one.ratios is not None else 0.0, default=None)

    @property
    def summary(self) -> str:
        """The verdict in one sentence."""
        low, high = self.band
        share = (
            f"{100 * self.ratios.outside:.3g} % of {self.ratios.num_tokens:,} ratios are outside [{low:g}, {high:g}]"
        )
        return f"{say(self.reading, 'the model', 'the file')}; {share}, KL {self.ratios.kl:.2g} a sequence"

    def __str__(self) -> str:
        lines = [self.summary]
        lines += [
            f"  carried by token {c.token} at position {c.position} of sequence {c.sequence}: ratio {c.ratio:.3g}, "
            f"{100 * c.share:.3g} % of the KL"
            for c in self.ratios.carriers[:3]
        ]
        if self.best is not None and self.best.ratios is not None:
            best = self.best.ratios
            lines.append(
                f"  nearest: {self.best.name}, {100 * best.outside:.3g} % outside, KL {best.kl:.2g} a sequence"
            )
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def as_json(self) -> dict[str, Any]:
        """Plain data, for `--format json`."""
        return {
            "file": self.file,
            "verdict": self.verdict,
            "side": self.reading.side,
            "summary": self.summary,
            "band": list(self.band),
            "ratios": self.ratios.as_json(),
            "reading": self.reading.as_json(),
            "remedies": [one.as_json() for one in self.remedies],
            "best": None if self.best is None else self.best.name,
            "notes": list(self.notes),
            "seconds": self.seconds,
        }


def compare_logprobs(
    model: nn.Module,
    file: str | Path,
    *,
    band: tuple[float, float] = BAND,
    batch_size: int = 8,
    remedies: bool = True,
) -> LogprobParity:
    """Score the tokens of a file with a model, and compare with the log-probs that the file has.

    Numerics:
        The model runs as it is, in its formats and under the autocast that is on; FP32 is the same model with
        everything widened to FP32. The file's formats are not known: rounding explains of it what BF16 explains of this
        model.

    Args:
        model: A causal language model: token ids to logits, or to an object that has them.
        file: JSON Lines or safetensors: tokens, and the log-probs of the last of them.
        band: Ratios inside of it are fine.
        batch_size: Sequences that the trainer scores at a time.
        remedies: Whether remedies are tried.

    Raises:
        ParityError: The file or the model is not of this kind.
    """
    start = time.perf_counter()
    if not 0 < band[0] < 1 < band[1]:
        raise ParityError(f"Band {band} does not hold the ratio 1. Give one such as 0.9 1.1.")
    sequences = read_scored(file)
    plain, training = unwrap(model), model.training
    model.eval()
    try:
        theirs = torch.cat([one.logprobs for one in sequences])
        ours = score(model, sequences, batch_size=batch_size)
        wide = copy.deepcopy(plain).float()
        exact = score(wide, sequences, batch_size=batch_size, modes=[Widened(torch.float32)])
        nudged = [
            score(wide, sequences, batch_size=batch_size, modes=[Nudged(seed, units=units), Widened(torch.float32)])
            for seed, units in ((1, 1), (1, _BF16), (2, _BF16))
        ]
        own = [score(plain, sequences, batch_size=batch_size, modes=[Nudged(seed)]) for seed in (1, 2)]
        tried = try_remedies(plain, sequences, theirs, exact, batch_size=batch_size, band=band) if remedies else ()
    finally:
        model.train(training)
    reading = _read(ours, theirs, exact, own, nudged)
    ratios = measure_ratios(ours, theirs, sequences, band)
    return LogprobParity(str(file), reading, ratios, band, tried, seconds=time.perf_counter() - start)


def _read(ours: Tensor, theirs: Tensor, exact: Tensor, own: list[Tensor], nudged: list[Tensor]) -> Reading:
    known = theirs.isfinite()
    x, y, truth = ours[known], theirs[known], exact[known]
    # Each token is a row: one that is wrong does not hide among thousands.
    x, y, truth = (one[:, None] for one in (x, y, truth))
    low = measure_noise(truth, [one[known, None] for one in nudged[1:]])
    of_own = measure_noise(x, [one[known, None] for one in own])
    noise = of_own if of_own.whole < low.whole else low
    excess_a, _ = measure_excess(x, truth, noise)
    excess_b, _ = measure_excess(y, truth, low)
    return Reading(
        name="log-probs",
        phase="forward",
        apart=measure_apart(x, y, truth),
        a=measure_distance(x, truth),
        b=measure_distance(y, truth),
        floor=measure_distance(nudged[0][known, None], truth),
        functions=None,
        excess_a=excess_a,
        excess_b=excess_b,
        excess_apart=measure_excess(y, x, low)[0],
        exact="FP32",
    )
