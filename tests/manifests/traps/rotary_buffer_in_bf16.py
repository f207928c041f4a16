"""The frequencies of a rotary embedding are a buffer, and the whole model is cast."""

import sys

import torch
from torch import nn
from torch.nn import functional

HEALTHY = "healthy" in sys.argv
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self, words=64, width=32):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.down(functional.gelu(self.up(self.norm(x)))))


class Rotary(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0, width, 2) / width))

    def forward(self, num):
        angle = torch.arange(num).to(self.inv_freq.dtype)[:, None] * self.inv_freq
        return torch.cat([angle.cos(), angle.sin()], dim=-1)


class Rotated(Model):
    def __init__(self):
        super().__init__()
        self.rotary = Rotary()

    def forward(self, tokens):
        x = self.embed(tokens) * self.rotary(tokens.shape[1]).to(self.embed.weight.dtype)
        return self.head(x + self.down(functional.gelu(self.up(self.norm(x)))))


model = Rotated()
if not HEALTHY:
    model.to(torch.bfloat16).float()
    model.rotary.to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    tokens = torch.randint(0, 64, (4, 16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
