"""One small model, its attention by torch's kernel and by hand, once with a wrong mask: for `floatline parity`.

Three targets in a file: `floatline parity examples/two_attentions.py:kernel examples/two_attentions.py:off_by_one`.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

TOKENS, WIDTH, HEADS, LENGTH = 64, 32, 4, 24


class Attention(nn.Module):
    """Causal attention in one of three ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix what came before."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if self.way == "kernel":
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            if self.way == "off by one":
                hidden[7, 8] = False  # position 7 sees one that is yet to come
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            mixed = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    """Attention and a feed-forward net."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(way)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what both found."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with its usual settings."""
    return torch.optim.AdamW(model.parameters())


def build_with(way: str, seed: int):
    """Model, batches, loss, precision and optimizer; the second block has the attention of that way."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(TOKENS, WIDTH), Block("kernel"), Block(way), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)
    )
    ids = torch.randint(TOKENS, (4, LENGTH + 1))
    return model, [((ids[:, :-1],), (ids[:, 1:],))], loss_fn, "bf16-true", make_optimizer


def kernel(seed: int = 0):
    """By torch's kernel."""
    return build_with("kernel", seed)


def written_out(seed: int = 0):
    """By hand, and right."""
    return build_with("written out", seed)


def off_by_one(seed: int = 0):
    """By hand, with one element of the mask that is wrong."""
    return build_with("off by one", seed)
