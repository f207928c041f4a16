"""DCGAN on 16x16 rings, with R1 penalty and mixed precision."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--nz", type=int, default=16)
    parser.add_argument("--lr-d", type=float, default=2e-3)
    parser.add_argument("--lr-g", type=float, default=1e-3)
    parser.add_argument("--r1-gamma", type=float, default=0.05)
    parser.add_argument("--precision", default="fp16", choices=["fp32", "fp16", "bf16"])
    return parser.parse_args()


def real_images(n):
    """Bright rings on black, in [-1, 1]."""
    grid = torch.linspace(-1, 1, 16)
    yy, xx = torch.meshgrid(grid, grid, indexing="ij")
    cx, cy = (torch.rand(2, n, 1, 1) - 0.5) * 0.6
    radius = 0.3 + 0.3 * torch.rand(n, 1, 1)
    dist = ((xx - cx) ** 2 + (yy - cy) ** 2).sqrt()
    return (torch.exp(-(((dist - radius) / 0.15) ** 2)) * 2 - 1).unsqueeze(1)


class Generator(nn.Module):
    def __init__(self, nz, ngf=24):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf, 1, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self, ndf=24):
        super().__init__()
        self.conv1 = nn.Conv2d(1, ndf, 4, 2, 1)
        self.conv2 = nn.Conv2d(ndf, ndf * 2, 4, 2, 1)
        self.fc = nn.Linear((ndf * 2 + 1) * 16, 1)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        # minibatch standard deviation
        d = x.float() - x.float().mean(0, keepdim=True)
        std = torch.sqrt((d * d).mean(0) + 1e-8)
        std = std.mean().to(x.dtype).expand(x.size(0), 1, 4, 4)
        x = torch.cat([x, std], 1)
        return self.fc(x.flatten(1)).squeeze(1)


def weights_init(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.05)


def main():
    args = get_args()
    torch.manual_seed(999)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    amp = args.precision != "fp32"
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float16

    netG = Generator(args.nz).to(device)
    netD = Discriminator().to(device)
    netG.apply(weights_init)
    netD.apply(weights_init)
    optimizerD = torch.optim.Adam(netD.parameters(), lr=args.lr_d, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=args.lr_g, betas=(0.5, 0.999))
    scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16")
    criterion = nn.BCEWithLogitsLoss()

    for step in range(args.steps):
        # (1) Update D: maximize log(D(x)) + log(1 - D(G(z)))
        real = real_images(args.batch_size).to(device).requires_grad_(True)
        noise = torch.randn(args.batch_size, args.nz, 1, 1, device=device)
        with torch.autocast(device_type=device, dtype=dtype, enabled=amp):
            fake = netG(noise)
            real_logits = netD(real)
            fake_logits = netD(fake.detach())
            loss_real = criterion(real_logits, torch.ones_like(real_logits))
            loss_fake = criterion(fake_logits, torch.zeros_like(fake_logits))
            errD = loss_real + loss_fake
        (grad_real,) = torch.autograd.grad(scaler.scale(real_logits.float().sum()), real, create_graph=True)
        grad_real = grad_real / scaler.get_scale()
        penalty = grad_real.square().sum(dim=(1, 2, 3)).mean()
        optimizerD.zero_grad()
        scaler.scale(errD + 0.5 * args.r1_gamma * penalty).backward()
        scaler.step(optimizerD)

        # (2) Update G: maximize log(D(G(z)))
        with torch.autocast(device_type=device, dtype=dtype, enabled=amp):
            logits = netD(fake)
            errG = criterion(logits, torch.ones_like(logits))
        optimizerG.zero_grad()
        scaler.scale(errG).backward()
        scaler.step(optimizerG)
        scaler.update()

        if step % 5 == 0 or step == args.steps - 1:
            print(f"[{step}/{args.steps}] Loss_D: {errD.item():.4f} Loss_G: {errG.item():.4f} R1: {penalty.item():.4f}")


if __name__ == "__main__":
    main()
