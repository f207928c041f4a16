"""A 12-layer transformer with one fragile operation planted in one layer: finite in FP32, not in FP16."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SYMBOLS, LENGTH = 32, 16


class Norm(nn.Module):
    """A hand-written RMS norm: `gain` scales what it squares, and is taken out by the division."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.gain, self.eps = 1.0, 1e-5

    def forward(self, x: Tensor) -> Tensor:
        """Squares overflow with a large gain; with a small one, they and eps are 0."""
        x = x * self.gain
        size = (x * x).mean(-1, keepdim=True)
        return x / torch.sqrt(size + self.eps * self.gain**2) * self.weight.to(x.dtype)


class Gate(nn.Module):
    """A hand-written softplus: exp overflows FP16 from 11.1 on."""

    def __init__(self) -> None:
        super().__init__()
        self.steepness = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """log(1 + e^(sx)) / s."""
        return torch.log(1 + torch.exp(x * self.steepness)) / self.steepness


class Attention(nn.Module):
    """Causal attention; `gain` scales the scores, and is taken out before the softmax."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.gain = heads, 1.0
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Scores are q·k times the gain, as where the scale is applied after the product."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q * self.gain) @ k.transpose(-1, -2) / (self.gain * (width // self.heads) ** 0.5)
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(mask, -1e4).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    """Up, norm, gate, down; `boost` raises the hidden layer, and is taken out behind it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.norm, self.gate = nn.Linear(width, 2 * width), Norm(2 * width), Gate()
        self.down = nn.Linear(2 * width, width)
        self.boost = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """The hidden layer is what overflows."""
        hidden = F.relu(self.up(x) * self.boost) / self.boost
        return self.down(self.gate(self.norm(hidden)))


class Block(nn.Module):
    """Attention, then the feed-forward part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed_forward = Attention(width, heads), FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Transformer(nn.Module):
    """Twelve blocks."""

    def __init__(self, *, layers: int = 12, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(SYMBOLS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, SYMBOLS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token."""
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _plant_hidden(block: Block) -> str:
    block.feed_forward.boost = 2.0**20
    return "feed_forward"


def _plant_scores(block: Block) -> str:
    block.attention.gain = 2.0**14
    with torch.no_grad():
        block.attention.qkv.weight.mul_(4)
    return "attention"


def _plant_squares(block: Block) -> str:
    block.feed_forward.norm.gain = 2.0**11
    return "feed_forward.norm"


def _plant_exponential(block: Block) -> str:
    block.feed_forward.gate.steepness = 16.0
    return "feed_forward.gate"


def _plant_eps(block: Block) -> str:
    block.feed_forward.norm.gain = 2.0**-14
    return "feed_forward.norm"


KINDS = {
    "hidden layer": _plant_hidden,
    "attention scores": _plant_scores,
    "sum of squares": _plant_squares,
    "exp": _plant_exponential,
    "eps": _plant_eps,
}


def plant(seed: int, *, width: int = 32) -> tuple[Transformer, str, str]:
    """A model, the kind of what is planted in it, and the module that it is planted in; by seed, kind after kind."""
    torch.manual_seed(seed)
    model = Transformer(width=width)
    layer = int(torch.randint(0, len(model.blocks), ()))
    kind = list(KINDS)[seed % len(KINDS)]
    return model, kind, f"blocks.{layer}.{KINDS[kind](model.blocks[layer])}"


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross-entropy of the next token."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
