"""Terms: what a comparison asks, settled before the first arm runs."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from floatline.base.plain_records import from_plain, to_plain
from floatline.errors import ComparisonError, suggest

Scale = Literal["log", "log-error", "difference"]
"""How two values of a metric are compared; see `pairs.excess`."""

LOOKS = (3, 5, 8, 12, 20)
MARGINS = (0.01, 0.02)
LANGUAGE_MODEL_MARGINS = (0.0025, 0.005)
_UNLIKELY = 0.05
_SKEWED_ERROR, _OTHER_ERROR, _SMALL_ERROR = 1.6, 2.0, 4.0  # in units of alpha; the last one below the usual alpha
_ALPHA = 0.05


@dataclass(frozen=True)
class Terms:
    """What is asked of a candidate: which metric, how close, after how many seeds.

    Args:
        metric: Name of the metric, for people.
        higher_is_better: True for accuracy or H-mean, False for a loss.
        scale: 'log' compares the metric itself, ln(B/A); 'log-error' compares what is missing to 1,
            ln((1-B)/(1-A)), for a higher-is-better metric near 1; 'difference' compares B - A in the metric's
            own unit, for a metric that can be zero or negative. The margins are in the same unit.
        margins: (delta1, delta2). Up to delta1 worse is a PASS, from delta2 on a FAIL.
        looks: Numbers of seeds at which the result is looked at. The last one is the most that is run.
        alpha: Chance of each one-sided error, over all looks together.
        horizon: Steps of the real training, where it is longer than the tested one; None: the tested steps.
        language_model: The metric is a language model's loss: the notes then say what 1 % is worth.
        resolution: The step in which the metric moves, such as 1 / items; None reads it from the values.
        rare: The share of failing seeds that a PASS must rule out; None: as many as the looks take.

    Raises:
        ComparisonError: A value that no comparison can be made with.
    """

    metric: str = "loss"
    higher_is_better: bool = False
    scale: Scale = "log"
    margins: tuple[float, float] = MARGINS
    looks: tuple[int, ...] = LOOKS
    alpha: float = _ALPHA
    horizon: int | None = None
    language_model: bool = False
    resolution: float | None = None
    rare: float | None = None

    def __post_init__(self) -> None:
        if self.scale not in get_args(Scale):
            raise ComparisonError(f"Scale {self.scale!r} is not known. {suggest(self.scale, get_args(Scale))}")
        if self.scale == "log-error" and not self.higher_is_better:
            raise ComparisonError("Scale 'log-error' is for a higher-is-better metric. Use 'log', or higher_is_better.")
        first, second = self.margins
        if not 0 < first < second < math.inf:
            raise ComparisonError(
                f"Margins {first:g} and {second:g} do not rise from above 0. Use such as 0.01 and 0.02."
            )
        check_looks(self.looks)
        if not 0 < self.alpha < 0.5:
            raise ComparisonError(f"alpha {self.alpha:g} is not between 0 and 0.5. Use 0.05.")
        if self.resolution is not None and not 0 < self.resolution < math.inf:
            raise ComparisonError(f"A resolution of {self.resolution:g} is no step. Use such as 0.001.")
        if self.rare is not None and self.looks[-1] < (needed := seeds_to_bound(self.rare)):
            raise ComparisonError(
                f"{self.looks[-1]} seeds cannot rule out {100 * self.rare:g} % failing ones. Run {needed}."
            )
        if self.horizon is not None and self.horizon < 1:
            raise ComparisonError(f"A horizon of {self.horizon} steps trains nothing. Use 1 or more, or leave it out.")

    @property
    def unit(self) -> str:
        """What the differences are in: 'percent' for the two log scales, else 'metric'."""
        return "metric" if self.scale == "difference" else "percent"

    def show(self, value: float) -> str:
        """A difference for people, with its direction in words: 0.31 % worse, 0.31 % better."""
        side = " worse" if value > 0 else " better" if value < 0 else ""
        return f"{self.size(value)}{side}"

    def size(self, value: float) -> str:
        """A size without a direction: 0.31 %, 0.0031 % where two digits would show none, or the metric's own unit."""
        if self.unit == "metric":
            return f"{abs(value):.3g}"
        percent = abs(100 * value)
        if 0 < percent < 5e-5:
            return "below 0.0001 %"
        return f"{percent:.2f} %" if percent == 0 or percent >= 0.01 else f"{percent:.4f} %"

    def error(self, *, paired: bool) -> float:
        """The chance of each one-sided error, over all looks together, under noise up to an exponential's skewness.

        Numerics:
            1.6 alpha for the usual paired looks, and 2 alpha for others and for arms that are not paired, by
            simulation at 5 %: see `statistics.outward`. Skewness adds more to smaller ones: 4 alpha from 0.1 % on.
        """
        if self.alpha < _ALPHA:
            return _SMALL_ERROR * self.alpha
        return (_SKEWED_ERROR if paired and self.looks == LOOKS else _OTHER_ERROR) * self.alpha

    def as_json(self) -> dict[str, Any]:
        """Plain data, fit for JSON."""
        return to_plain(self)

    @classmethod
    def from_json(cls, data: Any) -> Terms:
        """The terms that `as_json` wrote; ComparisonError for anything else."""
        return from_plain(cls, data)


def check_looks(looks: tuple[int, ...]) -> None:
    """Refuse looks that do not rise, or that begin below 2 seeds, where there is no spread to see."""
    if not looks or looks[0] < 2 or any(b <= a for a, b in itertools.pairwise(looks)):
        raise ComparisonError(f"Looks {looks} must rise, from 2 or more seeds. Use such as {LOOKS}.")


def share_unseen(num: int) -> float:
    """The largest share of failing seeds at which this many good ones in a row are still seen in one study of 20."""
    return 1.0 - _UNLIKELY ** (1.0 / num)


def seeds_to_bound(share: float) -> int:
    """How many good seeds in a row bound the share of failing ones by this.

    Raises:
        ComparisonError: It is no share.
    """
    if not 0 < share < 1:
        raise ComparisonError(f"A share of {share:g} failing seeds is not between 0 and 1. Use such as 0.1.")
    return math.ceil(math.log(_UNLIKELY) / math.log(1.0 - share))


def looks_between(least: int, most: int, rare: float | None = None) -> tuple[int, ...]:
    """The usual looks where at least and at most so many seeds are run: the first at `least`, the last at `most`.

    A share of failing seeds that is to be ruled out raises the last look to as many seeds as that takes.

    Raises:
        ComparisonError: Fewer seeds than the smallest look, or a first look behind the last.
    """
    most = most if rare is None else max(most, seeds_to_bound(rare))
    if min(least, most) < LOOKS[0]:
        raise ComparisonError(f"{min(least, most)} seeds are fewer than the smallest look. Use {LOOKS[0]} or more.")
    if least > most:
        raise ComparisonError(f"At least {least} seeds and at most {most} cannot be. Lower the first of them.")
    return tuple(dict.fromkeys((least, *(look for look in LOOKS if least < look < most), most)))


def words_of(terms: Terms) -> list[str]:
    """The options of `floatline validate` that ask for these terms, but for the metric and its direction."""
    words = ["--margin", *(f"{margin:g}" for margin in terms.margins)] if terms.margins != MARGINS else []
    words += ["--scale", terms.scale] if terms.scale != "log" else []
    words += ["--language-model"] if terms.language_model else []
    words += ["--horizon", str(terms.horizon)] if terms.horizon is not None else []
    words += ["--resolution", f"{terms.resolution:g}"] if terms.resolution is not None else []
    words += ["--rare", f"{terms.rare:g}"] if terms.rare is not None else []
    words += ["--min-seeds", str(terms.looks[0])] if terms.looks[0] != LOOKS[0] else []
    return words + (["--max-seeds", str(terms.looks[-1])] if terms.looks[-1] != LOOKS[-1] else [])
