"""A small transformer whose parts can be broken one by one: planted differences, each at a known module."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal attention: by torch's kernel, or written out with something wrong in it."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        if self.kind == "kernel":
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            mixed = scores.masked_fill(self.hidden(length), -math.inf).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))

    def hidden(self, length: int) -> Tensor:
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        if self.kind == "wrong row":
            hidden[5] = False
        if self.kind == "missing element":
            hidden[9, 3] = True
        return hidden


class Scale(nn.Module):
    """Multiplies by a number that is kept."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Feed(nn.Module):
    """Two linear layers; the second may add its products up in the format of its inputs."""

    def __init__(self, width: int, *, truncated: bool = False, factor: float = 0.5) -> None:
        super().__init__()
        self.truncated = truncated
        self.up, self.down, self.scale = nn.Linear(width, 8 * width), nn.Linear(8 * width, width), Scale(factor)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.up(x))
        if not self.truncated:
            return self.scale(self.down(x))
        total = torch.zeros(*x.shape[:-1], self.down.out_features, dtype=x.dtype)
        for start in range(0, x.shape[-1], 4):
            total = total + x[..., start : start + 4] @ self.down.weight[:, start : start + 4].mT
        return self.scale(total + self.down.bias)


class Block(nn.Module):
    """Attention and a feed-forward net on a residual stream."""

    def __init__(self, width: int, *, kind: str = "kernel", eps: float = 1e-5, **options: object) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=eps), nn.LayerNorm(width)
        self.attention, self.feed = Attention(width, kind), Feed(width, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Decoder(nn.Module):
    """Tokens to logits."""

    def __init__(self, vocabulary: int = 40, width: int = 16, blocks: tuple[dict, ...] = ({}, {})) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, **options) for options in blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_decoder(*blocks: dict, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """The same weights every time."""
    torch.manual_seed(0)
    return Decoder(blocks=blocks or ({}, {})).to(dtype)


def make_ids(num: int = 2, length: int = 12) -> Tensor:
    return torch.randint(0, 40, (num, length), generator=torch.Generator().manual_seed(1))


def wrong_gelu(graph, _examples):
    """A backend of torch.compile that multiplies what gelu gives by 1.05."""
    import copy

    graph = copy.deepcopy(graph)
    for node in list(graph.graph.nodes):
        if getattr(node.target, "__name__", "") == "gelu":
            with graph.graph.inserting_after(node):
                more = graph.graph.call_function(torch.mul, (node, 1.05))
            node.replace_all_uses_with(more)
            more.args = (node, 1.05)
    graph.recompile()
    return graph.forward


def faithful(graph, _examples):
    """A backend of torch.compile that changes nothing."""
    return graph.forward
