"""Folk remedies on the distillation of a language model: validation perplexity of each against FP32, same seeds.

    python benchmarks/distill_remedies.py --steps 60 --seeds 3

Every run is `floatline train`'s own loop. Pure FP16 weights under torch's Adam have no place there: that arm is the
plain loop of a diagnosis, and the step of its first NaN is told.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch

from floatline.numerics import HalfOnCPU
from floatline.plans.presets import resolve_plan
from floatline.probe.runs.runs import run_target
from floatline.systems.distill import Config, team_loop
from floatline.systems.distill.model import unigram_perplexity
from floatline.training.trainer import Trainer
from floatline.workload import load_target


@dataclass(frozen=True)
class Arm:
    """A way to train: variant, settings, plan; and how many seeds are worth it."""

    title: str
    target: str = "distill"
    settings: tuple[str, ...] = ()
    plan: str | None = None
    seeds: int | None = None


ARMS = (
    Arm("FP32", plan="fp32"),
    Arm("`fp16-mixed`", plan="fp16-mixed"),
    Arm("`fp16-true`, exact master", plan="fp16-true"),
    Arm("`clamped-loss`: clamp(ce, 0, 6), clamp(loss, 0, 6)", target="distill:clamped-loss"),
    Arm("the same without a teacher", target="distill:clamped-loss", settings=("kd_weight=0", "feature_weight=0")),
    Arm("`clamped-logits`: clamp(logits, -5, 5)", target="distill:clamped-logits"),
    Arm("`norm-skip`: no step with a norm above 2.0", target="distill:norm-skip"),
    Arm("without a teacher (kd_weight 0)", settings=("kd_weight=0", "feature_weight=0")),
    Arm("preset `balanced`", target="distill:balanced", seeds=1),
    Arm("preset `ultra-conservative`", target="distill:ultra-conservative", seeds=1),
    Arm("`team-fix` with an exact master", target="distill:team-fix", plan="fp16-true"),
)


def train(arm: Arm, *, seed: int, steps: int) -> dict[str, float]:
    """Perplexity, and the share of steps that were applied."""
    workload = load_target(arm.target, pairs=arm.settings).build(seed)
    plan = resolve_plan(workload.precision if arm.plan is None else arm.plan)
    clip = resolve_plan(workload.precision).clip
    plan = plan.model_copy(update={"clip": clip, "update": None if plan.weights == "fp32" else "exact"})
    result = Trainer(workload, plan=plan, folder=None, steps=steps, seed=seed).run()
    metric = math.nan if result.metric is None else result.metric
    return {"perplexity": metric, "applied": result.applied / result.attempted, "loss": result.last_loss or math.nan}


def first_nan(seed: int) -> int:
    """Step of the first loss of pure FP16 weights under Adam that is not finite, counted from 1."""
    losses = run_target(load_target("distill:broken"), steps=6, seed=seed).losses
    return next(i for i, loss in enumerate(losses, 1) if not math.isfinite(loss))


def first_nan_of_team(seed: int) -> int | None:
    """The same of the team's whole fix, in their own loop."""
    with HalfOnCPU():
        return team_loop.train(steps=12, seed=seed).first_nan


def describe(
    rows: dict[str, list[dict[str, float]]], nan_steps: list[int], team_steps: list[int | None], *, steps: int
) -> str:
    """The table."""
    reference = [row["perplexity"] for row in rows["FP32"]]
    baseline = unigram_perplexity(Config())
    lines = [
        f"# Folk remedies on the distillation, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
        "",
        f"{steps} steps, {platform.machine()} CPU, torch {torch.__version__}. Validation perplexity of the student,",
        f"mean over the seeds; a unigram model has {baseline:.1f}. The change is the mean over the same seeds.",
        "",
        "| trained with | seeds | perplexity | against FP32 | steps applied |",
        "|---|---|---|---|---|",
    ]
    for title, found in rows.items():
        values = [row["perplexity"] for row in found]
        pairs = [100 * (a / b - 1) for a, b in zip(values, reference, strict=False)]
        change = "" if title == "FP32" else f"{statistics.fmean(pairs):+.1f} %"
        applied = statistics.fmean(row["applied"] for row in found)
        lines.append(f"| {title} | {len(values)} | {statistics.fmean(values):.1f} | {change} | {100 * applied:.0f} % |")
    said = ", ".join(str(step) for step in nan_steps)
    lines.append(f"| `broken`: FP16 weights under torch's Adam | {len(nan_steps)} | NaN | NaN from step {said} on | |")
    theirs = ", ".join(str(step) for step in team_steps)
    title = "`team-fix`: their whole fix in their loop, FP16 weights under AdamW"
    lines.append(f"| {title} | {len(team_steps)} | NaN | NaN from step {theirs} on | |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kept", type=Path, help="JSON file that results are kept in, to go on after an interruption")
    parser.add_argument("--out", type=Path, help="Markdown file for the table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kept = {}
    if arguments.kept is not None and arguments.kept.is_file():
        kept = json.loads(arguments.kept.read_text())
    for seed in range(arguments.seeds):
        for arm in ARMS:
            key = f"{arm.title} {seed}"
            if key in kept or seed >= (arm.seeds or arguments.seeds):
                continue
            kept[key] = train(arm, seed=seed, steps=arguments.steps)
            print(key, kept[key], flush=True)
            if arguments.kept is not None:
                arguments.kept.write_text(json.dumps(kept))
    rows = {
        arm.title: [kept[key] for s in range(arguments.seeds) if (key := f"{arm.title} {s}") in kept] for arm in ARMS
    }
    seeds = range(arguments.seeds)
    text = describe(
        rows, [first_nan(seed) for seed in seeds], [first_nan_of_team(seed) for seed in seeds], steps=arguments.steps
    )
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
