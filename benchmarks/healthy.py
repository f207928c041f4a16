"""Healthy training of thirteen kinds, bare and under the default guard: nothing may be skipped, and no bit may differ.

    python benchmarks/healthy.py [NAME ...] [--steps N]

Each loop is hard on a rule that tells good steps from bad ones by their size: batches of one, noise with heavy tails,
a batch that is harder than the others, data that changes. It is run twice from the same seed in FP32.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import platform
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from functools import partial
from pathlib import Path

import torch
from tiny_gpt import GPT, crops, cross_entropy, make_text
from torch import Tensor, nn
from torch.nn import functional as F

import floatline as fl
from floatline.ledger.lines import Event

RESULT = Path(__file__).parent / "results/healthy_cpu.md"
Take = Callable[[Callable[[], Tensor]], None]
Make = Callable[[nn.Module, torch.optim.Optimizer], Take]
Loop = Callable[[Make, int], list[nn.Module]]


def bare(model: nn.Module, optimizer: torch.optim.Optimizer) -> Take:
    """A step as everybody writes it."""
    del model

    def take(compute_loss: Callable[[], Tensor]) -> None:
        optimizer.zero_grad()
        compute_loss().backward()
        optimizer.step()

    return take


class Guarded:
    """Makes guarded steps, and counts what was skipped and noted."""

    def __init__(self) -> None:
        self.guards: list[fl.Guard] = []
        self.notes = 0

    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Take:
        """A step under a guard with its defaults."""
        guard = fl.Guard(model, optimizer, plan="fp32")
        self.guards.append(guard)
        guard.attach(self)
        return lambda compute_loss: self._take(guard, compute_loss)

    def _take(self, guard: fl.Guard, compute_loss: Callable[[], Tensor]) -> None:
        guard.step(lambda _: compute_loss(), None)

    def begin(self, metadata: object) -> None:
        """A run begins."""

    def take(self, record: object, _: object) -> None:
        """A step, or something besides."""
        self.notes += isinstance(record, Event)

    def close(self) -> None:
        """It is over."""

    @property
    def skipped(self) -> int:
        """Steps that were not applied."""
        return sum(guard.accounts.run.num_skipped for guard in self.guards)


def language(make: Make, steps: int, *, batch: int) -> list[nn.Module]:
    """A small GPT, batches of a few windows."""
    model = GPT(width=32)
    take = make(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    text = make_text(1, 20_000)
    dice = torch.Generator().manual_seed(2)
    for _ in range(steps):
        tokens = crops(text, batch, dice)
        take(lambda: cross_entropy(model, tokens))  # noqa: B023
    return [model]


def recurrent(make: Make, steps: int) -> list[nn.Module]:
    """A GRU on characters, one line at a time."""
    text = make_text(3, 20_000)
    table, cells, head = nn.Embedding(64, 24), nn.GRU(24, 48, batch_first=True), nn.Linear(48, 64)
    model = nn.ModuleList([table, cells, head])
    take = make(model, torch.optim.Adam(model.parameters(), lr=3e-3))
    dice = torch.Generator().manual_seed(4)
    for _ in range(steps):
        line = crops(text, 1, dice)
        take(lambda: F.cross_entropy(head(cells(table(line[:, :-1]))[0])[0], line[0, 1:]))  # noqa: B023
    return [model]


def _mlp(inputs: int, width: int = 32, outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)
    )


def _regress(make: Make, data: Iterator[tuple[Tensor, Tensor]], *, lr: float = 1e-3) -> list[nn.Module]:
    model = _mlp(8)
    take = make(model, torch.optim.Adam(model.parameters(), lr=lr))
    for x, y in data:
        take(lambda: (model(x) - y).square().mean())  # noqa: B023
    return [model]


def heavy_tails(make: Make, steps: int) -> list[nn.Module]:
    """Regression with Student's t noise of 2 degrees of freedom."""
    torch.manual_seed(5)
    w, noise = torch.randn(8, 1), torch.distributions.StudentT(2.0)
    pairs = ((x, x @ w + noise.sample((16, 1))) for x in (torch.randn(16, 8) for _ in range(steps)))
    return _regress(make, pairs)


def hard_batch(make: Make, steps: int) -> list[nn.Module]:
    """Fifty batches in a fixed order, one of them twenty times as far from the model."""
    torch.manual_seed(6)
    w, held = torch.randn(8, 1), [torch.randn(16, 8) for _ in range(50)]
    pairs = ((held[i % 50], (20 if i % 50 == 17 else 1) * held[i % 50] @ w) for i in range(steps))
    return _regress(make, pairs)


def curriculum(make: Make, steps: int) -> list[nn.Module]:
    """Data that becomes thirty times as hard half way."""
    torch.manual_seed(7)
    w = torch.randn(8, 1)
    pairs = ((x, (30 if i > steps // 2 else 1) * (x @ w).sin()) for i, x in enumerate(torch.randn(steps, 16, 8)))
    return _regress(make, pairs)


def memorising(make: Make, steps: int) -> list[nn.Module]:
    """One small batch, down to a loss of about 1e-8."""
    torch.manual_seed(8)
    x, y = torch.randn(8, 8), torch.randn(8, 1)
    return _regress(make, ((x, y) for _ in range(steps)), lr=5e-3)


def reinforce(make: Make, steps: int) -> list[nn.Module]:
    """Policy gradients on a bandit with rewards of very different size: losses of both signs."""
    policy = _mlp(4, outputs=6)
    take = make(policy, torch.optim.Adam(policy.parameters(), lr=1e-3))
    dice = torch.Generator().manual_seed(9)
    for _ in range(steps):
        seen = torch.randn(12, 4, generator=dice)
        drawn = torch.randint(0, 6, (12,), generator=dice)
        reward = torch.where(drawn == 3, 50.0, 1.0) * torch.randn(12, generator=dice)
        take(lambda: -(policy(seen).log_softmax(1).gather(1, drawn[:, None])[:, 0] * reward).mean())  # noqa: B023
    return [policy]


def physics(make: Make, steps: int) -> list[nn.Module]:
    """A physics-informed network: u'' = -u with boundary terms, points drawn in each step."""
    net = _mlp(1)
    take = make(net, torch.optim.Adam(net.parameters(), lr=2e-3))
    dice = torch.Generator().manual_seed(10)

    def residual(points: Tensor) -> Tensor:
        t = points.requires_grad_()
        u = net(t)
        (first,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), t, create_graph=True)
        edge = net(torch.tensor([[0.0], [math.pi / 2]]))
        return (second + u).square().mean() + 100 * (edge - torch.tensor([[0.0], [1.0]])).square().mean()

    for _ in range(steps):
        points = torch.rand(24, 1, generator=dice) * math.pi
        take(lambda: residual(points.clone()))  # noqa: B023
    return [net]


def adversarial(make: Make, steps: int) -> list[nn.Module]:
    """A GAN on a ring, each half with its own optimizer and guard."""
    makes, tells = _mlp(4, outputs=2), _mlp(2)
    one, two = (make(m, torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.5, 0.9))) for m in (makes, tells))
    dice = torch.Generator().manual_seed(11)
    for _ in range(steps):
        angle = torch.rand(32, 1, generator=dice) * 2 * math.pi
        real, noise = torch.cat([angle.cos(), angle.sin()], 1), torch.randn(32, 4, generator=dice)
        two(lambda: F.softplus(-tells(real)).mean() + F.softplus(tells(makes(noise).detach())).mean())  # noqa: B023
        one(lambda: F.softplus(-tells(makes(noise))).mean())  # noqa: B023
    return [makes, tells]


def restarts(make: Make, steps: int) -> list[nn.Module]:
    """SGD with momentum and warm restarts: the loss jumps at each."""
    torch.manual_seed(12)
    model = _mlp(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    rates = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=100)
    take = make(model, optimizer)
    w = torch.randn(8, 1)
    for x in torch.randn(steps, 16, 8):
        take(lambda: (model(x) - (x @ w).sin()).square().mean())  # noqa: B023
        rates.step()
    return [model]


def pictures(make: Make, steps: int) -> list[nn.Module]:
    """A small CNN with BatchNorm and dropout."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16),
        nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.LazyLinear(10),
    )  # fmt: skip
    model(torch.zeros(2, 1, 12, 12))
    take = make(model, torch.optim.AdamW(model.parameters(), lr=2e-3))
    dice = torch.Generator().manual_seed(13)
    for _ in range(steps):
        label = torch.randint(0, 10, (8,), generator=dice)
        x = torch.randn(8, 1, 12, 12, generator=dice) + label[:, None, None, None] / 5
        take(lambda: F.cross_entropy(model(x), label))  # noqa: B023
    return [model]


def graph(make: Make, steps: int) -> list[nn.Module]:
    """Messages along the edges of a random graph, a few labelled nodes in each step."""
    torch.manual_seed(14)
    x, edges = torch.randn(200, 8), torch.randint(0, 200, (2, 1200))
    labels = (x[:, 0] + 0.5 * torch.zeros(200).index_add(0, edges[1], x[edges[0], 1]) > 0).long()
    enter, leave = nn.Linear(8, 32), nn.Linear(32, 2)
    model = nn.ModuleList([enter, leave])
    take = make(model, torch.optim.Adam(model.parameters(), lr=5e-3))

    def answer() -> Tensor:
        hidden = enter(x).relu()
        return leave(hidden + torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]]))

    for _ in range(steps):
        chosen = torch.randint(0, 200, (6,))
        take(lambda: F.cross_entropy(answer()[chosen], labels[chosen]))  # noqa: B023
    return [model]


LOOPS: dict[str, Loop] = {
    "language model, batch 1": lambda make, steps: language(make, steps, batch=1),
    "language model, batch 4": lambda make, steps: language(make, steps, batch=4),
    "character GRU, batch 1": recurrent,
    "noise with heavy tails": heavy_tails,
    "one hard batch of 50": hard_batch,
    "data that gets harder": curriculum,
    "memorising to 1e-8": memorising,
    "REINFORCE": reinforce,
    "physics-informed": physics,
    "GAN": adversarial,
    "warm restarts": restarts,
    "CNN with BatchNorm": pictures,
    "graph network": graph,
}


def bits(models: list[nn.Module]) -> bytes:
    """All weights and buffers."""
    tensors = [tensor.detach().contiguous() for model in models for tensor in model.state_dict().values()]
    return b"".join(tensor.view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)


def compare(name: str, steps: int) -> tuple[int, int, bool]:
    """Steps that the guard skipped, notes that it made, and whether all bits are those of the bare loop."""
    loop = LOOPS[name]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = bits(loop(bare, steps))
    torch.manual_seed(0)
    guarded = Guarded()
    held = bits(loop(guarded, steps))
    return guarded.skipped, guarded.notes, plain == held


def main() -> None:
    """Run the loops, and write the table where all of them were run in full."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME", help="Loops whose names begin so; all by default.")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--processes", type=int, default=1, help="Loops that are run at once.")
    given = parser.parse_args()
    chosen = [name for name in LOOPS if not given.names or name.startswith(tuple(given.names))]
    lines = ["| loop | steps skipped | outliers noted | bits |", "|---|---|---|---|"]
    good = True
    with ProcessPoolExecutor(given.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for name, found in zip(chosen, pool.map(partial(compare, steps=given.steps), chosen), strict=True):
            skipped, notes, equal = found
            good = good and equal and not skipped
            lines.append(f"| {name} | {skipped} | {notes} | {'equal' if equal else '**differ**'} |")
            print(lines[-1], flush=True)
    if len(chosen) == len(LOOPS) and given.steps == 1500:
        where = f"{date.today()}, torch {torch.__version__}, {platform.machine()}: `python benchmarks/healthy.py`"
        what = f"{given.steps:,} steps of each loop in FP32, bare and guarded, from one seed."
        head = f"# Healthy loops under the default guard\n\n{where}, {what}\n\n"
        RESULT.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    sys.exit(not good)


if __name__ == "__main__":
    main()
