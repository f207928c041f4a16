"""Random residual networks: layers, widths, biases, norms, gates, residuals, positions and heads drawn from a seed."""

import random

import torch
from torch import Tensor, nn
from torch.nn import functional

CHANNEL = 2
ACTIVATIONS = {"silu": functional.silu, "gelu": functional.gelu, "relu": functional.relu, "tanh": torch.tanh}


class WrittenOutNorm(nn.Module):
    """RMSNorm as transformers writes it; its gain is added to a number, as Gemma's is to one."""

    def __init__(self, width: int, added: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width) - added)
        self.variance_epsilon, self.added = 1e-6, added

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        gain = self.weight.float()
        return (wide * (gain + self.added if self.added else gain)).to(x.dtype)


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int, *, gated: bool, bias: bool, activation: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=bias)
        self.gate = nn.Linear(width, inner, bias=bias) if gated else None
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=bias) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        return self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self, draw: random.Random, width: int, norm) -> None:
        super().__init__()
        bias = draw.random() < 0.5
        self.parallel = draw.random() < 0.3
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attention = Attention(width, draw.choice((1, 2, 4)), bias=bias)
        inner = draw.choice((1, 2, 3)) * width
        kind = draw.choice(list(ACTIVATIONS))
        self.mlp = Mlp(width, inner, gated=draw.random() < 0.5, bias=bias, activation=kind)

    def forward(self, x: Tensor) -> Tensor:
        if self.parallel:
            return x + self.attention(self.norm1(x)) + self.mlp(self.norm2(x))
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Network(nn.Module):
    """A network that a seed draws; the stream of its first token has an outlier."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        width = draw.choice((16, 24, 32))
        norm = draw.choice(
            (
                lambda size: nn.LayerNorm(size, bias=False),
                nn.LayerNorm,
                nn.RMSNorm,
                lambda size: nn.RMSNorm(size, eps=1e-6),
                lambda size: WrittenOutNorm(size, 0.0),
                lambda size: WrittenOutNorm(size, 1.0),
            )
        )
        self.embedding = nn.Embedding(20, width)
        self.positions = nn.Embedding(12, width) if draw.random() < 0.5 else None
        self.layers = nn.ModuleList(Layer(draw, width, norm) for _ in range(draw.choice((1, 2, 4))))
        self.norm, self.head = norm(width), nn.Linear(width, 20, bias=False)
        self.tied = draw.random() < 0.5
        if self.tied:
            self.head.weight = self.embedding.weight
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.add_(0.1 * torch.randn_like(parameter)) if "norm" not in name else None
            self.embedding.weight[1, CHANNEL] = 1e5
            self.norm.weight[CHANNEL] = -getattr(self.norm, "added", 0.0)
            if getattr(self.norm, "bias", None) is not None:
                self.norm.bias[CHANNEL] = 0.0
        self.eval()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def draw_tokens() -> Tensor:
    tokens = torch.randint(2, 20, (2, 12), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = 1
    return tokens
