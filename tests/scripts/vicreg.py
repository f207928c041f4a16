"""Self-supervised features of small pictures, VICReg and NT-Xent losses under AMP."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


def random_views(images):
    """Two views of each picture: a shift, a contrast and some noise; then every view to mean 0 and deviation 1."""
    views = []
    for _ in range(2):
        shifts = torch.randint(-2, 3, (2,)).tolist()
        view = images.roll(shifts, dims=(2, 3)) * (0.7 + 0.6 * torch.rand(len(images), 1, 1, 1, device=images.device))
        view = view + 0.1 * torch.randn_like(view)
        view = view - view.mean(dim=(1, 2, 3), keepdim=True)
        view = view / view.std(dim=(1, 2, 3), keepdim=True)
        views.append(view)
    return views


def make_pictures(n):
    low = F.interpolate(torch.randn(n, 1, 4, 4), size=16, mode="bilinear")
    return low + 0.2 * torch.randn(n, 1, 16, 16)


class Encoder(nn.Module):
    def __init__(self, width=16, dim=48):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 3, 2, 1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.projector = nn.Sequential(nn.Linear(32 * width, 96), nn.ReLU(), nn.Linear(96, dim), nn.ReLU())

    def forward(self, x):
        return self.projector(self.backbone(x))


def off_diagonal(m):
    return m[~torch.eye(len(m), dtype=torch.bool, device=m.device)]


def vicreg_loss(za, zb):
    loss = 25 * F.mse_loss(za, zb)
    for z in (za, zb):
        std = torch.sqrt(z.var(dim=0) + 1e-4)
        loss = loss + 25 * F.relu(1 - std).mean()
        z = z - z.mean(dim=0)
        cov = (z.T @ z) / (len(z) - 1)
        loss = loss + off_diagonal(cov).pow(2).sum() / z.size(1)
    return loss


def nt_xent(za, zb, temperature=0.2):
    z = F.normalize(torch.cat([za, zb]), dim=1)
    sim = z @ z.T / temperature
    self_mask = torch.eye(len(z), dtype=torch.bool, device=z.device)
    sim = sim.masked_fill(self_mask, float("-inf"))
    target = torch.arange(len(z), device=z.device).roll(len(za))
    return F.cross_entropy(sim, target)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
    args = parser.parse_args()
    torch.manual_seed(5)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    autocast = torch.autocast(
        device, dtype=torch.bfloat16 if args.precision == "bf16" else torch.float16, enabled=args.precision != "fp32"
    )
    pictures = make_pictures(256).to(device)
    model = Encoder().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16")
    for step in range(args.steps):
        batch = pictures[torch.randint(0, len(pictures), (args.batch_size,), device=device)]
        xa, xb = random_views(batch)
        with autocast:
            za, zb = model(xa), model(xb)
            loss = vicreg_loss(za, zb) + nt_xent(za, zb)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 5 == 0 or step == args.steps - 1:
            print(f"step {step}: loss = {loss.item():.4f}, scale = {scaler.get_scale():.0f}")


if __name__ == "__main__":
    main()
