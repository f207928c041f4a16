"""What it costs to put buffers back: guarded steps of models with BatchNorm, with and without that part.

    python benchmarks/buffers.py [--rounds N] [--batch N]

Two copies of a model are trained by turns in one process, ten steps each; the ratio is the median over all rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch import Tensor, nn

import floatline as fl

RESULT = Path(__file__).parent / "results/buffers_h200.md"
STEPS = 10


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )  # fmt: skip
        self.short: nn.Module = nn.Identity()
        if stride > 1 or inside != 4 * width:
            self.short = nn.Sequential(nn.Conv2d(inside, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        """The block."""
        return torch.relu(self.body(x) + self.short(x))


def resnet50() -> nn.Module:
    """ResNet-50, as its paper has it."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inside = 64
    for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(depth):
            layers.append(Bottleneck(inside, width, 2 if i == 0 and width > 64 else 1))
            inside = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def make_step(device: torch.device, batch: int, *, keeps: bool) -> Callable[[], None]:
    """A guarded step of a model; without keeping buffers where that is asked for."""
    torch.manual_seed(0)
    model = resnet50().to(device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    guard = fl.Guard(model, optimizer, plan="fp16-mixed")
    if not keeps:
        guard._buffers.remove()
        guard._buffers._holders = []
    x = torch.randn(batch, 3, 224, 224, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(0, 1000, (batch,), device=device)
    return lambda: void(guard.step(lambda _: nn.functional.cross_entropy(model(x), y), None))


def void(_: object) -> None:
    """Nothing."""


def seconds(step: Callable[[], None], device: torch.device) -> float:
    """Of ten steps."""
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize(device)
    return time.perf_counter() - began


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=64)
    given = parser.parse_args()
    device = torch.device("cuda")
    ways = [make_step(device, given.batch, keeps=keeps) for keeps in (False, True)]
    for step in ways * 2:
        seconds(step, device)
    times = [[seconds(step, device) for step in ways] for _ in range(given.rounds)]
    ratios = sorted(kept / bare for bare, kept in times)
    bare = statistics.median(row[0] for row in times) / STEPS
    line = f"ResNet-50, batch {given.batch}, fp16-mixed: {1000 * bare:.2f} ms a step without, "
    line += f"ratio {statistics.median(ratios):.4f} (of {given.rounds} rounds {ratios[0]:.4f} to {ratios[-1]:.4f})"
    print(line)
    where = f"{date.today()}, {torch.cuda.get_device_name()}, torch {torch.__version__}: `python benchmarks/buffers.py`"
    RESULT.write_text(f"# Keeping buffers for a skip\n\n{where}\n\n{line}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
