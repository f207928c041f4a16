"""LoRA on an FP16 audio model, with and without a loss scale: accuracy, vanished gradients, lost updates; same seeds.

    python benchmarks/audio_lora_remedies.py --steps 60 --seeds 2 --out benchmarks/results/audio_lora_remedies_cpu.md

All arms start from the same adapters. FP16 adapters under torch's AdamW have no place in `floatline train`: those arms
are the plain loop of a diagnosis.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import math
import platform
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from floatline.probe.runs.runs import run_target
from floatline.systems.audio_lora.speech import WORDS
from floatline.training.trainer import Trainer
from floatline.workload import load_target


@dataclass(frozen=True)
class Arm:
    """A way to train: variant, plan, and whether the plain loop does it."""

    title: str
    target: str = "audio_lora"
    plan: str | None = None
    plain: bool = False
    settings: tuple[str, ...] = ()


SLOW = ("learning_rate=3e-4",)
ARMS = (
    Arm("FP32", plan="fp32"),
    Arm("`fp32_adapters`: FP32 adapters, FP16 base, loss scale", target="audio_lora:fp32_adapters"),
    Arm("`native_fp16`: FP16 throughout, exact master, loss scale", target="audio_lora:native_fp16"),
    Arm("`no_scaler`: FP16 throughout, AdamW (fused)", target="audio_lora:no_scaler", plain=True),
    Arm("`no_scaler_unfused`: the same, AdamW", target="audio_lora:no_scaler_unfused", plain=True),
    Arm("FP32, learning rate 3e-4", plan="fp32", settings=SLOW),
    Arm("`native_fp16`, learning rate 3e-4", target="audio_lora:native_fp16", settings=SLOW),
    Arm("`no_scaler`, learning rate 3e-4", target="audio_lora:no_scaler", plain=True, settings=SLOW),
)


@dataclass
class Counts:
    """What the steps of an optimizer did, over all trained numbers.

    Args:
        total: Numbers that were to be trained, over all steps.
        no_gradient: Of them, gradients that are 0.
        unmoved: Of them, weights that are the same after the step, though their gradient is not 0.
        no_variance: Of them, second moments that are 0 after the step, though the gradient is not.
    """

    total: int = 0
    no_gradient: int = 0
    unmoved: int = 0
    no_variance: int = 0
    before: dict[int, torch.Tensor] = field(default_factory=dict)

    def begin(self, optimizer: Any, *_: Any) -> None:
        """Remember the weights before a step."""
        self.before = {id(p): p.detach().clone() for group in optimizer.param_groups for p in group["params"]}

    def end(self, optimizer: Any, *_: Any) -> None:
        """Count after a step, as long as all is finite."""
        if not all(bool(p.isfinite().all()) for group in optimizer.param_groups for p in group["params"]):
            return
        for group in optimizer.param_groups:
            for weight in group["params"]:
                moving = weight.grad != 0
                self.total += weight.numel()
                self.no_gradient += int((~moving).sum())
                self.unmoved += int((moving & (weight == self.before[id(weight)])).sum())
                moments = optimizer.state[weight].get("exp_avg_sq")
                if moments is not None:
                    self.no_variance += int((moving & (moments == 0)).sum())


def train(arm: Arm, *, seed: int, steps: int) -> dict[str, float]:
    """Accuracy, last loss, and what was lost."""
    counts = Counts()
    hooks = [register_optimizer_step_pre_hook(counts.begin), register_optimizer_step_post_hook(counts.end)]
    target = load_target(arm.target, pairs=arm.settings)
    workload = target.build(seed)
    try:
        if arm.plain:
            record = run_target(target, steps=steps, seed=seed)
            losses = record.losses
            metric = (
                workload.evaluate(copy.deepcopy(record.model).float().eval()) if record.weights_finite else math.nan
            )
        else:
            result = Trainer(workload, plan=arm.plan, folder=None, steps=steps, seed=seed).run()
            metric, losses = result.metric, [result.last_loss]
    finally:
        for hook in hooks:
            hook.remove()
    found = {"accuracy": metric, "loss": losses[-1], "steps": len(losses)}
    bad = [number for number, loss in enumerate(losses, 1) if not math.isfinite(loss)]
    return found | {
        "nan_from": bad[0] if bad else math.nan,
        "no_gradient": counts.no_gradient / max(counts.total, 1),
        "unmoved": counts.unmoved / max(counts.total, 1),
        "no_variance": counts.no_variance / max(counts.total, 1),
    }


def describe(rows: dict[str, list[dict[str, float]]], *, steps: int) -> str:
    """The table."""
    lines = [
        f"# LoRA in FP16 without a loss scale, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
        "",
        f"{steps} steps, {platform.machine()} CPU, torch {torch.__version__}. Accuracy on held-out voices, mean over",
        f"the seeds (chance has {1 / len(WORDS):.3f}); shares are of all trained numbers in all steps",
        "before the first NaN.",
        "",
        "| trained with | seeds | accuracy | against FP32 | gradient 0 | second moment 0 | not moved |",
        "|---|---|---|---|---|---|---|",
    ]
    reference: list[float] = []
    for title, found in rows.items():
        values = [row["accuracy"] for row in found]
        if title.startswith("FP32"):
            reference = values
        change = statistics.fmean(a - b for a, b in zip(values, reference, strict=False))
        means = [statistics.fmean(row[name] for row in found) for name in ("no_gradient", "no_variance", "unmoved")]
        # All are 0 where NaN came before anything was counted.
        shares = [f"{100 * mean:.1f} %" if any(means) else "" for mean in means]
        said = f"{statistics.fmean(values):.3f}", "" if title.startswith("FP32") else f"{change:+.3f}"
        if any(math.isnan(value) for value in values):
            first = ", ".join(f"{row['nan_from']:.0f}" for row in found)
            said = "NaN", f"NaN from step {first} on"
        lines.append("| " + " | ".join((title, str(len(values)), *said, *shares)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--kept", type=Path, help="JSON file that results are kept in, to go on after an interruption")
    parser.add_argument("--out", type=Path, help="Markdown file for the table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kept: dict[str, dict[str, float]] = {}
    if arguments.kept is not None and arguments.kept.is_file():
        kept = json.loads(arguments.kept.read_text())
    for seed in range(arguments.seeds):
        for arm in ARMS:
            key = f"{arm.title} {seed}"
            if key in kept:
                continue
            kept[key] = train(arm, seed=seed, steps=arguments.steps)
            print(key, kept[key], flush=True)
            if arguments.kept is not None:
                arguments.kept.write_text(json.dumps(kept))
    rows = {arm.title: [kept[f"{arm.title} {seed}"] for seed in range(arguments.seeds)] for arm in ARMS}
    text = describe(rows, steps=arguments.steps)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
