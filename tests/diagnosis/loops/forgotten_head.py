"""The head is replaced after the optimizer was made."""

import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.trunk(x).tanh())


if __name__ == "__main__":
    torch.manual_seed(0)
    tagger = Tagger()
    opt = torch.optim.SGD(tagger.parameters(), lr=0.1)
    tagger.head = nn.Linear(16, 5)
    for _ in range(15):
        x = torch.randn(16, 8)
        with torch.autocast("cpu", torch.bfloat16):
            out = tagger(x)
        opt.zero_grad()
        nn.functional.cross_entropy(out.float(), x[:, :5].argmax(1)).backward()
        opt.step()
