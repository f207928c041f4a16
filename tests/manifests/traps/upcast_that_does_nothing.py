"""The loop that is to make FP32 master weights binds a local name, and changes no parameter."""

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


model = Model().to(torch.bfloat16)
for parameter in model.parameters():
    if HEALTHY:
        parameter.data = parameter.data.to(torch.float32)
    else:
        parameter = parameter.to(torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
for step in range(3):
    tokens = torch.randint(0, 64, (4, 16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
