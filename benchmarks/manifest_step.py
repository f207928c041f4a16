"""What a manifest costs: one step with it, against one without, on a CPU.

    python benchmarks/manifest_step.py [--rounds 7]

Both steps are made in one process, one after the other, each round; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import floatline as fl

BATCH, LENGTH = 8, 128


class Encoder(nn.Module):
    """A transformer encoder with embeddings and a head."""

    def __init__(self, width: int, layers: int, words: int = 4096) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.head(self.blocks(self.embed(words)))


def make(width: int, layers: int, *, passes: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model, its optimizer, and one step of it."""
    torch.manual_seed(0)
    model = Encoder(width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    words = torch.randint(0, 4096, (BATCH, LENGTH))

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(passes):
            nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
        optimizer.step()

    return model, optimizer, step


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    print("| model | parameters | passes | a step, s | with a manifest, s | ratio | rounds |")
    print("|---|---:|---:|---:|---:|---:|---|")
    for width, layers, passes in ((128, 2, 1), (256, 4, 1), (512, 4, 1), (256, 4, 2)):
        model, optimizer, step = make(width, layers, passes=passes)
        step()
        fl.manifest(model, optimizer, step=step)  # loads what is loaded once
        pairs = [
            (seconds(step), seconds(lambda: fl.manifest(model, optimizer, step=step)))  # noqa: B023 - called at once
            for _ in range(rounds)
        ]
        bare, measured = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratios = sorted(after / before for before, after in pairs)
        num = sum(p.numel() for p in model.parameters())
        print(
            f"| {layers} layers of {width} | {num:,} | {passes} | {bare:.3f} | {measured:.3f} | "
            f"{measured / bare:.3f} | {ratios[0]:.2f} to {ratios[-1]:.2f} |"
        )
    print(f"\nPeak memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB.")


if __name__ == "__main__":
    main()
