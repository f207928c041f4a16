"""The reference workloads at sizes that fill a GPU: a training step in 16 bits against FP32, with TF32 off and on.

    python benchmarks/workloads.py [--names mmgcn distill] [--steps 10] [--rounds 2]

Prints a Markdown table: milliseconds a step, its ratio to FP32, peak memory and its ratio. Every arm trains the
workload's `h200` variant under the guard, in turns, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from datetime import datetime, timezone
from typing import Any

ARMS = {
    "fp32": ("fp32", False),
    "fp32, TF32": ("fp32", True),
    "fp16-mixed": ("fp16-mixed", False),
    "fp16-true, exact": ("fp16-true", False),
}


def measure(name: str, arm: str, steps: int) -> dict[str, Any]:
    """One arm of one workload, here: median seconds of a step, and the most bytes that were held."""
    import torch

    from floatline.presets import resolve_plan
    from floatline.training.trainer import Trainer
    from floatline.workload import load_target

    plan_name, tf32 = ARMS[arm]
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    plan = resolve_plan(plan_name)
    if plan.weights != "fp32":
        plan = plan.model_copy(update={"update": "exact"})
    began = time.perf_counter()
    workload = load_target(f"{name}:h200").build(0)
    built = time.perf_counter() - began
    trainer = Trainer(workload, plan=plan, folder=None, steps=1_000_000)
    torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    with trainer.arithmetic():
        for number in range(steps + 5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            trainer.step()
            torch.cuda.synchronize()
            if number >= 5:
                times.append(time.perf_counter() - began)
    trainer.guard.drain()
    account = trainer.guard.run.diary.accounts.run
    found = {"seconds": statistics.median(times), "bytes": torch.cuda.max_memory_allocated(), "built": built}
    parameters = sum(p.numel() for p in workload.model.parameters())
    return {**found, "loss": account.last_loss, "applied": account.applied, "parameters": parameters}


def run_arm(name: str, arm: str, steps: int) -> dict[str, Any] | None:
    """The same in a process of its own; None where it fails, which is told."""
    words = [sys.executable, __file__, "--arm", arm, "--names", name, "--steps", str(steps)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=240)
    if ended.returncode:
        print(f"{name}, {arm}: {ended.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    return json.loads(ended.stdout.splitlines()[-1])


def table(names: list[str], *, steps: int, rounds: int) -> None:
    """All arms of all workloads, in turns."""
    import torch

    print(f"{datetime.now(tz=timezone.utc):%Y-%m-%d}, {torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| workload | plan | step, ms | time | peak, GiB | memory | last loss |\n|---|---|---|---|---|---|---|")
    for name in names:
        found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
        for _ in range(rounds):
            for arm in ARMS:
                one = run_arm(name, arm, steps)
                found[arm] += [] if one is None else [one]
        whole = found["fp32"]
        for arm, rows in found.items():
            if not rows or not whole:
                print(f"| {name} | {arm} | failed | | | | |")
                continue
            pairs = list(zip(rows, whole, strict=False))
            seconds = statistics.median(row["seconds"] for row in rows)
            ratio = statistics.median(row["seconds"] / base["seconds"] for row, base in pairs)
            memory = statistics.median(row["bytes"] / base["bytes"] for row, base in pairs)
            label = f"{name} ({rows[0]['parameters'] / 1e6:.0f}M)" if arm == "fp32" else name
            peak = rows[0]["bytes"] / 2**30
            print(
                f"| {label} | {arm} | {1e3 * seconds:.1f} | {ratio:.2f} | {peak:.1f} | {memory:.2f} | "
                f"{rows[0]['loss']:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--names", nargs="*", default=["conditioned", "mmgcn", "distill"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--arm", choices=list(ARMS), help="one arm, here, as JSON")
    arguments = parser.parse_args()
    if arguments.arm:
        print(json.dumps(measure(arguments.names[0], arguments.arm, arguments.steps)))
    else:
        table(arguments.names, steps=arguments.steps, rounds=arguments.rounds)
