"""A character-level language model that trains in a second, on the text of this project's licence."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

_TEXT = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
_LETTERS = sorted(set(_TEXT))
_CONTEXT = 8


class TinyLanguage(nn.Module):
    """Predicts a letter from the eight before it. Weights have the given dtype; products are float32.

    A CPU without half-precision units multiplies slowly in 16 bits, and here only the weights' storage matters.
    """

    def __init__(self, dtype, *, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape, size):
            # Started from bfloat16 numbers, so that every dtype starts from the same model.
            values = (torch.randn(shape, generator=generator) * size).to(torch.bfloat16)
            return nn.Parameter(values.to(dtype))

        self.embedding = weight(len(_LETTERS), 16, size=1.0)
        self.hidden = weight(96, _CONTEXT * 16, size=(_CONTEXT * 16) ** -0.5)
        self.hidden_bias = weight(96, size=0.0)
        self.out = weight(len(_LETTERS), 96, size=96**-0.5)
        self.out_bias = weight(len(_LETTERS), size=0.0)

    def forward(self, letters):
        seen = self.embedding.float()[letters].flatten(1)
        hidden = F.gelu(F.linear(seen, self.hidden.float(), self.hidden_bias.float()))
        return F.linear(hidden, self.out.float(), self.out_bias.float())


def train(dtype, make_optimizer, *, seed, steps):
    """Train to the end of a cosine schedule; the loss over a third of the text, in nats a letter."""
    model = TinyLanguage(dtype, seed=seed)
    optimizer = make_optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    windows = torch.tensor([_LETTERS.index(c) for c in _TEXT]).unfold(0, _CONTEXT + 1, 1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = windows[torch.randint(0, len(windows), (64,), generator=generator)]
        optimizer.zero_grad()
        F.cross_entropy(model(batch[:, :-1]), batch[:, -1]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        batch = windows[::3]
        return float(F.cross_entropy(model(batch[:, :-1]), batch[:, -1]))
