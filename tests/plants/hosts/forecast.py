"""Hourly demand from its past and from the calendar: a GRU over windows of a long series."""

import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

# site: helpers

HOURS = 24 * 365


class Forecaster(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.rnn = nn.GRU(3, hidden, batch_first=True)
        self.mix = nn.Linear(hidden + 4, hidden)
        self.out = nn.Linear(hidden, 6)

    def calendar(self, hour):
        day = 2 * math.pi * hour.float() / 24
        week = 2 * math.pi * hour.float() / 168
        return torch.stack([day.sin(), day.cos(), week.sin(), week.cos()], -1)

    def forward(self, window, hour):
        past, _ = self.rnn(window)
        h = self.mix(torch.cat([past[:, -1], self.calendar(hour)], -1))
        # site: features x=h
        return self.out(torch.tanh(h))


def demand():
    hour = torch.arange(HOURS).float()
    series = torch.sin(2 * math.pi * hour / 24) + 0.5 * torch.sin(2 * math.pi * hour / 168 + 1)
    return series + 0.1 * torch.randn(HOURS)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=44)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
    cfg = parser.parse_args()
    torch.manual_seed(21)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[cfg.precision]
    series = demand()
    # site: data x=series
    series = series.to(device)
    model = Forecaster().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg.steps)
    scaler = torch.amp.GradScaler(device, enabled=cfg.precision == "fp16")
    # site: setup model=model opt=optimizer

    def batch_at(start):
        rows = start[:, None] + torch.arange(12, device=device)
        window = torch.stack([series[rows], series[rows].cumsum(1) / 12, torch.zeros_like(series[rows])], -1)
        future = start[:, None] + 12 + torch.arange(6, device=device)
        hour = start + 12
        # site: index i=hour n=HOURS
        return window, hour, series[future]

    for step in range(cfg.steps):
        window, hour, goal = batch_at(torch.randint(0, HOURS - 24, (64,), device=device))
        optimizer.zero_grad()
        with torch.autocast(device_type=device, dtype=dtype, enabled=cfg.precision != "fp32"):
            pred = model(window, hour)
        loss = F.mse_loss(pred.float(), goal)
        # site: aux x=pred loss=loss goal=goal
        # site: update loss=loss opt=optimizer model=model
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        # end
        scheduler.step()
        # site: step model=model loss=loss step=step
        if step % 20 == 0:
            print(f"{step:3d} mse {loss.item():.5f}")
    with torch.no_grad(), torch.autocast(device_type=device, dtype=dtype, enabled=cfg.precision != "fp32"):
        window, hour, goal = batch_at(torch.arange(0, HOURS - 24, 17, device=device))
        pred = model(window, hour)
        # site: residual x=pred goal=goal
        mae = (pred.float() - goal).abs().mean().item()
    # site: final model=model
    print(f"mae {mae:.5f} mse {loss.item():.5f}")


if __name__ == "__main__":
    main()
