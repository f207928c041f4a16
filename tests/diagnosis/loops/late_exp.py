"""A gate of exp(), whose logits grow with the data until FP16 ends, in the 15th step."""

import torch
from torch import nn


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(12, 12)

    def forward(self, x, level):
        heights = self.mix(x) + level
        return torch.exp(heights) / 1000


def run():
    torch.manual_seed(3)
    gate = nn.ModuleDict({"front": nn.Linear(12, 12), "gate": Gate()}).to(torch.float16)
    opt = torch.optim.SGD(gate.parameters(), lr=1e-4)
    for step in range(30):
        opt.zero_grad()
        x = torch.randn(8, 12, dtype=torch.float16)
        y = gate["gate"](gate["front"](x), step * 0.8)
        y.float().sub(1).abs().mean().backward()
        opt.step()


if __name__ == "__main__":
    run()
