"""Half weights, and a mask of -1e9: torch refuses the constant."""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 4
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -1e9)
        return scores.softmax(-1) @ self.value(x)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.look = Attention()
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.look(x))


if __name__ == "__main__":
    reader = Reader().half()
    sgd = torch.optim.SGD(reader.parameters(), lr=0.01)
    for _ in range(5):
        sgd.zero_grad()
        loss = reader(torch.randn(2, 6, 16).half()).float().square().mean()
        loss.backward()
        sgd.step()
