"""The decoder that `floatline.checkup.shapes.Transformer` describes, as a module that runs."""

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        width, narrow, hidden = shape.width, shape.kv_width, shape.hidden
        self.norm, self.last_norm = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.query, self.result = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = nn.Linear(width, narrow, bias=False), nn.Linear(width, narrow, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        batch, tokens, width = x.shape
        n = self.norm(x)
        q, k, v = (
            projection(n).view(batch, tokens, heads, -1).transpose(1, 2)
            for projection, heads in (
                (self.query, self.shape.heads),
                (self.key, self.shape.kv_heads),
                (self.value, self.shape.kv_heads),
            )
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.result(mixed.transpose(1, 2).reshape(batch, tokens, width))
        n = self.last_norm(x)
        return x + self.down(functional.silu(self.gate(n)) * self.up(n))


class Decoder(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def batch_of(shape, batch, sequence):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, shape.vocabulary, (2, batch, sequence), generator=generator).unbind()
