"""FP16 autocast and a GradScaler that has to find its scale: healthy."""

import argparse
import sys

import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=options.lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    teacher = torch.randn(8, 4)
    for _ in range(options.steps):
        x = torch.randn(64, 8)
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(net(x).float(), x @ teacher)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    sys.stdout.write(f"final loss {loss.item():.3f}\n")


if __name__ == "__main__":
    main()
