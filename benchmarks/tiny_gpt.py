"""A small GPT over made-up text: learnable, different for every seed, and small enough for a laptop."""

from __future__ import annotations

import bisect

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SYMBOLS = 27  # a space and 26 letters
CONTEXT = 48


def make_text(seed: int, length: int, *, sharpness: float = 2.0) -> Tensor:
    """A language made from a seed: each character depends on the two before it.

    Args:
        seed: Chooses the language and the text.
        length: Characters.
        sharpness: Spread of the log-odds; 0 is noise, and much more than 2 repeats itself.
    """
    dice = torch.Generator().manual_seed(seed)
    near, far = (sharpness * torch.randn(SYMBOLS, SYMBOLS, generator=dice) for _ in range(2))
    odds = (far[:, None] + near[None]).softmax(-1).cumsum(-1).tolist()
    rolls = torch.rand(length, generator=dice).tolist()
    text = [0, 0]
    for roll in rolls:
        text.append(min(bisect.bisect(odds[text[-2]][text[-1]], roll), SYMBOLS - 1))
    return torch.tensor(text[2:])


class MLP(nn.Module):
    """Two layers around a ReLU. `boost` raises what is between them, and is taken out again behind them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.boost = 1.0  # in exact arithmetic it changes nothing

    def forward(self, x: Tensor) -> Tensor:
        """The same function for every boost, as long as the numbers stay in range."""
        if self.boost == 1.0:
            return self.down(F.relu(self.up(x)))
        return self.down(F.relu(self.up(x) * self.boost) / self.boost)


class Block(nn.Module):
    """Attention, then the MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Two blocks of width 96: 232,000 weights."""

    def __init__(self, *, layers: int = 2, width: int = 96, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(SYMBOLS, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, SYMBOLS, bias=False)
        for name, param in self.named_parameters():
            if param.dim() == 2:
                nn.init.normal_(param, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(param)
        nn.init.constant_(self.norm.weight, 0.5)  # gradients of a norm below 2 from the first step on

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next character."""
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def cross_entropy(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean loss of the next character, taken in float32."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def crops(text: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Pieces of a text at random places, one row each."""
    starts = torch.randint(0, len(text) - CONTEXT, (number,), generator=generator)
    return text[starts[:, None] + torch.arange(CONTEXT + 1)]
