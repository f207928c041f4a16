"""The search for the smallest FP32 island: is it the planted module, how long it takes, and what the island costs.

CPU: a 12-layer transformer with one fragile operation planted in a random layer, for 20 seeds. CUDA: the 369M GPT of
guard.py with one block that overflows.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
import guard as guard_benchmark
from planted import LENGTH, SYMBOLS, loss_of, plant

from floatline.diagnosis.islands.cost import measure_cost
from floatline.diagnosis.islands.search import find_island
from floatline.precision.fp32_call import tf32_products
from floatline.precision.islands import Islands
from floatline.probe.steps.capture import CapturedStep, capture_step


def capture_two(seed: int) -> tuple[list[CapturedStep], str, str]:
    """A planted model's step at its start, and another after four steps of FP32 training."""
    model, kind, where = plant(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dice = torch.Generator().manual_seed(seed)
    steps: list[CapturedStep] = []
    for number in range(5):
        tokens = torch.randint(0, SYMBOLS, (4, LENGTH + 1), generator=dice)
        if number in (0, 4):
            steps.append(
                capture_step(
                    model,
                    optimizer,
                    lambda batch: loss_of(model, batch),
                    tokens,
                    plan="fp16-mixed",
                    scale=2.0**16,
                    half_on_cpu=True,
                )
            )
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        optimizer.step()
    return steps, kind, where


def on_cpu(seeds: int) -> None:
    """Every seed: what was planted, and what was found."""
    print(f"CPU {platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print(
        "| seed | planted | in | found | sets | replays | seconds | or lines |\n|---:|---|---|---|---:|---:|---:|---:|"
    )
    exact = largest = 0
    for seed in range(seeds):
        steps, kind, where = capture_two(seed)
        island = find_island(steps, budget=600)
        inside = bool(island.modules) and all(m == where or m.startswith(f"{where}.") for m in island.modules)
        exact, largest = exact + inside, max(largest, len(island.modules))
        found = ", ".join(island.modules) or island.reason
        lines = "" if island.lines is None else str(len(island.lines.lines))
        effort = f"{island.num_tried} | {island.num_replays} | {island.seconds:.1f}"
        print(f"| {seed} | {kind} | {where} | {found} | {effort} | {lines} |", flush=True)
    print(f"\nThe planted module, or a part of it: {exact} of {seeds}. Most modules in an island: {largest}.")


class Overflowing(guard_benchmark.Block):
    """A block whose hidden layer is raised beyond FP16, and brought back behind it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As its parent's, but for the boost."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.relu(self.up(self.norm2(x)) * 2.0**20) / 2.0**20)


def make_gpt(layer: int) -> guard_benchmark.GPT:
    """The 369M GPT with one block that overflows."""
    torch.manual_seed(0)
    model = guard_benchmark.GPT()
    model.blocks[layer] = Overflowing(1024, 16)
    return model.cuda()


def capture_gpt(layer: int, tokens: torch.Tensor) -> list[CapturedStep]:
    """Its step at the start, and another after two steps in BF16."""
    model = make_gpt(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def compute_loss(some: torch.Tensor) -> torch.Tensor:
        return guard_benchmark.loss_of(model, some)

    steps: list[CapturedStep] = []
    for number in range(3):
        if number in (0, 2):
            steps.append(capture_step(model, optimizer, compute_loss, tokens, plan="fp16-mixed", scale=2.0**16))
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            compute_loss(tokens).backward()
        optimizer.step()
    return steps


def search_gpt(layer: int, tokens: torch.Tensor) -> tuple[str, ...]:
    """The island that the search finds; prints how long it takes, and what the islands cost."""
    steps = capture_gpt(layer, tokens)
    torch.cuda.synchronize()
    began = time.perf_counter()
    island = find_island(steps, budget=600)
    print(f"search over {len(steps)} steps: {time.perf_counter() - began:.1f} s\n{island}")
    for modules in dict.fromkeys([island.modules, (f"blocks.{layer}",)]):
        if modules:
            print(measure_cost(steps[0], modules))
            print(measure_cost(steps[0], modules, tf32=True))
    return island.modules


def in_tf32(step: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], object]:
    """The same step with the products of FP32 modules in TF32."""

    def run(tokens: torch.Tensor) -> None:
        with tf32_products():
            step(tokens)

    return run


def on_gpu(*, rounds: int, batch: int, layer: int = 13) -> None:
    """Search time, and the rescued step's time."""
    print(f"GPU {torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"369M GPT, batch {batch}, planted in blocks.{layer}")
    tokens = torch.randint(0, 65536, (batch, 1025), device="cuda")
    found = search_gpt(layer, tokens)
    gc.collect()
    torch.cuda.empty_cache()
    rescued, block = make_gpt(layer), make_gpt(layer)
    Islands(rescued, found)
    Islands(block, [f"blocks.{layer}"])
    rescued_step, block_step = (guard_benchmark.bare(model, "cuda") for model in (rescued, block))
    broken = "the broken plan (every step skipped)"
    arms = {
        broken: guard_benchmark.bare(make_gpt(layer), "cuda"),
        "the plan, nothing planted": guard_benchmark.bare(guard_benchmark.GPT().cuda(), "cuda"),
        f"{', '.join(found)} in FP32": rescued_step,
        f"{', '.join(found)} in FP32, products in TF32": in_tf32(rescued_step),
        "one block in FP32": block_step,
        "one block in FP32, products in TF32": in_tf32(block_step),
    }
    for step in arms.values():
        for _ in range(4):
            step(tokens)
    times = guard_benchmark.time_rounds(arms, tokens, rounds=rounds, each=3)
    print("\n| step | ms | of the plan, nothing planted | of the broken plan |\n|---|---:|---:|---:|")
    for name, values in times.items():
        healthy, skipping = (
            statistics.median(v / b for v, b in zip(values, times[base], strict=True))
            for base in ("the plan, nothing planted", broken)
        )
        print(f"| {name} | {statistics.median(values) * 1e3:.2f} | {healthy:.3f} | {skipping:.3f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--cpu", action="store_true", help="the CPU part only")
    arguments = parser.parse_args()
    if torch.cuda.is_available() and not arguments.cpu:
        on_gpu(rounds=arguments.rounds, batch=arguments.batch)
    else:
        on_cpu(arguments.seeds)
