"""A forward pass of a 1B model recorded beside its FP32 twin, in times of the plain pass, at two sizes of batches.

    python benchmarks/forward_large.py [--device cuda] [--only 2x512] [--layers 16]

Prints a Markdown table. The model has the sizes of Llama 3.2 1B and random weights. "plain" is a pass in FP16 without
floatline, "replayed" one of floatline's on copies of the weights without a record, "recorded" one whose every operation
is compared with FP32; the last column is what "recorded" takes for each operation beyond "replayed". Medians of three
passes, after each was run twice.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import fold_models
from benchmarks.fold_large import LLAMA_1B, measure

from floatline.probe.steps.captured_forward import capture_forward

SIZES = {"2x512": (2, 512), "8x1024": (8, 1024)}
ROUNDS = 3


def report(model: torch.nn.Module, half: torch.nn.Module, name: str, device: str) -> str:
    """One row of the table."""
    drawn = torch.randint(2, 1000, SIZES[name], generator=torch.Generator().manual_seed(1)).to(device)
    inputs = {"input_ids": drawn, "use_cache": False}
    step = capture_forward(model, inputs, plan="fp16-true")
    ways = {
        "plain": lambda: fold_models.run(half, inputs),
        "replayed": step.replay,
        "recorded": lambda: step.replay(trace=True),
    }
    for way in (*ways.values(), *ways.values()):
        way()
    seconds = {way: [measure(run) for _ in range(ROUNDS)] for way, run in ways.items()}
    plain, replayed, recorded = (statistics.median(one) for one in seconds.values())
    trace = step.replay(trace=True).trace
    num = len(trace.ops) if trace is not None else 0
    return (
        f"| {name} | {plain * 1e3:.1f} ms | {replayed / plain:.1f} | {recorded / plain:.1f} | {num} "
        f"| {(recorded - replayed) / num * 1e6:.0f} µs |"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--layers", type=int, default=16, help="fewer make it a smaller model, to try the script")
    parser.add_argument("--width", type=int, default=2048, help="the same")
    options = parser.parse_args()
    machine = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    with torch.device(options.device):
        torch.manual_seed(0)
        sizes = LLAMA_1B | {"num_hidden_layers": options.layers, "hidden_size": options.width}
        model = fold_models.causal("Llama", **sizes)().eval()
        half = fold_models.causal("Llama", **sizes)().half().eval()
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    now = datetime.now(tz=timezone.utc).strftime("%Y-%m-%d")
    print(f"{now}, {machine}, torch {torch.__version__}, {count:.2f}B weights.\n")
    print("| tokens | plain | replayed | recorded | operations | for each |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in options.only:
        print(report(model, half, name, options.device), flush=True)


if __name__ == "__main__":
    main()
