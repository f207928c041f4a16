"""One encoder layer on the CPU: float32, 16 bits by torch's kernels, 16 bits by HalfOnCPU.

python benchmarks/half_on_cpu.py

The variants take turns, so that a busy machine slows all of them; the table gives medians. Each 16-bit
dtype has a process of its own, because torch's bfloat16 product turns oneDNN off for the whole process on
CPUs without bfloat16.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

from floatline.numerics.cuda_autocast import cuda_autocast_lists
from floatline.numerics.half_on_cpu import HalfOnCPU

SHAPE = (8, 64, 256)


def step(dtype: torch.dtype, *contexts: Callable[[], object]) -> Callable[[], float]:
    """A function that runs one forward and backward pass and returns its seconds."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(SHAPE[-1], 4, 4 * SHAPE[-1], batch_first=True, dropout=0.0)
    layer.to(dtype)
    x = torch.randn(SHAPE, dtype=dtype)

    def run() -> float:
        layer.zero_grad()
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            start = time.perf_counter()
            layer(x).float().square().mean().backward()
            return time.perf_counter() - start

    return run


def measure(low: torch.dtype, rounds: int) -> None:
    """Print one table."""
    name = str(low).removeprefix("torch.")

    def autocast() -> torch.autocast:
        return torch.autocast("cpu", dtype=low)

    variants = {
        "float32": step(torch.float32),
        f"{name}, torch's kernels": step(low),
        f"{name}, HalfOnCPU": step(low, HalfOnCPU),
        f"{name} autocast, HalfOnCPU": step(torch.float32, HalfOnCPU, autocast),
        f"{name} autocast, HalfOnCPU, cuda_autocast_lists": step(
            torch.float32, HalfOnCPU, cuda_autocast_lists, autocast
        ),
    }
    for run in variants.values():
        run()
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for _ in range(rounds):
        for variant, run in variants.items():
            times[variant].append(run())
    medians = {variant: statistics.median(seconds) for variant, seconds in times.items()}
    print(f"| {name}, median of {rounds} | seconds | of float32 |\n|---|---:|---:|")
    for variant, seconds in medians.items():
        print(f"| {variant} | {seconds:.4f} | {seconds / medians['float32']:.2f} |")
    ratio = medians[f"{name}, torch's kernels"] / medians[f"{name}, HalfOnCPU"]
    print(f"\nHalfOnCPU is {ratio:.0f} times as fast as torch's {name} kernels here.\n", flush=True)


def main() -> None:
    """Measure both dtypes."""
    parser = argparse.ArgumentParser(description="One encoder layer in 16 bits on the CPU.")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), help="only this one, in this process")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    if chosen.dtype:
        measure(getattr(torch, chosen.dtype), chosen.rounds)
        return
    print(f"nn.TransformerEncoderLayer({SHAPE[-1]}, 4, {4 * SHAPE[-1]}), input {SHAPE}, forward and backward.")
    print(f"{datetime.date.today()}, {platform.machine()}, {torch.get_num_threads()} threads, ", end="")
    print(f"torch {torch.__version__}.\n", flush=True)
    for dtype in ("float16", "bfloat16"):
        subprocess.run([sys.executable, __file__, "--dtype", dtype, "--rounds", str(chosen.rounds)], check=True)


if __name__ == "__main__":
    main()
