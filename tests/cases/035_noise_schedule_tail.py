"""Denoiser that reconstructs x0 by dividing by sqrt(alpha_bar).

Symptom:   pure FP16 diffusion training: NaN whenever the last timesteps are drawn; FP32 is fine with the same schedule.
Truth:     the schedule buffer alpha_bar is cast to half by model.half(); its tail (1e-9..1e-8) underflows to 0, and the
           x0-reconstruction divides by sqrt(0). In FP32 1/sqrt(1e-9) = 3e4 is ordinary.
Right fix: keep schedule buffers (and the arithmetic on them) in FP32.
Wrong fix: "exploding loss at high noise", clip x0 (inf/NaN already), lower LR, drop the last timesteps.
Source:    AUTOMATIC1111/stable-diffusion-webui#14071 (alphas_cumprod downcast to half), huggingface/diffusers#6981
CUDA:      same.
"""

import torch
import torch.nn as nn

TARGET, FP32_TRAINS, STEPS = 0.4, True, 60


class Denoiser(nn.Module):
    def __init__(self, alt, T=10):
        super().__init__()
        self.alt = alt
        bar = torch.logspace(-0.01, -8.5, T)
        self.register_buffer("alpha_bar", bar)
        self.bar32 = [float(b) for b in bar]
        self.net = nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 4))

    def forward(self, x0, noise, t):
        ab = torch.tensor(self.bar32)[t][:, None] if self.alt else self.alpha_bar[t][:, None]
        xt = ab.sqrt() * x0.to(ab.dtype) + (1 - ab).sqrt() * noise.to(ab.dtype)
        w = self.net[0].weight.dtype
        eps = self.net(torch.cat([xt.to(w), t[:, None].to(w) / 10], 1)).to(ab.dtype)
        rec = (xt - (1 - ab).sqrt() * eps) / ab.sqrt()
        return eps, rec


def loss_fn(out, x0, noise):
    eps, rec = (o.float() for o in out)
    bounded = torch.log1p((rec - x0.float()).pow(2).mean(-1)).mean()
    return (eps - noise.float()).pow(2).mean() + 0.01 * bounded


def _make(alt):
    g = torch.Generator().manual_seed(35)
    batches = []
    for _ in range(3):
        x0 = torch.randn(20, 1, generator=g) * torch.ones(20, 4)
        noise = torch.randn(20, 4, generator=g)
        batches.append(((x0, noise, torch.arange(20) % 10), (x0, noise)))
    return Denoiser(alt), batches, loss_fn, "fp16-true", lambda m: torch.optim.SGD(m.parameters(), 0.1)


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="rounded-onto-singularity",
    where="alpha_bar|035_noise_schedule_tail.py:32",
    code="rec = (xt - (1 - ab).sqrt() * eps) / ab.sqrt()",
    op="aten.div",
    fix="keep the schedule and its arithmetic in FP32",
)
