"""A training script with a mistake in it, for `floatline diagnose -- python examples/train_script.py`."""

from __future__ import annotations

import argparse

import torch
from torch import nn


def entropy_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy, written by hand."""
    return -torch.log(logits.softmax(-1)).gather(1, labels[:, None]).mean()


def main() -> None:
    """Train a small classifier under FP16 autocast."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-2)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    for _ in range(60):
        inputs = torch.randn(64, 16) * 20
        labels = inputs[:, :4].argmax(1)
        with torch.autocast("cpu", torch.float16):
            loss = entropy_loss(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
