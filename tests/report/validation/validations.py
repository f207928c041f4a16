"""Validations made of plain numbers, judged by the real rules."""

import math
import random

from floatline.plans.presets import resolve_plan
from floatline.validation.result import LayerNumbers, PeakMemory, Speed, Validation
from floatline.validation.verdict.comparison import rank
from floatline.validation.verdict.pairs import BROKEN, NUDGED, REFERENCE, ArmRun
from floatline.validation.verdict.power import plan_seeds
from floatline.validation.verdict.terms import Terms
from floatline.validation.verdict.timing import compare_times
from floatline.validation.verdict.verdict import decide

STEPS = 2000
EVIL = ("<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "</script><!--|`*_\u2028")


def make_run(arm, seed, worse=0.0, *, spread=0.002, diverge_at=None, num_points=40, **changes) -> ArmRun:
    """One training whose loss falls from 4.2 to about 2.3, by `worse` above FP32's at the end."""
    noise = random.Random(f"{arm} {seed}")
    own = noise.gauss(0, spread) if arm != REFERENCE else 0.0
    base = random.Random(seed)
    level = 2.3 + 0.05 * base.random()
    curve = []
    for point in range(1, num_points + 1):
        share = point / num_points
        bump = 0.012 * math.sin(6 * share + seed) * (1 - share)
        wander = 1 + (own + worse) * share**0.5 + (noise.gauss(0, spread / 2) if arm != REFERENCE else 0.0)
        value = (level + 1.9 * math.exp(-5 * share) + bump) * wander
        step = round(STEPS * share)
        curve.append((step, math.nan if diverge_at and step >= diverge_at else value))
    first = [4.2 - 0.02 * k + 1e-3 * seed + (1e-5 * own if arm != REFERENCE else 0.0) for k in range(20)]
    if arm != REFERENCE:
        first = [value + 1e-6 for value in first]
    plain = {
        "metric": curve[-1][1],
        "diverged": diverge_at is not None,
        "start": 4.2,
        "curve": tuple(curve),
        "first_losses": tuple(first),
        "steps": STEPS,
        "applied": STEPS - (4 if "fp16" in arm else 0),
        "skipped": 4 if "fp16" in arm else 0,
        "weights_changed": True,
        "seconds": 31.0,
    }
    return ArmRun(arm, seed, **{**plain, **changes})


def make_validation(
    candidates=None, *, num_seeds=8, terms=None, target="examples/small_gpt.py", evil=False, bare=False, spread=0.002
) -> Validation:
    """A study of candidates given as {name: how much worse it is}.

    Args:
        candidates: By name; None: one that is as good as FP32. An infinite one diverges.
        num_seeds: Seeds of every arm.
        terms: None: the usual ones, for validation loss.
        target: As the user wrote it.
        evil: Every name, note and command is an attack on the page.
        bare: Nothing but the runs' ends.
        spread: Of a pair's difference.
    """
    candidates = {"fp16-mixed": 0.0002} if candidates is None else candidates
    terms = terms or Terms(metric=EVIL[0] if evil else "validation loss")
    module = f"blocks.{EVIL[1]}" if evil else "blocks.1.ff"
    runs = []
    for seed in range(num_seeds):
        runs.append(make_run(REFERENCE, seed))
        runs.append(make_run(NUDGED, seed, spread=spread / 4))
        runs.append(make_run(BROKEN, seed, 0.08, spread=spread))
        for name, worse in candidates.items():
            lost = 1200 if math.isinf(worse) and seed == 1 else None
            runs.append(make_run(name, seed, 0.0 if math.isinf(worse) else worse, spread=spread, diverge_at=lost))
    if bare:
        runs = [ArmRun(run.arm, run.seed, run.metric, diverged=run.diverged) for run in runs]
    plan = plan_seeds(0.005, terms=terms, seconds_per_seed=90, num_studies=200)
    compared = [decide(runs, candidate=name, terms=terms, plan=None if bare else plan) for name in candidates]
    if bare:
        return Validation(target, rank(compared), tuple(runs))
    speeds, memories = [], [make_memory(REFERENCE, 1.0)]
    for number, name in enumerate(candidates):
        noise = random.Random(number)
        ours = [0.0412 * math.exp(noise.gauss(0, 0.03)) for _ in range(40)]
        theirs = [time * (0.55 + 0.55 * number) * math.exp(noise.gauss(0, 0.05)) for time in ours]
        timing = compare_times(ours, theirs)
        speeds.append(Speed(name, timing, sorted(ours)[20], sorted(theirs)[20], first_seconds=1.93))
        memories.append(make_memory(name, 0.58 + 0.2 * number))
    why = (
        "it is not twice as small: the FP32 master weights and the Adam states are the same 382 MB in both arms, "
        f"36 % of the peak{EVIL[1] if evil else ''}"
    )
    times = {speed.arm: speed.timing.ratio for speed in speeds}
    return Validation(
        target=f"{target} {EVIL[2]}" if evil else target,
        comparisons=rank(compared, time_ratios=times),
        runs=tuple(runs),
        speed=tuple(speeds),
        memory=tuple(memories),
        layers={name: make_layers(module) for name in candidates},
        reasons=dict.fromkeys(candidates, (why,)),
        plans={
            name: resolve_plan("fp16-mixed").model_dump(mode="json", exclude_none=True)
            | ({"note": EVIL[2]} if evil else {})
            for name in candidates
        },
        environment={
            "floatline": "0.1.0",
            "torch": "2.13.0",
            "python": "3.11.2",
            "device": f"NVIDIA H200 {EVIL[1]}" if evil else "NVIDIA H200, CUDA 12.8",
            "commit": "1c8ed6e, with changes",
        },
        reproduce=f"floatline validate {target} --candidate fp16-mixed --seeds 20 {EVIL[0] if evil else ''}".strip(),
        seconds=1260.0,
    )


def make_memory(arm: str, share: float) -> PeakMemory:
    """Half of it is what precision does not change."""
    activations = round(820e6 * share)
    parts = {"weights": 127_000_000, "gradients": 127_000_000, "states": 255_000_000, "activations": activations}
    return PeakMemory(arm, sum(parts.values()) + 64_000_000, parts, device="cuda")


def make_layers(bad: str) -> tuple[LayerNumbers, ...]:
    """A small transformer, one module of which overflows."""
    layers = [LayerNumbers("embed", 14.2, 0.0, 0.99998, 1.0001)]
    for block in range(4):
        for part in ("norm1", "attn.qkv", "attn.out", "norm2", "ff.up", "ff.act", "ff.down"):
            name = f"blocks.{block}.{part}"
            learned = None if part == "ff.act" else 0.9999 - 0.0008 * block
            layers.append(
                LayerNumbers(name, 9.0 - 2.4 * block, 0.002 * block, learned, None if learned is None else 1.002)
            )
    layers.append(LayerNumbers(bad, -0.7, 0.14, 0.82, 0.71))
    layers.append(LayerNumbers("", 11.0, 0.0))
    return tuple(layers)
