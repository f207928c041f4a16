"""How often each rule errs: simulated studies of a candidate that is truly 0, 1, 2 or 3 % worse.

python benchmarks/validation_power.py [--studies 4000]

The noise of an arm is normal. A paired study draws the differences of its pairs with a standard deviation of 1 %;
an unpaired one draws each arm with 1 %, so that its differences spread by 1.41 %. Margins are 1 % and 2 %.
"""

from __future__ import annotations

import argparse
import datetime
import math
import platform
import time
from dataclasses import dataclass

import numpy as np

from floatline.validation.verdict.power import USUAL_SPREADS, judge_studies, plan_seeds, seeds_needed
from floatline.validation.verdict.statistics import (
    chance_to_cross,
    computed_factors,
    critical_factors,
    nominal_level,
    quantile,
)
from floatline.validation.verdict.terms import LOOKS, Terms

SD = 0.01
TRUTHS = (0.0, 0.01, 0.02, 0.03)
TERMS = Terms()

SINGLE = "one run each, 1 % / 2 %"
WELCH = 'Welch test on 3, "p > .05 = same"'
PEEKING = "paired t interval after every seed, not corrected"
BOOTSTRAP = "percentile bootstrap on 3 pairs"
PROTOCOL = "this protocol"
WITH_NOISE = "this protocol, noise-floor arm of sd 1 % too"


@dataclass(frozen=True)
class Row:
    """One rule: how often it passes and fails a candidate that is truly so much worse, and the seeds it takes."""

    rule: str
    passes: dict[float, float]
    fails: dict[float, float]
    seeds: dict[float, float]


def simulate(num_studies: int = 4000, seed: int = 0) -> list[Row]:
    """Every rule at every truth; the rules see the same draws."""
    rows = {name: Row(name, {}, {}, {}) for name in (SINGLE, WELCH, PEEKING, BOOTSTRAP, PROTOCOL, WITH_NOISE)}
    for truth in TRUTHS:
        rng = np.random.default_rng([seed, round(1000 * truth)])
        pairs = truth + SD * rng.standard_normal((num_studies, LOOKS[-1]))
        ours, theirs = SD * rng.standard_normal((2, num_studies, 3))
        noise = SD * rng.standard_normal((num_studies, LOOKS[-1]))
        results = {
            SINGLE: single_run(ours[:, 0], theirs[:, 0] + truth),
            WELCH: welch_test(ours, theirs + truth),
            PEEKING: peeking(pairs),
            BOOTSTRAP: bootstrap(pairs[:, :3], rng),
            PROTOCOL: protocol(pairs),
            WITH_NOISE: protocol(pairs, noise),
        }
        for name, (passes, fails, seeds) in results.items():
            rows[name].passes[truth] = float(passes.mean())
            rows[name].fails[truth] = float(fails.mean())
            rows[name].seeds[truth] = float(np.mean(seeds))
    return list(rows.values())


def single_run(ours: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """The usual comparison: within 1 % is good, over 2 % is bad."""
    difference = theirs - ours
    return difference <= TERMS.margins[0], difference >= TERMS.margins[1], 1


def welch_test(ours: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Two-sided at 5 %; no difference found is taken for none being there."""
    parts = [values.var(axis=1, ddof=1) / values.shape[1] for values in (ours, theirs)]
    variance = parts[0] + parts[1]
    t = np.abs(theirs.mean(axis=1) - ours.mean(axis=1)) / np.sqrt(variance)
    freedom = variance**2 / sum(part**2 / (ours.shape[1] - 1) for part in parts)
    # Between 2 and 4 degrees the quantile is smooth: a fine table is exact enough.
    table = np.linspace(2, 4, 41)
    limit = np.interp(freedom, table, [quantile(0.975, float(degrees)) for degrees in table])
    return t < limit, t >= limit, 3


def peeking(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A look after every seed, from 3 to 20, with the factor of a single look: the first that decides ends it."""
    done = np.zeros(len(pairs), dtype=bool)
    passed, failed, seeds = done.copy(), done.copy(), np.full(len(pairs), LOOKS[-1])
    for n in range(LOOKS[0], LOOKS[-1] + 1):
        seen = pairs[:, :n]
        half = quantile(0.95, n - 1) / math.sqrt(n) * seen.std(axis=1, ddof=1)
        passes = ~done & (seen.mean(axis=1) + half <= TERMS.margins[0])
        fails = ~done & (seen.mean(axis=1) - half >= TERMS.margins[1])
        passed, failed, done = passed | passes, failed | fails, done | passes | fails
        seeds[passes | fails] = n
    return passed, failed, seeds


def bootstrap(
    pairs: np.ndarray, rng: np.random.Generator, resamples: int = 1000
) -> tuple[np.ndarray, np.ndarray, float]:
    """The 5 % and 95 % points of resampled means, of one look."""
    picks = rng.integers(0, pairs.shape[1], (resamples, pairs.shape[1]))
    low, high = np.empty(len(pairs)), np.empty(len(pairs))
    for start in range(0, len(pairs), 500):
        means = pairs[start : start + 500][:, picks].mean(axis=2)
        low[start : start + 500], high[start : start + 500] = np.quantile(means, (0.05, 0.95), axis=1)
    return high <= TERMS.margins[0], low >= TERMS.margins[1], pairs.shape[1]


def protocol(pairs: np.ndarray, noise: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rule of the library; with a noise floor a PASS waits for a look at which FP32 itself is known well enough."""
    if noise is None:
        studies = judge_studies(pairs, TERMS)
        return studies.passed, studies.failed, studies.num_seeds
    done = np.zeros(len(pairs), dtype=bool)
    passed, failed, seeds = done.copy(), done.copy(), np.full(len(pairs), LOOKS[-1])
    for n, factor in zip(LOOKS, critical_factors(), strict=True):
        mean, sd = pairs[:, :n].mean(axis=1), pairs[:, :n].std(axis=1, ddof=1)
        quiet = quantile(0.95, n - 1) / math.sqrt(n) * noise[:, :n].std(axis=1, ddof=1) <= TERMS.margins[0] / 2
        low, high = mean - factor * sd, mean + factor * sd
        passes = ~done & quiet & (high <= TERMS.margins[0])
        fails = ~done & (low >= TERMS.margins[1])
        ends = passes | fails | (~done & quiet & (low > TERMS.margins[0]) & (high <= TERMS.margins[1]))
        passed, failed, done = passed | passes, failed | fails, done | ends
        seeds[ends] = n
    return passed, failed, seeds


def print_table(rows: list[Row]) -> None:
    """The table, as Markdown."""
    print("| rule | passes at true +1 % | at +2 % | at +3 % | fails at truth 0 | passes at truth 0 | seeds there |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        passes = " | ".join(f"{100 * row.passes[truth]:.1f} %" for truth in TRUTHS[1:])
        at_zero = f"{100 * row.fails[0.0]:.1f} % | {100 * row.passes[0.0]:.1f} % | {row.seeds[0.0]:.1f}"
        print(f"| {row.rule} | {passes} | {at_zero} |")


def main() -> None:
    """Print every table of the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    start = time.perf_counter()
    print("# The validation protocol: how often it errs\n")
    print(f"{datetime.date.today()}, {platform.machine()}, numpy {np.__version__}.")
    print("By `python benchmarks/validation_power.py`:")
    print(f"{given.studies:,} simulated studies for each cell, seed {given.seed}.\n")
    print_table(simulate(given.studies, given.seed))
    print("\nPaired sd 1 %; the two unpaired rules draw each arm with sd 1 %. Margins 1 % and 2 %.\n")
    print("| paired sd | seeds for 90 % power, fixed size | passes at truth 0, by looks | seeds used |")
    print("|---:|---:|---:|---:|")
    for sd in USUAL_SPREADS:
        plan = plan_seeds(sd, terms=TERMS, num_studies=given.studies)
        needed = seeds_needed(sd, TERMS.margins[0])
        print(f"| {100 * sd:g} % | {needed} | {100 * plan.pass_rate:.1f} % | {plan.expected_seeds:.1f} |")
    level = nominal_level(LOOKS)
    exact = computed_factors(LOOKS, level)
    print("\n| look | " + " | ".join(str(n) for n in LOOKS) + " | all looks err with |")
    print("|---|" + "---:|" * (len(LOOKS) + 1))
    for name, factors in (("k used", critical_factors()), (f"k computed, level {level:.4f}", exact)):
        cells = " | ".join(f"{factor:.3f}" for factor in factors)
        print(f"| {name} | {cells} | {100 * chance_to_cross(LOOKS, factors):.2f} % |")
    print(f"\n{time.perf_counter() - start:.1f} s in all.")


if __name__ == "__main__":
    main()
