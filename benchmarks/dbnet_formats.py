"""DBNet in BF16 beside FP16 and FP32, on a CPU: H-mean and applied steps, same pictures and seeds.

    python benchmarks/dbnet_formats.py --out benchmarks/results/dbnet_formats_cpu.md

Every run is `floatline train`'s own loop, on pictures of 64 pixels; the two losses at the end are of a batch of the
full size, where FP16's sums leave its range.
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

from floatline.systems import dbnet
from floatline.training.trainer import Trainer
from floatline.workload import load_target

SMALL = ("image_size=64", "num_images=64", "held_out=64", "words=2")


@dataclass(frozen=True)
class Arm:
    """A way to train: variant and precision; and how many seeds are worth it."""

    title: str
    target: str
    precision: str
    seeds: int | None = None


ARMS = (
    Arm("FP32", "dbnet", "fp32"),
    Arm("`fp16-mixed`", "dbnet", "fp16-mixed"),
    Arm("`bf16-mixed`", "dbnet", "bf16-mixed"),
    Arm("`steep` in `fp16-mixed`", "dbnet:steep", "fp16-mixed", seeds=1),
    Arm("`steep` in `bf16-mixed`", "dbnet:steep", "bf16-mixed", seeds=1),
)


def train(arm: Arm, *, seed: int, steps: int) -> dict[str, float]:
    """H-mean, and the share of steps that were applied."""
    pairs = (*SMALL, f"total_steps={steps}", f"precision={arm.precision}")
    result = Trainer(load_target(arm.target, pairs=pairs).build(seed), folder=None, steps=steps, seed=seed).run()
    metric = math.nan if result.metric is None else result.metric
    return {"hmean": metric, "applied": result.applied / result.attempted}


def first_loss(precision: str) -> float:
    """What `dbnet:broken` reports of its first batch: step and sums in the format of the predictions."""
    pairs = (f"precision={precision}", "num_images=16", "held_out=1")
    loss = Trainer(load_target("dbnet:broken", pairs=pairs).build(0), folder=None, steps=1, seed=0).run().last_loss
    return math.nan if loss is None else loss


def describe(rows: dict[str, list[dict[str, float]]], losses: dict[str, float], *, steps: int) -> str:
    """The tables."""
    reference = [row["hmean"] for row in rows["FP32"]]
    config = dbnet.Config(image_size=64, num_images=64, held_out=64, words=2)
    baseline = dbnet.measure_baseline(dbnet.find_scenes(config)[1])
    lines = [
        f"# DBNet in BF16 beside FP16, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
        "",
        f"{steps} steps, 64 pictures of 64 pixels, {platform.machine()} CPU, torch {torch.__version__}. H-mean on 64",
        f"held-out pictures (brightness alone: {baseline:.3f}); the difference is of the same seeds, mean and range.",
        "",
        "| trained in | H-mean of each seed | mean | less FP32's | steps applied |",
        "|---|---|---:|---:|---:|",
    ]
    for title, found in rows.items():
        values = [row["hmean"] for row in found]
        apart = [a - b for a, b in zip(values, reference, strict=False)]
        change = "" if title == "FP32" else f"{statistics.fmean(apart):+.3f} ({min(apart):+.3f} to {max(apart):+.3f})"
        each, mean = ", ".join(f"{value:.3f}" for value in values), f"{statistics.fmean(values):.3f}"
        if math.isnan(sum(values)):
            each, mean, change = "none: the guard stopped it", "", ""
        applied = statistics.fmean(row["applied"] for row in found)
        lines.append(f"| {title} | {each} | {mean} | {change} | {100 * applied:.0f} % |")
    lines += ["", "| `dbnet:broken`, 16 dense pages of 128 pixels | its first loss |", "|---|---:|"]
    lines += [f"| {title} | {loss:.3f} |" for title, loss in losses.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kept", type=Path, help="JSON file that results are kept in, to go on after an interruption")
    parser.add_argument("--out", type=Path, help="Markdown file for the tables")
    arguments = parser.parse_args()
    kept: dict[str, dict[str, float]] = {}
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
    losses = {
        title: first_loss(plan) for title, plan in (("FP32", "fp32"), ("FP16", "fp16-mixed"), ("BF16", "bf16-mixed"))
    }
    text = describe(rows, losses, steps=arguments.steps)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
