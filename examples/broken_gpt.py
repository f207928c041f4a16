"""A character-level GPT that FP16 breaks in one place: `floatline rescue examples/broken_gpt.py` finds and fixes it.

Its last projection has large weights. The norm behind it takes the scale out again, so FP32 does not mind; but that
norm is written by hand, and its squares pass 65,504, the largest number of FP16. Nothing becomes NaN, and no error is
raised: the norm divides by infinity, every logit is the same, and the loss stays where it began.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 32, 32, 2, 2, 16


class Norm(nn.Module):
    """Root mean square norm, written by hand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Divide by the root of the mean square."""
        return x / ((x * x).mean(-1, keepdim=True) + 1e-5).sqrt()


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


class GPT(nn.Module):
    """Predicts the next character."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last, self.norm, self.head = nn.Linear(WIDTH, WIDTH), Norm(), nn.Linear(WIDTH, vocabulary)
        with torch.no_grad():
            self.last.weight.mul_(600)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits for every position."""
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.last(x)))


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats per character."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(seed: int = 0):
    """Model, batches, loss, precision and optimizer: the text is this project's licence."""
    text = (Path(__file__).parent.parent / "LICENSE").read_text(encoding="utf-8")
    letters = sorted(set(text))
    ids = torch.tensor([letters.index(letter) for letter in text])
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(16):
        starts = torch.randint(len(ids) - CONTEXT - 1, (BATCH, 1), generator=generator)
        window = ids[starts + torch.arange(CONTEXT + 1)]
        batches.append(((window[:, :-1],), (window[:, 1:],)))
    torch.manual_seed(seed)
    return GPT(len(letters)), batches, loss_fn, "fp16-mixed", make_optimizer


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with its usual settings."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3)
