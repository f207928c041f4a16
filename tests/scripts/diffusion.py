"""Denoising diffusion on small images: the model in half, one flat FP32 copy of its weights for the optimizer."""

import argparse
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

INITIAL_LOG_LOSS_SCALE = 16.0


def timestep_embedding(timesteps, dim, max_period=10000):
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(half, dtype=torch.float32) / half).to(timesteps.device)
    args = timesteps[:, None].float() * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, channels, emb_channels):
        super().__init__()
        self.norm1 = nn.GroupNorm(4, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.emb = nn.Linear(emb_channels, channels)
        self.norm2 = nn.GroupNorm(4, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x, emb):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.emb(F.silu(emb))[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        return x + h


class Denoiser(nn.Module):
    def __init__(self, channels=24, emb_channels=48):
        super().__init__()
        self.channels = channels
        self.time_embed = nn.Sequential(
            nn.Linear(channels, emb_channels), nn.SiLU(), nn.Linear(emb_channels, emb_channels)
        )
        self.inp = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.ModuleList([ResBlock(channels, emb_channels) for _ in range(2)])
        self.out = nn.Conv2d(channels, 1, 3, padding=1)
        self.dtype = torch.float32

    def convert_to(self, dtype):
        self.to(dtype)
        self.dtype = dtype

    def forward(self, x, timesteps):
        emb = self.time_embed(timestep_embedding(timesteps, self.channels).to(self.dtype))
        h = self.inp(x.to(self.dtype))
        for block in self.blocks:
            h = block(h, emb)
        return self.out(F.silu(h)).float()


class GaussianDiffusion:
    def __init__(self, steps, device):
        betas = torch.linspace(1e-4 * 1000 / steps, 0.02 * 1000 / steps, steps, dtype=torch.float64)
        self.steps = steps
        self.alphas_cumprod = torch.cumprod(1.0 - betas, dim=0).to(device, torch.float32)

    def training_losses(self, model, x_start, t):
        noise = torch.randn_like(x_start)
        acp = self.alphas_cumprod[t].view(-1, 1, 1, 1)
        x_t = acp.sqrt() * x_start + (1 - acp).sqrt() * noise
        target = noise
        return ((model(x_t, t) - target) ** 2).mean(dim=(1, 2, 3))


class TrainLoop:
    def __init__(self, model, diffusion, device, precision, lr, ema_rate):
        self.model, self.diffusion, self.device = model, diffusion, device
        self.model.to(device)
        self.lg_loss_scale = INITIAL_LOG_LOSS_SCALE if precision == "fp16" else 0.0
        self.fp16_scale_growth = 1e-3 if precision == "fp16" else 0.0
        self.model_params = list(self.model.parameters())
        self.master_params = [nn.Parameter(torch.cat([p.detach().float().view(-1) for p in self.model_params]))]
        if precision != "fp32":
            self.model.convert_to(torch.float16 if precision == "fp16" else torch.bfloat16)
        self.opt = torch.optim.AdamW(self.master_params, lr=lr, weight_decay=0.0)
        self.ema_rate = ema_rate
        self.ema_params = copy.deepcopy(self.master_params)

    def run_step(self, batch):
        t = torch.randint(0, self.diffusion.steps, (batch.shape[0],), device=self.device)
        loss = self.diffusion.training_losses(self.model, batch, t).mean()
        self.model.zero_grad()
        loss_scale = 2**self.lg_loss_scale
        (loss * loss_scale).backward()
        self.optimize()
        return loss

    def optimize(self):
        if any(not torch.isfinite(p.grad).all() for p in self.model_params):
            self.lg_loss_scale -= 1
            print(f"Found NaN, decreased lg_loss_scale to {self.lg_loss_scale}")
            return
        grad = torch.cat([p.grad.float().view(-1) for p in self.model_params])
        self.master_params[0].grad = grad.mul_(1.0 / (2**self.lg_loss_scale))
        torch.nn.utils.clip_grad_norm_(self.master_params, 1.0)
        self.opt.step()
        for targ, src in zip(self.ema_params, self.master_params, strict=True):
            targ.detach().mul_(self.ema_rate).add_(src.detach(), alpha=1 - self.ema_rate)
        self.copy_to_model(self.master_params[0])
        self.lg_loss_scale += self.fp16_scale_growth

    def copy_to_model(self, flat):
        offset = 0
        for p in self.model_params:
            p.detach().copy_(flat.detach()[offset : offset + p.numel()].view_as(p))
            offset += p.numel()


def make_images(n, size=12):
    grid = torch.linspace(-1, 1, size)
    angle = torch.rand(n, 1, 1) * math.pi
    phase = grid.view(1, 1, -1) * torch.cos(angle) + grid.view(1, -1, 1) * torch.sin(angle)
    return torch.sin(4 * phase).unsqueeze(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--diffusion_steps", type=int, default=500)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--ema_rate", type=float, default=0.97)
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, diffusion = Denoiser(), GaussianDiffusion(args.diffusion_steps, device)
    loop = TrainLoop(model, diffusion, device, args.precision, args.lr, args.ema_rate)
    for step in range(args.iterations):
        loss = loop.run_step(make_images(args.batch_size).to(device))
        if step % 5 == 0 or step == args.iterations - 1:
            print(f"| step {step} | loss {loss.item():.4f} | lg_loss_scale {loop.lg_loss_scale:.3f} |")
    loop.copy_to_model(loop.ema_params[0])
    with torch.no_grad():
        t = torch.arange(0, diffusion.steps, 4, device=device)
        loss = diffusion.training_losses(model, make_images(len(t)).to(device), t).mean()
    print(f"ema loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
