"""Bytes a weight, verdict against FP32 and, on a GPU, time and memory, for each way to store weights and moments.

python benchmarks/compact.py              # verdicts of a small language model, on any machine
python benchmarks/compact.py --measure    # time and peak memory of a 369M GPT, on a GPU
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from guard import CLIP, DECAY, GPT, LR, SIZES, bare, loss_of, time_rounds
from validation_arms import STEPS

import floatline as fl
from floatline.plans import Plan

UPDATES = ("exact", "stochastic")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
STATES = ("fp32", "bf16", "int8")
COMBINATIONS = [(dtype, update, states) for dtype in ("bf16", "fp16") for update in UPDATES for states in STATES]


def plan_of(dtype: str, update: str, states: str) -> Plan:
    """16-bit weights whose optimizer stores in one of these ways."""
    scaling = {"scaling": {}} if dtype == "fp16" else {}
    name = f"{dtype}-{update}-{states}"
    return Plan(name=name, weights=dtype, compute=dtype, update=update, states=states, **scaling)


def bytes_a_weight(plan: Plan) -> float:
    """Of weight, what stands beside it, two moments and a 16-bit gradient: as the optimizer counts them."""
    model = torch.nn.Linear(256, 256, bias=False).to(DTYPES[plan.weights])
    optimizer = fl.optim.AdamW(model.parameters(), update=plan.update, states=plan.states)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    return optimizer.memory().total / model.weight.numel()


def judge(max_seeds: int, jobs: int | None) -> None:
    """The verdict of a validation for each combination."""
    print(f"CPU {platform.machine()}, torch {torch.__version__}, {date.today()}: a GPT of 2 layers, {STEPS} steps")
    print("\n| weights | update | moments | bytes a weight | against FP32 | interval | seeds | verdict |")
    print("|---|---|---|---:|---:|---|---:|---|", flush=True)
    plans = {plan_of(*combination).name: plan_of(*combination) for combination in COMBINATIONS}
    target = f"{Path(__file__).resolve().with_name('validation_arms.py')}:build"
    with tempfile.TemporaryDirectory() as folder:
        asked = {"max_seeds": max_seeds, "measure": False, "jobs": jobs, "folder": folder}
        found = {one.candidate: one for one in fl.validate(target, list(plans.values()), **asked).comparisons}
    for name, plan in plans.items():
        one = found[name]
        low, high = (one.terms.show(end) for end in one.interval) if one.interval else ("–", "–")
        shown = one.terms.show(one.difference) if one.difference is not None else "–"
        cells = [plan.weights, plan.update, plan.states, f"{bytes_a_weight(plan):.2f}", shown, f"{low} to {high}"]
        print(f"| {' | '.join(map(str, cells))} | {len(one.seeds)} | {one.verdict} |")


def arm(plan: Plan) -> Callable[[torch.nn.Module, str], Callable[[torch.Tensor], object]]:
    """A guarded loop under a plan."""

    def make(model: torch.nn.Module, _: str) -> Callable[[torch.Tensor], object]:
        model.to(DTYPES[plan.weights])
        settings = {"lr": LR, "weight_decay": DECAY, "update": plan.update, "states": plan.states}
        guard = fl.Guard(model, fl.optim.AdamW(model.parameters(), **settings), plan=plan, clip_norm=CLIP)
        return lambda tokens: guard.step(lambda batch: loss_of(model, batch), tokens)

    return make


def bare_half(model: torch.nn.Module, _: str) -> Callable[[torch.Tensor], object]:
    """BF16 weights under torch's fused AdamW: fast, small, and updates are lost."""
    model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, fused=True)

    def step(tokens: torch.Tensor) -> None:
        loss_of(model, tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(rounds: int, sizes: list[str]) -> None:
    """Time and peak memory against bare AMP, the arms taking turns."""
    print(f"GPU {torch.cuda.get_device_name()}, torch {torch.__version__}")
    chosen = [("bf16", *rest) for rest in (("exact", "fp32"), ("exact", "int8"), ("stochastic", "bf16"))]
    arms = {"bare AMP + clip, fused AdamW": bare, "bare BF16 weights, fused AdamW": bare_half}
    arms |= {" ".join(one): arm(plan_of(*one)) for one in [*chosen, ("bf16", "stochastic", "int8")]}
    for size in sizes:
        options, shape = SIZES[size]
        tokens = torch.randint(0, options.get("vocabulary", 65536), (shape[0], shape[1] + 1), device="cuda")
        steps, memory = {}, {}
        for name, make in arms.items():
            gc.collect()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            torch.manual_seed(0)
            steps[name] = make(GPT(**options).cuda(), "cuda")
            for _ in range(4):
                steps[name](tokens)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated() - before
            steps[name](tokens)
            torch.cuda.synchronize()
            memory[name] = ((torch.cuda.max_memory_allocated() - before) / 2**30, held / 2**30)
        times = time_rounds(steps, tokens, rounds=rounds, each=3)
        first = next(iter(times))
        print(f"\n{size}\n  {'':34} {'ms':>7} {'of AMP':>7} {'peak GiB':>9} {'of AMP':>7} {'held GiB':>9}")
        for name, values in times.items():
            ratio = statistics.median(one / base for one, base in zip(values, times[first], strict=True))
            (peak, held), (base, _) = memory[name], memory[first]
            time = f"{statistics.median(values) * 1e3:7.2f} {ratio:7.3f}"
            print(f"  {name:34} {time} {peak:9.2f} {peak / base:7.3f} {held:9.2f}", flush=True)
        del steps
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    """Judge or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="Time and memory on a GPU, without verdicts.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--max-seeds", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=None, help="Runs side by side.")
    parser.add_argument("--sizes", nargs="*", default=["369M, batch 8", "369M, batch 1"])
    asked = parser.parse_args()
    if asked.measure:
        measure(asked.rounds, asked.sizes)
    else:
        judge(asked.max_seeds, asked.jobs)


if __name__ == "__main__":
    main()
