"""A small attention model that FP16 breaks: `floatline diagnose examples/broken_mask.py` says where and why.

Its mask hides the future with -1e9, which float32 holds and float16 does not. `broken_mask.py:fixed` is the same with
a mask that fits.
"""

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH, LENGTH = 16, 32, 12


class Attention(nn.Module):
    """One head that sees the past only."""

    def __init__(self, hidden: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.hidden = hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix each position with those before it."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / WIDTH**0.5
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(future, self.hidden)
        return self.out(scores.softmax(dim=-1) @ v)


class Model(nn.Module):
    """Says the next token."""

    def __init__(self, hidden: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.attention = Attention(hidden)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Give the logits of the next token, classes second as the loss wants them."""
        x = self.tokens(tokens) + self.places.weight
        return self.head(self.norm(x + self.attention(x))).transpose(1, 2)


def make_batches(count: int = 8) -> list:
    """Sequences in which each token is the sum of the two before it."""
    generator = torch.Generator().manual_seed(7)
    batches = []
    for _ in range(count):
        rows = torch.randint(0, VOCABULARY, (16, 2), generator=generator)
        while rows.shape[1] <= LENGTH:
            rows = torch.cat([rows, (rows[:, -1:] + rows[:, -2:-1]) % VOCABULARY], dim=1)
        batches.append(((rows[:, :-1],), (rows[:, 1:],)))
    return batches


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def build() -> tuple:
    """The broken one."""
    return Model(-1e9), make_batches(), F.cross_entropy, "fp16-mixed", make_optimizer


def fixed() -> tuple:
    """The same, with a mask that softmax turns into zeros in every format."""
    return Model(float("-inf")), make_batches(), F.cross_entropy, "fp16-mixed", make_optimizer
