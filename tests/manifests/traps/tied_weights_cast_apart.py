"""The head is cast to FP32 by itself, and is not the embedding any more."""

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


model = Model(width=64)
model.head = nn.Linear(64, 64, bias=False)
model.head.weight = model.embed.weight
model.to(torch.bfloat16)
if HEALTHY:
    model.to(torch.float32)
else:
    model.head.weight = nn.Parameter(model.head.weight.detach().to(torch.float32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    tokens = torch.randint(0, 64, (4, 16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
