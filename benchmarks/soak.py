"""A long guarded run on a CPU: does memory stay flat, the ledger small, the step as fast, the scale sane?

    python benchmarks/soak.py [--steps 100000] [--write]

One bad batch (an infinite input) comes every 1,000 steps. A bare loop of torch's autocast and GradScaler runs beside
the guarded one, a window of steps after every fifth of it, so that a ratio tells whether the guard slows down.
"""

from __future__ import annotations

import argparse
import gc
import math
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from torch import nn

import floatline as fl

HERE = Path(__file__).parent / "results"
PICTURE = HERE.parent.parent / "docs" / "pictures" / "soak.svg"
WINDOW = 2_000
BAD_EVERY = 1_000
BARE_EVERY = 5  # windows; the bare loop is there for comparison only


@dataclass
class Sample:
    """One window of steps."""

    step: int
    memory: float
    ledger: float
    ratio: float
    scale: float
    applied: int


def make(seed: int = 0) -> nn.Module:
    """A small network."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))


def batch(step: int, generator: torch.Generator) -> torch.Tensor:
    """One batch; a bad one now and then."""
    x = torch.randn(16, 16, generator=generator)
    if step % BAD_EVERY == BAD_EVERY - 1:
        x[0, 0] = math.inf
    return x


def resident() -> float:
    """MiB of this process in memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def soak(steps: int, folder: Path) -> list[Sample]:
    """Run both loops, window by window."""
    torch.set_num_threads(1)
    model, bare = make(), make()
    guard = fl.Guard(
        model, fl.optim.AdamW(model.parameters(), lr=1e-3), plan="fp16-mixed", clip_norm=1.0, folder=folder / "run"
    )
    optimizer, scaler = torch.optim.AdamW(bare.parameters(), lr=1e-3), torch.amp.GradScaler("cpu")
    draw, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    samples: list[Sample] = []
    applied, bare_seconds = 0, math.nan

    def compute_loss(x: torch.Tensor) -> torch.Tensor:
        return (model(x).float() - x[:, :1]).square().mean()

    for start in range(0, steps, WINDOW):
        began = time.process_time()
        for step in range(start, start + WINDOW):
            done = guard.step(compute_loss, batch(step, draw))
            applied += bool(done.applied)
        guarded = time.process_time() - began
        if start // WINDOW % BARE_EVERY == 0:
            began = time.process_time()
            for step in range(start, start + WINDOW):
                x = batch(step, other)
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = (bare(x).float() - x[:, :1]).square().mean()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            bare_seconds = time.process_time() - began
        size = sum(path.stat().st_size for path in (folder / "run").rglob("*") if path.is_file()) / 2**20
        ratio = guarded / bare_seconds
        samples.append(Sample(start + WINDOW, resident(), size, ratio, float(done.scale), applied))
        print(samples[-1], flush=True)
    guard.close()
    return samples


def draw(samples: list[Sample]) -> str:
    """Four small charts over the steps, as SVG."""
    charts = [
        ("memory, MiB", [one.memory for one in samples]),
        ("run folder, MiB", [one.ledger for one in samples]),
        ("time of a guarded step, of a bare AMP step", [one.ratio for one in samples]),
        ("loss scale, power of two", [math.log2(one.scale) for one in samples]),
    ]
    width, height, parts = 860, 130, []
    for number, (title, values) in enumerate(charts):
        top = number * height
        high = max(values) * 1.1 or 1.0
        points = " ".join(
            f"{60 + 780 * place / max(1, len(values) - 1):.1f},{top + 110 - 80 * value / high:.1f}"
            for place, value in enumerate(values)
        )
        parts.append(f'<text x="60" y="{top + 20}">{title}: {values[0]:.2f} first, {values[-1]:.2f} last</text>')
        parts.append(f'<line x1="60" x2="840" y1="{top + 110}" y2="{top + 110}" stroke="#8c959f"/>')
        parts.append(f'<polyline points="{points}" fill="none" stroke="#8250df" stroke-width="2"/>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height * len(charts)}" '
        f'font-family="sans-serif" font-size="13" fill="#24292f">\n{body}\n</svg>\n'
    )


def main() -> None:
    """Soak, print, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--write", action="store_true", help="keep table and plot")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samples = soak(asked.steps, Path(folder))
    settled = samples[len(samples) // 5 :]
    third = max(1, len(settled) // 3)
    early, late = settled[:third], settled[-third:]

    def mean(part: list[Sample], name: str) -> float:
        return sum(getattr(one, name) for one in part) / len(part)

    skipped = asked.steps - samples[-1].applied
    rows = [
        f"| memory, MiB | {mean(early, 'memory'):.1f} | {mean(late, 'memory'):.1f} |",
        f"| run folder, bytes a step | {early[-1].ledger * 2**20 / early[-1].step:.0f} | "
        f"{late[-1].ledger * 2**20 / late[-1].step:.0f} |",
        f"| guarded step, of bare AMP with clipping | {mean(early, 'ratio'):.3f} | {mean(late, 'ratio'):.3f} |",
        f"| loss scale | {early[-1].scale:g} | {late[-1].scale:g} |",
    ]
    table = "\n".join(rows)
    print(table)
    if asked.write:
        PICTURE.write_text(draw(samples), encoding="utf-8")
        (HERE / "soak_cpu.md").write_text(
            f"# {asked.steps:,} guarded steps on a CPU\n\n`python benchmarks/soak.py --write`, {date.today()}, "
            f"torch {torch.__version__}, one thread. A bad batch every {BAD_EVERY:,} steps: "
            f"{asked.steps // BAD_EVERY} planted, {skipped} steps skipped. Processor time; the bare loop runs "
            f"{WINDOW:,} steps after every {BARE_EVERY * WINDOW:,} guarded ones. The first fifth of the run is left "
            "out; *early* and *late* are the first and the last third of the rest.\n\n"
            f"| | early | late |\n|---|---|---|\n{table}\n\n![the run over its steps](../../docs/pictures/soak.svg)\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
