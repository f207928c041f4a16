"""How often each rule errs: simulated studies of a candidate that is truly 0, 1, 2 or 3 % worse.

python benchmarks/validation_power.py [--studies 4000]

In the first table noise is normal. A paired study draws the differences of its pairs with a standard deviation of 1 %;
an unpaired one draws each arm with 1 %, so that its differences spread by 1.41 %. Margins are 1 % and 2 %. The second
table is about other noise: how often a candidate passes that is worse by just the margin.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from floatline.validation.verdict.pairs import ArmRun, Pair
from floatline.validation.verdict.power import USUAL_SPREADS, judge_look, judge_studies, plan_seeds, seeds_needed
from floatline.validation.verdict.resolution import least_spread
from floatline.validation.verdict.statistics import (
    chance_to_cross,
    computed_factors,
    critical_factors,
    nominal_level,
    quantile,
    reach,
    skewness_of,
)
from floatline.validation.verdict.terms import LOOKS, Terms
from floatline.validation.verdict.unpaired import unpaired_interval

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
        skew = skewness_of(pairs[:, :n])
        low, high = mean - reach(factor, n, -skew) * sd, mean + reach(factor, n, skew) * sd
        passes = ~done & quiet & (high <= TERMS.margins[0])
        fails = ~done & (low >= TERMS.margins[1])
        ends = passes | fails | (~done & quiet & (low > TERMS.margins[0]) & (high <= TERMS.margins[1]))
        passed, failed, done = passed | passes, failed | fails, done | ends
        seeds[ends] = n
    return passed, failed, seeds


Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def lognormal(sigma: float) -> Draw:
    """Skewed upwards."""
    mean, variance = math.exp(sigma**2 / 2), (math.exp(sigma**2) - 1) * math.exp(sigma**2)
    return lambda rng, size: (np.exp(sigma * rng.standard_normal(size)) - mean) / math.sqrt(variance)


def with_bad_seeds(share: float) -> Draw:
    """A share of seeds is worse by ten spreads of the others."""
    mean, variance = 3.0 * share, 0.09 + 9.0 * share * (1.0 - share)

    def draw(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
        noise = 0.3 * rng.standard_normal(size) + 3.0 * (rng.random(size) < share)
        return (noise - mean) / math.sqrt(variance)

    return draw


def following(share: float) -> Draw:
    """Each seed's difference takes over a share of the last one's."""

    def draw(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
        noise = rng.standard_normal(size)
        for place in range(1, size[1]):
            noise[:, place] = share * noise[:, place - 1] + math.sqrt(1 - share**2) * noise[:, place]
        return noise

    return draw


def in_two_groups(width: float = 0.1) -> Draw:
    """A coin decides for each seed whether it ends above or below, which is all that differs."""

    def draw(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
        sides = np.where(rng.random(size) < 0.5, 1.0, -1.0)
        return (sides + width * rng.standard_normal(size)) / math.sqrt(1.0 + width**2)

    return draw


SYMMETRIC: dict[str, Draw] = {
    "normal": lambda rng, size: rng.standard_normal(size),
    "uniform": lambda rng, size: (rng.random(size) - 0.5) * math.sqrt(12.0),
    "Student's t, 3 degrees": lambda rng, size: rng.standard_t(3, size) / math.sqrt(3.0),
    "Student's t, 2 degrees": lambda rng, size: rng.standard_t(2, size),
    "Laplace": lambda rng, size: rng.laplace(size=size) / math.sqrt(2.0),
}
SKEWED: dict[str, Draw] = {
    "lognormal, sigma 0.1": lognormal(0.1),
    "lognormal, sigma 0.25": lognormal(0.25),
    "lognormal, sigma 0.5": lognormal(0.5),
    "gamma, shape 2": lambda rng, size: (rng.gamma(2.0, size=size) - 2.0) / math.sqrt(2.0),
    "exponential": lambda rng, size: rng.exponential(size=size) - 1.0,
}
MORE_SKEWED: dict[str, Draw] = {"lognormal, sigma 1": lognormal(1.0)}
OF_SEVERAL_KINDS: dict[str, Draw] = {
    "5 % of seeds bad": with_bad_seeds(0.05),
    "10 % of seeds bad": with_bad_seeds(0.1),
    "20 % of seeds bad": with_bad_seeds(0.2),
    "half the seeds +1, half -1": in_two_groups(),
}
NOT_INDEPENDENT: dict[str, Draw] = {
    "each follows the last by 0.3": following(0.3),
    "each follows the last by 0.5": following(0.5),
}
BEYOND: dict[str, tuple[str, Draw]] = {
    **{name: ("more skewed", draw) for name, draw in MORE_SKEWED.items()},
    **{name: ("several kinds of seeds", draw) for name, draw in OF_SEVERAL_KINDS.items()},
    **{name: ("not independent", draw) for name, draw in NOT_INDEPENDENT.items()},
}


def false_passes(draw: Draw, num_studies: int, seed: int = 0) -> tuple[float, float]:
    """At the margin: how often a plain t interval passes, and this protocol."""
    noise = SD * draw(np.random.default_rng(seed), (num_studies, LOOKS[-1]))
    at_margin = TERMS.margins[0] + noise
    return plain_studies(at_margin)[0], float(judge_studies(at_margin, TERMS).passed.mean())


UNPAIRED = (("normal", "normal"), ("normal", "exponential"), ("exponential", "exponential"))


def unpaired_false_passes(
    reference: str, candidate: str, sizes: tuple[int, int], num_studies: int, seed: int = 0
) -> tuple[float, float]:
    """At the margin, where no seeds are shared: how often Welch's interval passes, and this one.

    The candidate spreads three times as far as FP32.
    """
    rng, draws = np.random.default_rng([seed, *sizes]), {**SYMMETRIC, **SKEWED}
    ours = 0.4 * SD * draws[reference](rng, (num_studies, sizes[0]))
    theirs = TERMS.margins[0] + 1.2 * SD * draws[candidate](rng, (num_studies, sizes[1]))
    looks = [unpaired_interval(a, b) for a, b in zip(ours, theirs, strict=True)]
    passes = np.mean([look.high <= TERMS.margins[0] for look in looks])
    parts = [values.var(axis=1, ddof=1) / values.shape[1] for values in (ours, theirs)]
    freedom = sum(parts) ** 2 / sum(part**2 / (num - 1) for part, num in zip(parts, sizes, strict=True))
    table = np.linspace(1, sum(sizes), 60)
    factor = np.interp(freedom, table, [quantile(0.95, float(degrees)) for degrees in table])
    high = theirs.mean(axis=1) - ours.mean(axis=1) + factor * np.sqrt(sum(parts))
    return float((high <= TERMS.margins[0]).mean()), float(passes)


def _pair(seed: int, ours: float, theirs: float) -> Pair:
    return Pair(ArmRun("fp32", seed, ours), ArmRun("b", seed, theirs))


def coarse_passes(items: int, num_studies: int, seed: int = 0) -> tuple[float, float]:
    """An accuracy near 0.9 over so many items, worse by just the margin: passes without and with its resolution.

    The candidate loses some of the items that FP32 has right.
    """
    rng, terms = np.random.default_rng([seed, items]), Terms("accuracy", higher_is_better=True)
    lost = 1.0 - math.exp(-terms.margins[0])
    blind = seeing = 0
    for _ in range(num_studies):
        right = rng.binomial(items, 0.9, LOOKS[-1])
        theirs = right - rng.binomial(right, lost)
        pairs = [_pair(s, a / items, b / items) for s, (a, b) in enumerate(zip(right, theirs, strict=True))]
        ends = [run.metric for pair in pairs for run in (pair.reference, pair.candidate)]
        excesses = [pair.excess(terms) for pair in pairs]
        blind += any(_passes_blindly(excesses[:n], factor) for n, factor in zip(LOOKS, critical_factors(), strict=True))
        looks = [judge_look(excesses[:n], terms=terms, least_sd=least_spread(ends[: 2 * n], terms)) for n in LOOKS]
        seeing += any(look.verdict == "PASS" for look in looks)
    return blind / num_studies, seeing / num_studies


def _passes_blindly(excesses: list[float], factor: float) -> bool:
    return float(np.mean(excesses) + factor * np.std(excesses, ddof=1)) <= TERMS.margins[0]


def print_noise(num_studies: int, seed: int) -> None:
    """What other noise does to a PASS, as Markdown."""
    spoken_of = {name: ("yes", draw) for name, draw in {**SYMMETRIC, **SKEWED}.items()}
    beyond = {name: (f"no: {why}", draw) for name, (why, draw) in BEYOND.items()}
    print("| noise of the pairs | t interval | this interval | what a PASS speaks of |")
    print("|---|---:|---:|---|")
    for name, (spoken, draw) in {**spoken_of, **beyond}.items():
        cells = " | ".join(f"{100 * share:.1f} %" for share in false_passes(draw, num_studies, seed))
        print(f"| {name} | {cells} | {spoken} |")
    print("\n| arms without pairs: reference, candidate | runs | Welch's t interval | this interval |")
    print("|---|---:|---:|---:|")
    for (ours, theirs), sizes in itertools.product(UNPAIRED, ((3, 3), (20, 3), (8, 8))):
        shares = unpaired_false_passes(ours, theirs, sizes, num_studies // 10, seed)
        cells = " | ".join(f"{100 * share:.1f} %" for share in shares)
        print(f"| {ours}, {theirs} | {sizes[0]} and {sizes[1]} | {cells} |")
    print("\n| accuracy over | t interval | with its resolution |\n|---:|---:|---:|")
    for items in (50, 100, 200, 1000, 10_000):
        plain, seeing = coarse_passes(items, num_studies // 10, seed)
        print(f"| {items:,} items | {100 * plain:.1f} % | {100 * seeing:.1f} % |")
    print("\nWhat that costs where a candidate is equal:\n")
    print("| paired sd, normal noise | t interval: passes at truth 0 | seeds | this interval | seeds |")
    print("|---:|---:|---:|---:|---:|")
    for sd in (0.001, *USUAL_SPREADS[:3]):
        pairs = sd * np.random.default_rng(seed).standard_normal((num_studies, LOOKS[-1]))
        before, now = plain_studies(pairs), judge_studies(pairs, TERMS)
        old = f"{100 * before[0]:.1f} % | {before[1]:.1f}"
        print(f"| {100 * sd:g} % | {old} | {100 * now.passed.mean():.1f} % | {now.num_seeds.mean():.1f} |")


def plain_studies(pairs: np.ndarray) -> tuple[float, float]:
    """How often a t interval passes, and after how many seeds."""
    passed, seeds = np.zeros(len(pairs), dtype=bool), np.full(len(pairs), LOOKS[-1])
    for n, factor in zip(LOOKS, critical_factors(), strict=True):
        seen = pairs[:, :n]
        passes = ~passed & (seen.mean(axis=1) + factor * seen.std(axis=1, ddof=1) <= TERMS.margins[0])
        seeds[passes] = n
        passed |= passes
    return float(passed.mean()), float(seeds.mean())


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
    print("\nPaired sd 1 %; the two unpaired rules draw each arm with sd 1 %. Margins 1 % and 2 %.")
    print("\nA candidate that is truly worse by the first margin, 1 %: how often it passes.\n")
    print_noise(10 * given.studies, given.seed)
    print("\n| paired sd | seeds for 90 % power, fixed size | passes at truth 0, by looks | seeds used |")
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
