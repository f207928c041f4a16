"""Denoising of short signals over a thousand noise levels, with averaged weights."""

import argparse
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

# site: helpers

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=44)
parser.add_argument("--levels", type=int, default=4000)
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
opts = parser.parse_args()
torch.manual_seed(17)
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[opts.precision]
autocast = torch.autocast(device_type=device, dtype=dtype, enabled=opts.precision != "fp32")


def level_features(t, dim=16):
    # site: index i=t n=opts.levels
    freqs = torch.exp(-math.log(opts.levels) * torch.arange(dim // 2, device=t.device) / (dim // 2))
    angle = t.float()[:, None] * freqs
    # site: angle out=angle t=t freqs=freqs
    return torch.cat([angle.sin(), angle.cos()], -1)


class Denoiser(nn.Module):
    def __init__(self, n=32, width=96):
        super().__init__()
        self.inp = nn.Linear(n + 16, width)
        self.mid = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, n)

    def forward(self, x, t):
        h = F.silu(self.inp(torch.cat([x, level_features(t)], -1)))
        h = self.mid(h)
        # site: features x=h
        return self.out(F.silu(self.norm(h)))


def signals(n):
    phase = 2 * math.pi * torch.rand(n, 1, device=device)
    return torch.sin(torch.arange(32, device=device) * 0.4 + phase)


betas = torch.linspace(1e-5, 2e-3, opts.levels, device=device)
signal_share = torch.cumprod(1 - betas, 0)
# site: schedule betas=betas share=signal_share
model = Denoiser().to(device)
ema = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=opts.lr)
scaler = torch.amp.GradScaler(device, enabled=opts.precision == "fp16")
# site: setup model=model opt=optimizer


def noised(batch, t):
    noise = torch.randn_like(batch)
    share = signal_share[t][:, None]
    return share.sqrt() * batch + (1 - share).sqrt() * noise, noise


for i in range(opts.iterations):
    t = torch.randint(0, opts.levels, (64,), device=device)
    noisy, noise = noised(signals(64), t)
    with autocast:
        pred = model(noisy, t)
        loss = F.mse_loss(pred, noise)
        # site: inner x=pred loss=loss
    # site: aux x=pred loss=loss goal=noise
    optimizer.zero_grad(set_to_none=True)
    # site: update loss=loss opt=optimizer model=model
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    # end
    # site: step model=model loss=loss step=i
    with torch.no_grad():
        for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 0.1)
    if i % 20 == 0:
        print(f"[{i}] {loss.item():.4f}")

with torch.no_grad(), autocast:
    t = torch.arange(0, opts.levels, 8, device=device)
    noisy, noise = noised(signals(len(t)), t)
    pred = ema(noisy, t)
    # site: residual x=pred goal=noise
    ema_loss = F.mse_loss(pred, noise)
# site: final model=model
print(f"averaged weights: {ema_loss.item():.4f}")
