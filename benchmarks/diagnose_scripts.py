"""What `floatline diagnose -- python train.py` costs a script: the same loops with and without it, in turns.

    python benchmarks/diagnose_scripts.py [--pairs 5] [--device cuda] [--only transformer-scaled] [--steps 1500]
    python benchmarks/diagnose_scripts.py --turns 40 [--device cuda]

Prints a Markdown table: the median step, watched and not, and the whole loop with its recorded steps, which are
"added once". On a CPU the times are those that the processor spent on the script, in one thread, so that other work on
the machine hardly matters; on a GPU they are those of the clock, over ten steps at a time. Every loop runs in a
process of its own, forked from one that has imported torch and has not touched a GPU. Such processes differ by a tenth
and more on a GPU machine: --turns measures in one process, forty watched steps between forty and forty that are not.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import platform
import runpy
import statistics
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

SETUP = """
import contextlib, json, sys, time
import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
kind, steps, target, device = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
on_gpu = device == "cuda"
chunk = 10 if on_gpu else 1
now = time.perf_counter if on_gpu else time.process_time
if kind == "mlp":
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    batch = torch.randn(32, 16, device=device)
    compute = lambda: nn.functional.mse_loss(net(batch), batch[:, :4])
else:
    width, depth, size = (768, 6, (16, 512)) if on_gpu else (128, 2, (4, 64))
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True, dropout=0.0)
    body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
    net = nn.Sequential(nn.Embedding(256, width), body, nn.Linear(width, 256))
    batch = torch.randint(256, size, device=device)
    compute = lambda: nn.functional.cross_entropy(net(batch).flatten(0, 1), batch.flatten())
net.to(device)
scaler = torch.amp.GradScaler(device, enabled=kind.endswith("scaled"))
dtype = torch.float16 if kind.endswith("scaled") else torch.bfloat16
region = (lambda: torch.autocast(device, dtype)) if on_gpu else contextlib.nullcontext
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)

def train():
    optimizer.zero_grad()
    with region():
        loss = compute()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

"""
LOOP = (
    SETUP
    + """
times = []
began = start = now()
for step in range(1, steps + 1):
    train()
    if step % chunk == 0:
        if on_gpu:
            torch.cuda.synchronize()
        times.append((now() - start) / chunk)
        start = now()
whole = now() - began
times = sorted(times[40 // chunk:])
with open(target, "w") as file:
    name = torch.cuda.get_device_name() if on_gpu else ""
    json.dump({"step": times[len(times) // 2], "whole": whole, "device": name}, file)
"""
)
LOOPS = {
    "cpu": [("mlp", 4000), ("transformer", 120), ("transformer-scaled", 120)],
    "cuda": [("mlp", 4000), ("transformer", 600), ("transformer-scaled", 600)],
}


def measure(folder: Path, kind: str, steps: int, device: str, *, watched: bool) -> dict[str, Any]:
    """Run a loop once."""
    script, target = folder / "loop.py", folder / "times.json"
    script.write_text(LOOP, encoding="utf-8")
    words = [str(script), kind, str(steps), str(target), device]
    report = str(folder / "report.json") if watched else ""
    process = multiprocessing.get_context("fork").Process(target=run_loop, args=(words, report))
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"a loop ended with exit code {process.exitcode}")
    return json.loads(target.read_text(encoding="utf-8"))


def run_loop(words: list[str], report: str) -> None:
    """The loop as a script of this process, watched where there is a report to write."""
    from floatline.diagnosis.scripts.main import main

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if report:
        main(report, "", "", "", "100", words)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def measure_turns(kind: str, num: int, device: str) -> tuple[float, float, float]:
    """The median plain step, the ratio and what is added, in one process. No step is recorded, and none seen whole."""
    import torch

    from floatline.precision.user_frames import find_script_line
    from floatline.probe.scripts.steps import StepCapture
    from floatline.probe.watch.patches import Patches
    from floatline.probe.watch.watch import watch
    from floatline.running.loss_log import LossLog
    from floatline.running.read_values import ReadValues

    loop: dict[str, Any] = {}
    sys.argv = ["loop.py", kind, "0", "", device]
    exec(compile(SETUP, "loop.py", "exec"), loop)
    now = loop["now"]

    def train(steps: int) -> float:
        began = now()
        for _ in range(steps):
            loop["train"]()
        if device == "cuda":
            torch.cuda.synchronize()
        return (now() - began) / steps

    train(40)
    pairs: list[tuple[float, float]] = []
    for _ in range(num):
        before = train(40)
        with watch(light=True) as seen:
            seen.step = 700  # far from a power of two, after which two steps are seen whole
            capture = StepCapture(seen)
            capture._schedule.due = 10**9
            seen.listener, seen.locate = capture, find_script_line
            patches = Patches()
            remove = LossLog(Path(os.devnull), most=0, ends=False).patch_bare(patches)  # the losses are known
            ReadValues().patch(patches)
            train(10)
            watched = train(40)
            capture.finish()
            remove()
            patches.undo()
        pairs.append(((before + train(40)) / 2, watched))
    added = statistics.median(watched - plain for plain, watched in pairs)
    return statistics.median(p for p, _ in pairs), statistics.median(w / p for p, w in pairs), added


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What diagnosing a script costs it.")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", choices=[kind for kind, _ in LOOPS["cpu"]], help="one loop; all without it")
    parser.add_argument("--turns", type=int, default=0, help="in one process, so many times")
    parser.add_argument("--steps", type=int, default=0, help="of each loop; its own number without it")
    options = parser.parse_args()
    import torch

    for name in ("torch._dynamo", "floatline.diagnosis.scripts.main"):  # loaded once, before the forks
        importlib.import_module(name)
    now = datetime.now(tz=timezone.utc).strftime("%Y-%m-%d")
    if options.turns:
        machine = torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()}, one thread"
        print(f"{now}, {machine}, torch {torch.__version__}; medians of {options.turns} turns in one process.\n")
        print("| loop | plain step | watched, ratio | added a step |\n|---|---|---|---|")
        for kind, _ in LOOPS[options.device]:
            if options.only in (None, kind):
                plain, ratio, added = measure_turns(kind, options.turns, options.device)
                print(f"| {kind} | {plain * 1e3:.3f} ms | {ratio:.3f} | {added * 1e6:.0f} µs |", flush=True)
        return
    print(f"{now}, torch {torch.__version__}; medians of {options.pairs} pairs.\n")
    print("| loop | plain step | watched step | ratio (pairs) | added a step | added once | whole loop, ratio |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        for kind, usual in LOOPS[options.device]:
            steps = options.steps or usual
            if options.only not in (None, kind):
                continue
            pairs: list[list[dict[str, Any]]] = []
            for pair in range(options.pairs):
                order = (False, True) if pair % 2 == 0 else (True, False)
                found = {w: measure(Path(name), kind, steps, options.device, watched=w) for w in order}
                pairs.append([found[False], found[True]])
                print(f"{kind} {pair + 1} of {options.pairs}: {json.dumps(found)}", file=sys.stderr, flush=True)
            plain = statistics.median(pair[0]["step"] for pair in pairs)
            added = statistics.median(pair[1]["step"] - pair[0]["step"] for pair in pairs)
            ratios = [pair[1]["step"] / pair[0]["step"] for pair in pairs]
            ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            whole = statistics.median(pair[1]["whole"] / pair[0]["whole"] for pair in pairs)
            once = statistics.median(pair[1]["whole"] - pair[0]["whole"] for pair in pairs) - steps * added
            row = f"{kind}, {steps} steps | {plain * 1e3:.3f} ms | {(plain + added) * 1e3:.3f} ms | {ratio}"
            print(f"| {row} | {added * 1e6:.0f} µs | {once:.1f} s | {whole:.3f} |", flush=True)


if __name__ == "__main__":
    main()
