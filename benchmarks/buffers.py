"""What it costs to put buffers back: guarded steps of models with BatchNorm, with and without that part.

    python benchmarks/buffers.py [--rounds N] [--batches N ...] [--dbnet N]

Two copies of a model are trained by turns in one process, five steps each; which of them begins changes from round to
round. The ratio is the median over all rounds, with the interval that has it in 95 of 100 cases. Beside it stands the
host's own time for keeping and settling in a step: where the GPU waits for the host, that is what it costs.
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
STEPS = 5


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


Loss = Callable[[], Tensor]


def make_resnet(batch: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer, Loss]:
    """ResNet-50 on random pictures of 224 x 224."""
    model = resnet50().to(device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    x = torch.randn(batch, 3, 224, 224, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(0, 1000, (batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    return model, optimizer, lambda: nn.functional.cross_entropy(model(x), y)


def make_dbnet(batch: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer, Loss]:
    """The detector, as large as on a GPU of this kind, on drawn pictures of 640 x 640."""
    from floatline.systems.dbnet import VARIANTS, Config, build

    sizes = {"batch_size": batch, "num_images": batch, "held_out": 1}
    work = build(Config.model_validate({**VARIANTS["h200"], **sizes}))
    model = work.model.to(device)
    inputs, targets = ([part.to(device) for part in parts] for parts in work.batches[0])
    return model, work.make_optimizer(model), lambda: work.loss_fn(model(*inputs), *targets)


MODELS = {"ResNet-50": make_resnet, "dbnet": make_dbnet}


class Clock:
    """Adds up the host's time in some methods."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, owner: object, name: str) -> None:
        """Time this method of an object from here on."""
        method = getattr(owner, name)

        def timed(*args: object, **options: object) -> None:
            began = time.perf_counter()
            method(*args, **options)
            self.seconds += time.perf_counter() - began

        setattr(owner, name, timed)


def make_step(name: str, batch: int, device: torch.device, *, keeps: bool, clock: Clock) -> Callable[[], None]:
    """A guarded step of a model; without keeping buffers where that is asked for."""
    torch.manual_seed(0)
    model, optimizer, loss = MODELS[name](batch, device)
    guard = fl.Guard(model, optimizer, plan="fp16-mixed")
    if not keeps:
        guard._buffers.remove()
        guard._buffers.needed = False
    else:
        clock.watch(guard._buffers, "keep")
        clock.watch(guard._buffers, "settle")
    return lambda: void(guard.step(lambda _: loss(), None))


def void(_: object) -> None:
    """Nothing."""


def seconds(step: Callable[[], None], device: torch.device) -> float:
    """Of five steps."""
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize(device)
    return time.perf_counter() - began


def measure(name: str, batch: int, rounds: int) -> str:
    """A row of the table."""
    device, clock = torch.device("cuda"), Clock()
    ways = [make_step(name, batch, device, keeps=keeps, clock=clock) for keeps in (False, True)]
    for step in ways * 3:
        seconds(step, device)
    clock.seconds = 0.0
    times: list[list[float]] = []
    for i in range(rounds):
        order = (0, 1) if i % 2 else (1, 0)
        found = {way: seconds(ways[way], device) for way in order}
        times.append([found[0], found[1]])
    ratios = sorted(kept / bare for bare, kept in times)
    bare, kept = (statistics.median(row[i] for row in times) / STEPS for i in (0, 1))
    reach = 0.98 * rounds**0.5  # of the median's rank
    low, high = ratios[max(0, round(rounds / 2 - reach))], ratios[min(rounds - 1, round(rounds / 2 + reach))]
    host = clock.seconds / (rounds * STEPS)
    row = f"| {name} | {batch} | {1000 * bare:.2f} ms | {1000 * kept:.2f} ms | {statistics.median(ratios):.4f} "
    return row + f"| {low:.4f} to {high:.4f} | {1e6 * host:.0f} µs, {host / bare:.2%} |"


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 256], help="of ResNet-50")
    parser.add_argument("--dbnet", type=int, default=16, help="batch of dbnet; 0 leaves it out")
    given = parser.parse_args()
    rows = [measure("ResNet-50", batch, given.rounds) for batch in given.batches]
    rows += [measure("dbnet", given.dbnet, given.rounds)] if given.dbnet else []
    head = "| model | batch | without | kept | ratio, median | 95 % interval | host |\n|---|---|---|---|---|---|---|"
    table = "\n".join([head, *rows])
    print(table)
    where = (
        f"{date.today()}, {torch.cuda.get_device_name()}, torch {torch.__version__}, fp16-mixed, {given.rounds} rounds"
    )
    RESULT.write_text(f"# Keeping buffers for a skip\n\n{where}: `python benchmarks/buffers.py`\n\n{table}\n", "utf-8")


if __name__ == "__main__":
    main()
