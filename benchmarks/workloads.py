"""The reference workloads at sizes that fill a GPU: a training step in 16 bits against FP32, with TF32 off and on.

    python benchmarks/workloads.py [--names mmgcn distill] [--steps 8]

Prints a Markdown table: milliseconds a step, its ratio to the first arm, peak memory and its ratio. Every arm trains
the workload's `h200` variant from the same weights under the guard, one after the other. audio_lora's first arm is AMP
over a base in FP32, which is what its team compared with.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from dataclasses import replace
from datetime import datetime, timezone
from typing import NamedTuple

import torch

from floatline.plans.presets import resolve_plan
from floatline.training.trainer import Trainer
from floatline.workload import Workload, load_target


class Arm(NamedTuple):
    """A plan, whether FP32 products are in TF32, and settings of the workload."""

    plan: str
    tf32: bool = False
    settings: tuple[str, ...] = ()


ARMS = {
    "fp32": Arm("fp32"),
    "fp32, TF32": Arm("fp32", tf32=True),
    "fp16-mixed": Arm("fp16-mixed"),
    "fp16-true, exact": Arm("fp16-true"),
}
LORA_ARMS = {
    "AMP, base in FP32": Arm("fp16-mixed", settings=("base_weights=fp32",)),
    "fp32": Arm("fp32", settings=("base_weights=fp32",)),
    "fp32, TF32": Arm("fp32", tf32=True, settings=("base_weights=fp32",)),
    "AMP, base in FP16": Arm("fp16-mixed"),
    "native FP16, exact": Arm("fp16-true", settings=("adapters=base", "optimizer=exact")),
}
WARM_UP = 3


def measure(workload: Workload, arm: Arm, steps: int) -> tuple[float, int, float]:
    """Median seconds of a step, the most bytes that were held, and the last loss."""
    torch.set_float32_matmul_precision("high" if arm.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = arm.tf32
    plan = resolve_plan(arm.plan)
    if plan.weights != "fp32":
        plan = plan.model_copy(update={"update": "exact"})
    gc.collect()
    torch.cuda.empty_cache()
    trainer = Trainer(replace(workload, model=copy.deepcopy(workload.model)), plan=plan, folder=None, steps=1_000_000)
    torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    with trainer.arithmetic():
        for number in range(steps + WARM_UP):
            torch.cuda.synchronize()
            began = time.perf_counter()
            trainer.step()
            torch.cuda.synchronize()
            if number >= WARM_UP:
                times.append(time.perf_counter() - began)
    trainer.guard.drain()
    loss = trainer.guard.accounts.run.last_loss
    trainer.guard.close()
    return statistics.median(times), torch.cuda.max_memory_allocated(), float("nan") if loss is None else loss


def show(name: str, *, steps: int) -> None:
    """All arms of one workload."""
    began = time.perf_counter()
    workload, settings = load_target(f"{name}:h200").build(0), tuple[str, ...]()
    size = sum(p.numel() for p in workload.model.parameters()) / 1e6
    print(f"# {name}: {size:.0f}M parameters, built in {time.perf_counter() - began:.0f} s", flush=True)
    base: tuple[float, int] | None = None
    for title, arm in (LORA_ARMS if name == "audio_lora" else ARMS).items():
        if arm.settings != settings:
            workload, settings = load_target(f"{name}:h200", pairs=arm.settings).build(0), arm.settings
        try:
            seconds, held, loss = measure(workload, arm, steps)
        except torch.OutOfMemoryError:
            print(f"| {name} | {title} | does not fit | | | | |", flush=True)
            continue
        base = base or (seconds, held)
        print(
            f"| {name} | {title} | {1e3 * seconds:.1f} | {seconds / base[0]:.2f} | {held / 2**30:.1f} | "
            f"{held / base[1]:.2f} | {loss:.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--names", nargs="*", default=["conditioned", "mmgcn", "distill", "audio_lora", "dbnet"])
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    print(f"{datetime.now(tz=timezone.utc):%Y-%m-%d}, {torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| workload | plan | step, ms | time | peak, GiB | memory | last loss |\n|---|---|---|---|---|---|---|")
    for workload_name in arguments.names:
        show(workload_name, steps=arguments.steps)
