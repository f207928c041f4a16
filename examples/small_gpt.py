"""A character-level GPT on the text of this project's licence: small enough for a laptop, real enough to learn.

It is a target: `floatline doctor examples/small_gpt.py`. It needs torch alone.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 64, 4, 2, 16


class Block(nn.Module):
    """Attention and a feed-forward net, each behind a LayerNorm, on a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what attention and the feed-forward net found."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class SmallGPT(nn.Module):
    """Predicts the next character."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits for every position."""
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats per character."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(seed: int = 0):
    """Model, batches, loss, precision and optimizer."""
    text = (Path(__file__).parent.parent / "LICENSE").read_text(encoding="utf-8")
    letters = sorted(set(text))
    ids = torch.tensor([letters.index(letter) for letter in text])
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(32):
        starts = torch.randint(len(ids) - CONTEXT - 1, (BATCH, 1), generator=generator)
        window = ids[starts + torch.arange(CONTEXT + 1)]
        batches.append(((window[:, :-1],), (window[:, 1:],)))
    torch.manual_seed(seed)
    return SmallGPT(len(letters)), batches, loss_fn, "fp16-mixed", make_optimizer


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with its usual settings."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3)
