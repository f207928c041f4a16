"""A small decoder in BF16 that FP16 cannot run: `floatline diagnose --forward examples/born_in_bf16.py` says where.

Nothing is trained. One gated layer makes numbers that BF16 holds and FP16 does not, as some large models do.
`born_in_bf16.py:tame` is the same without them.
"""

import torch
from torch import nn
from torch.nn import functional as F

SYMBOLS, WIDTH, LENGTH = 64, 48, 20


class Gated(nn.Module):
    """A gated layer, whose two factors may both be large."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        with torch.no_grad():
            self.gate.weight[0] *= size
            self.up.weight[0] *= size
            self.down.weight[:, 0] /= size**2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gate, and come back to the width of the stream."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Attention to the past, then the gated layer."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
        self.qkv, self.out, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), Gated(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add both to the stream."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """Logits of the next token."""

    def __init__(self, sizes: list[float]) -> None:
        super().__init__()
        self.tokens, self.layers = nn.Embedding(SYMBOLS, WIDTH), nn.ModuleList(Layer(size) for size in sizes)
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Read tokens, and say what comes next."""
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def forward() -> tuple:
    """A model, and what it is called with."""
    return Decoder([1.0, 1.0, 600.0, 1.0]).bfloat16(), torch.randint(0, SYMBOLS, (4, LENGTH))


def tame() -> tuple:
    """The same, with numbers of an ordinary size."""
    return Decoder([1.0] * 4).bfloat16(), torch.randint(0, SYMBOLS, (4, LENGTH))
