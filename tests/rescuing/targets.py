"""Small targets: an energy beyond FP16 in one module, a loss that goes to zero, FP16 weights, a wild learning rate."""

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


class Energy(nn.Module):
    def forward(self, x):
        return (x * x).sum(-1, keepdim=True).sqrt()


class Net(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.body, self.energy, self.head = nn.Linear(8, 32), Energy(), nn.Linear(32, 1)

    def forward(self, x):
        x = self.body(x) * self.scale
        return self.head(x / self.energy(x) * 5)


def _batches(seed):
    dice = torch.Generator().manual_seed(seed + 100)
    x = torch.randn(256, 8, generator=dice)
    y = x[:, :1].sign() + 0.5 * torch.randn(256, 1, generator=dice)
    return [((a,), (b,)) for a, b in zip(x.split(64), y.split(64), strict=True)]


def island(seed=0):
    hold = Path("hold")
    while hold.exists() and Path(hold.read_text()).exists():
        time.sleep(0.01)
    return Net(300.0), _batches(seed), F.mse_loss, "fp16-mixed", lambda m: torch.optim.AdamW(m.parameters(), 1e-2)


def vanishing(seed=0):
    """Without noise: the loss goes to zero, and a share of it is less than FP32 differs from itself by."""
    dice = torch.Generator().manual_seed(7)
    x = torch.randn(64, 8, generator=dice)
    y = (x / x.norm(dim=-1, keepdim=True))[:, :1] * 5
    batches = [((a,), (b,)) for a, b in zip(x.split(32), y.split(32), strict=True)]
    return Net(300.0), batches, F.mse_loss, "fp16-mixed", lambda m: torch.optim.AdamW(m.parameters(), 1e-2)


def optimizer(seed=0):
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    return model, _batches(seed), F.mse_loss, "fp16-true", lambda m: torch.optim.Adam(m.parameters(), 3e-3)


def divergence(seed=0):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    return model, _batches(seed), F.mse_loss, "fp16-mixed", lambda m: torch.optim.SGD(m.parameters(), 300.0)


def healthy(seed=0):
    return Net(1.0), _batches(seed), F.mse_loss, "fp16-mixed", lambda m: torch.optim.AdamW(m.parameters(), 1e-2)


def train(steps=20, seed=0):
    """A loop of its own, with the step of the scaler forgotten."""
    torch.manual_seed(seed)
    model, batches, loss_fn, _, make = healthy(seed)
    optimizer, scaler = make(model), torch.amp.GradScaler("cpu")
    for step in range(steps):
        (x,), (y,) = batches[step % len(batches)]
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        optimizer.step()
    return model
