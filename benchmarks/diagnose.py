"""From a step that is not finite to its named cause: time against one step, and the memory that the recorder takes.

GPU: the 369M-parameter GPT of benchmarks/guard.py at batch 8. CPU: a small one. One block's feed-forward part
overflows FP16 and is finite in FP32; the guard sees it, and its Diagnoser names the operation.
"""

import argparse
import contextlib
import platform
import statistics
import time
from pathlib import Path

import torch
from guard import CLIP, DECAY, GPT, LR, SIZES, loss_of

import floatline as fl
from floatline.diagnosis import Diagnoser

BOOST = 2.0**17  # the block's hidden layer leaves FP16's range; the layer behind takes it back out


def plant(model: GPT, block: int) -> None:
    """Make one block overflow in FP16; in FP32 it computes what it did."""
    with torch.no_grad():
        model.blocks[block].up.weight.mul_(BOOST)
        model.blocks[block].down.weight.mul_(1 / BOOST)


def make_guard(model: GPT, optimizer: torch.optim.Optimizer, diagnoser: Diagnoser) -> fl.Guard:
    """A guard that has its failed steps diagnosed."""
    return fl.Guard(model, optimizer, plan="fp16-mixed", clip_norm=CLIP, on_failure=diagnoser)


def measure(size: str, device: str, rounds: int) -> None:
    """Print time and memory of the step and of its diagnosis."""
    options, shape = SIZES[size]
    torch.manual_seed(0)
    model = GPT(**options).to(device)
    tokens = torch.randint(0, options.get("vocabulary", 65536), (shape[0], shape[1] + 1), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, fused=device == "cuda")
    guard = make_guard(model, optimizer, Diagnoser(budget=600.0))

    def timed_step() -> float:
        synchronize(device)
        began = time.perf_counter()
        guard.step(lambda batch: loss_of(model, batch), tokens)
        synchronize(device)
        return time.perf_counter() - began

    for _ in range(3):
        timed_step()
    usual = statistics.median(timed_step() for _ in range(10))
    guard.drain()
    peak = read_peak(device)
    plant(model, block := len(model.blocks) // 2)
    times, ratios = [], []
    for _ in range(rounds):
        diagnoser = Diagnoser(budget=600.0)
        guard = make_guard(model, optimizer, diagnoser)
        while not diagnoser.named:
            timed_step()
            guard.drain()
        times.append(diagnoser.seconds)
        ratios.append(diagnoser.seconds / usual)
    print(f"  {size}: a guarded step {1e3 * usual:.1f} ms")
    print(f"  diagnosis, first {times[0]:.2f} s ({ratios[0]:.1f} steps), then {min(times[1:]):.2f} s", end=" ")
    print(f"({min(ratios[1:]):.1f} to {max(ratios[1:]):.1f} steps)")
    if peak:
        top = read_peak(device)
        print(f"  peak memory {peak / 2**30:.1f} GiB, while diagnosing {top / 2**30:.1f} GiB ({top / peak:.2f} x)")
    finding = diagnoser.named[0].finding
    print(f"  planted in blocks.{block}; named: {finding.cause.id} in {finding.module}", end=" ")
    print(f"({Path(finding.file).name}:{finding.line}, {finding.op}): {finding.seen}")


def synchronize(device: str) -> None:
    """Wait for a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def read_peak(device: str) -> int:
    """Bytes at the highest point since the last call; 0 on a CPU."""
    if device != "cuda":
        return 0
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def main() -> None:
    """Measure on the GPU where there is one, else on the CPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="diagnoses; the first one loads kernels")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU {platform.machine()}"
    print(f"{name}, torch {torch.__version__}")
    half = contextlib.nullcontext() if device == "cuda" else fl.HalfOnCPU()
    for size in ("369M, batch 8", "369M, batch 1") if device == "cuda" else ("290 small tensors",):
        with half:
            measure(size, device, args.rounds)


if __name__ == "__main__":
    main()
