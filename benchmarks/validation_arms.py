"""Does the validation give the right verdict? A small GPT, trained in ways that are known to be good, bad or empty.

Every candidate is compared with FP32 over paired seeds. The loops that are known to be bad are written as people write
them, with torch's own optimizer and scaler.
"""

from __future__ import annotations

import argparse
import copy
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from tiny_gpt import GPT, crops, make_text
from torch import Tensor, nn

import floatline as fl
from floatline.numerics import cuda_autocast_lists
from floatline.validation.verdict.comparison import Comparison
from floatline.validation.verdict.pairs import NUM_FIRST_LOSSES, ArmRun
from floatline.workload import Workload

STEPS, BATCH, LR, CLIP = 300, 16, 1e-3, 1.0
LAYERS, WIDTH, HEADS = 2, 64, 4

Expected = tuple[str, str, str]
EXPECTED: list[Expected] = [
    ("fp32-nudged", "FP32 against itself, nudged by 1e-7", "PASS"),
    ("fp16-mixed", "FP16 mixed", "PASS"),
    ("clip-before-unscale", "FP16 mixed, gradients clipped before they are unscaled", "FAIL"),
    ("pure-bf16", "BF16 weights under torch's AdamW", "FAIL"),
    ("pure-fp16-adam", "FP16 weights under torch's AdamW", "FAIL"),
    ("autocast-off", "a plan that computes in FP32", "REFUSED"),
    ("zero steps", "FP16 mixed, no step taken", "REFUSED"),
    ("learning rate 0", "FP16 mixed, learning rate 0", "REFUSED"),
]


def next_character(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss of the next character, taken in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build(seed: int = 0, *, lr: float = LR) -> Workload:
    """A language of its own for each seed, split into a text to train on and one that is held back."""
    text = make_text(seed, 30_000)
    dice = torch.Generator().manual_seed(seed)
    rows = [crops(text[:25_000], BATCH, dice) for _ in range(STEPS)]
    held = crops(text[25_000:], 128, dice)
    torch.manual_seed(seed)

    def val_loss(model: nn.Module) -> float:
        return float(next_character(model(held[:, :-1]), held[:, 1:]))

    return Workload(
        GPT(layers=LAYERS, width=WIDTH, heads=HEADS),
        [((row[:, :-1],), (row[:, 1:],)) for row in rows],
        next_character,
        "fp16-mixed",
        lambda model: make_optimizer(model, lr),
        val_loss,
    )


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW whose learning rate falls to 0 in a line: late updates are small, as in every real training."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    done = 0

    def fall(stepped: torch.optim.Optimizer, *_: object) -> None:
        nonlocal done
        done += 1
        for group in stepped.param_groups:  # not this one's, where a plan exchanges it
            group["lr"] = lr * max(0.0, 1 - done / STEPS)

    optimizer.register_step_post_hook(fall)
    return optimizer


def run_loop(seed: int, train: Callable[[Workload], list[float]]) -> ArmRun:
    """A loop of one's own as an arm: its losses, and the metric before and after, in FP32."""
    workload, began = build(seed), time.monotonic()
    start = measure(workload)
    before = copy.deepcopy(workload.model)
    losses = train(workload)
    pairs = zip(before.parameters(), workload.model.parameters(), strict=True)
    return ArmRun(
        "loop",
        seed,
        measure(workload),
        start=start,
        first_losses=tuple(losses[:NUM_FIRST_LOSSES]),
        steps=len(losses),
        weights_changed=any(not torch.equal(a, b.float()) for a, b in pairs),
        seconds=time.monotonic() - began,
    )


@torch.no_grad()
def measure(workload: Workload) -> float:
    """The metric of the model as it is, in FP32."""
    assert workload.evaluate is not None
    return workload.evaluate(copy.deepcopy(workload.model).float().eval())


def clip_before_unscale(workload: Workload) -> list[float]:
    """The scaler unscales inside step(), after the clipping has seen gradients that are 65,536 times too large."""
    model, scaler = workload.model, torch.amp.GradScaler("cpu")
    optimizer, losses = workload.make_optimizer(model), []
    with fl.HalfOnCPU(), cuda_autocast_lists():
        for inputs, targets in workload.batches:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = workload.compute_loss(inputs, targets)
            scaler.scale(loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def pure(dtype: torch.dtype) -> Callable[[Workload], list[float]]:
    """Weights, states and updates in 16 bits: what `model.half()` and an optimizer behind it do."""

    def train(workload: Workload) -> list[float]:
        model, losses = workload.model.to(dtype), []
        optimizer = workload.make_optimizer(model)
        with fl.HalfOnCPU():
            for inputs, targets in workload.batches:
                loss = workload.compute_loss(inputs, targets)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return losses

    return train


def judge_all(folder: Path, *, jobs: int | None) -> dict[str, Comparison]:
    """Every candidate's comparison, by name."""
    here = f"{Path(__file__).resolve()}:build"
    options = {"measure": False, "jobs": jobs}
    loops = {
        "clip-before-unscale": clip_before_unscale,
        "pure-bf16": pure(torch.bfloat16),
        "pure-fp16-adam": pure(torch.float16),
    }
    off = fl.Plan(name="autocast-off", weights="fp32", compute="fp32")
    functions = [(name, lambda seed, train=train: run_loop(seed, train)) for name, train in loops.items()]
    study = fl.validate(here, ["fp32", "fp16-mixed", off, *functions], folder=folder / "all", **options)
    found = {comparison.candidate: comparison for comparison in study.comparisons}
    found["zero steps"] = fl.validate(here, steps=0, folder=folder / "zero", **options).best
    found["learning rate 0"] = fl.validate(
        f"{Path(__file__).resolve()}:without_rate", folder=folder / "rate", **options
    ).best
    return found


def without_rate(seed: int = 0) -> Workload:
    """The same workload, and an optimizer that changes nothing."""
    return build(seed, lr=0.0)


def table(found: dict[str, Comparison]) -> list[str]:
    """Rows of Markdown: what it is, what came out, what should."""
    rows = ["| candidate | difference | interval | seeds | verdict | expected |", "|---|---|---|---|---|---|"]
    for name, title, expected in EXPECTED:
        one = found[name]
        shown = ["–", "–"]
        if one.difference is not None and one.interval is not None:
            low, high = (one.terms.show(end) for end in one.interval)
            shown = [one.terms.show(one.difference), f"{low} to {high}"]
        rows.append(f"| {title} | {shown[0]} | {shown[1]} | {len(one.seeds)} | {one.verdict} | {expected} |")
    return rows


def main() -> None:
    """Run all of them, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=None, help="runs side by side")
    parser.add_argument("--out", type=Path, default=None, help="Markdown file to write")
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = judge_all(Path(folder), jobs=asked.jobs)
    weights = sum(p.numel() for p in GPT(layers=LAYERS, width=WIDTH, heads=HEADS).parameters())
    lines = [
        "# Verdicts on a small GPT",
        "",
        f"{date.today()}, {platform.machine()} CPU, torch {torch.__version__}, `python benchmarks/validation_arms.py`, "
        f"{(time.monotonic() - began) / 60:.0f} minutes.",
        f"{weights:,} weights, {STEPS} steps of {BATCH} rows, AdamW falling from {LR:g} to 0, clipped at {CLIP:g}.",
        "The metric is the loss of a held-out text, in FP32; the margins are 1 % and 2 %. 16-bit numbers are computed "
        "as a GPU rounds it.",
        "",
        *table(found),
        "",
        *(f"- {title}: {found[name].reason}." for name, title, _ in EXPECTED),
    ]
    print("\n".join(lines))
    if asked.out is not None:
        asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    wrong = [name for name, _, expected in EXPECTED if found[name].verdict != expected]
    raise SystemExit(f"not as expected: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
