"""Fits a quiet recording with a network of the sample's index."""

import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--samples", type=int, default=4096)
parser.add_argument("--batch", type=int, default=2048)
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[args.precision]


def recording(n):
    """Three tones with decay, as loud as a whisper."""
    t = torch.arange(n) / n
    wave = (
        torch.sin(2 * math.pi * 40 * t)
        + 0.6 * torch.sin(2 * math.pi * 96 * t + 1)
        + 0.4 * torch.sin(2 * math.pi * 200 * t)
    )
    return 5e-4 * wave * torch.exp(-t)


class FourierNet(nn.Module):
    def __init__(self, n, bands=8, width=96, loudness=0.01):
        super().__init__()
        self.n, self.loudness = n, loudness
        self.register_buffer("freqs", torch.tensor([8.0, 16, 32, 40, 64, 96, 128, 200][:bands]))
        self.net = nn.Sequential(
            nn.Linear(2 * bands, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def encode(self, index):
        position = index.float()
        phase = 2 * math.pi * (position[:, None] * self.freqs / self.n)
        return torch.cat([phase.sin(), phase.cos()], -1)

    def forward(self, index):
        return self.loudness * self.net(self.encode(index)).squeeze(-1)


signal = recording(args.samples).to(device)
model = FourierNet(args.samples).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16")
autocast = torch.autocast(device_type=device, dtype=dtype, enabled=args.precision != "fp32")

for step in range(args.steps):
    index = torch.randint(0, args.samples, (args.batch,), device=device)
    optimizer.zero_grad()
    with autocast:
        pred = model(index)
        loss = F.mse_loss(pred, signal[index])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    if step % 5 == 0 or step == args.steps - 1:
        snr = 10 * math.log10(signal.square().mean().item() / max(loss.item(), 1e-12))
        print(f"{step:4d} loss {loss.item():.4e} snr {snr:.2f} dB")
