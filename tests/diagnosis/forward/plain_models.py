"""Models of plain PyTorch that are never trained: f_… has a planted failure in FP16, h_… is healthy. First round."""

import torch
import torch.nn.functional as F
from torch import nn


class Res(nn.Module):
    def __init__(self, c, gain=1.0):
        super().__init__()
        self.norm = nn.GroupNorm(4, c)
        self.conv1 = nn.Conv2d(c, c, 3, padding=1)
        self.conv2 = nn.Conv2d(c, c, 3, padding=1)
        with torch.no_grad():
            self.conv2.weight.mul_(gain)

    def forward(self, x):
        h = self.conv1(F.silu(self.norm(x)))
        return x + self.conv2(F.silu(h))


class Decoder(nn.Module):
    def __init__(self, gains):
        super().__init__()
        self.inp = nn.Conv2d(4, 16, 3, padding=1)
        self.blocks = nn.ModuleList(Res(16, g) for g in gains)
        self.norm = nn.GroupNorm(4, 16)
        self.out = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, z):
        x = self.inp(z)
        for b in self.blocks:
            x = F.interpolate(b(x), scale_factor=2) if x.shape[-1] < 32 else b(x)
        return self.out(F.silu(self.norm(x)))


def h_vae():
    return Decoder([1.0, 1.0, 1.0]), torch.randn(1, 4, 8, 8)


def f_vae():
    return Decoder([1.0, 4e6, 1.0]), torch.randn(1, 4, 8, 8)


class Lookup(nn.Module):
    def __init__(self, narrow):
        super().__init__()
        self.table = nn.Embedding(9000, 16)
        self.proj = nn.Linear(16, 16)
        self.narrow = narrow

    def forward(self, ids):
        if self.narrow:
            ids = ids.to(self.proj.weight.dtype)
            ids = ids.round().long().clamp(0, 8999)
        return self.proj(self.table(ids)).mean(1)


def f_ids():
    return Lookup(True), torch.randint(0, 9000, (4, 32))


def h_ids():
    return Lookup(False), torch.randint(0, 9000, (4, 32))


class Embedder(nn.Module):
    def __init__(self, eps, scale):
        super().__init__()
        self.lin = nn.Linear(16, 32)
        self.eps = eps
        self.scale = scale

    def forward(self, x):
        e = self.lin(x) * self.scale
        length = (e * e).sum(-1, keepdim=True).sqrt()
        return e / (length + self.eps)


def f_embed():
    return Embedder(1e-8, 1e-5), torch.randn(6, 16)


def h_embed():
    return Embedder(1e-3, 1.0), torch.randn(6, 16)


class HandNorm(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.lin = nn.Linear(64, 64)
        self.head = nn.Linear(64, 8)
        self.shift = shift

    def forward(self, x):
        h = self.lin(x) + self.shift
        mean = h.mean(-1, keepdim=True)
        var = (h * h).mean(-1, keepdim=True) - mean * mean
        return self.head((h - mean) / (var.abs() + 1e-3).sqrt())


def f_variance():
    return HandNorm(40.0), torch.randn(8, 64)


def h_variance():
    return HandNorm(0.0), torch.randn(8, 64)


class Recurrence(nn.Module):
    def __init__(self, dt):
        super().__init__()
        self.inp = nn.Linear(4, 8)
        self.out = nn.Linear(8, 4)
        self.dt = dt

    def forward(self, x):
        u = self.inp(x).sigmoid()
        state = torch.ones_like(u[:, 0]) * 4
        for t in range(u.shape[1]):
            state = state + self.dt * u[:, t]
        return self.out(state)


def f_stalls():
    return Recurrence(1e-3), torch.randn(2, 800, 4)


def h_moves():
    return Recurrence(0.05), torch.randn(2, 60, 4)


class Masked(nn.Module):
    def __init__(self, big):
        super().__init__()
        self.q = nn.Linear(16, 16)
        self.k = nn.Linear(16, 16)
        self.big = big

    def forward(self, x, keep):
        s = self.q(x) @ self.k(x).transpose(1, 2)
        s = s + (1.0 - keep[:, None]) * self.big
        return s.softmax(-1) @ x


def _masked():
    keep = torch.ones(2, 10)
    keep[:, 7:] = 0
    return torch.randn(2, 10, 16), keep


def f_mask():
    x, keep = _masked()
    keep[1] = 0  # a padded row: FP32 gives it some numbers, FP16 0 / 0
    return Masked(-1e9), (x, keep)


def h_mask():
    return Masked(-1e4), _masked()


class Scores(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.lin = nn.Linear(16, 50)
        self.eps = eps

    def forward(self, x):
        p = (self.lin(x) * 12).softmax(-1)
        return torch.log(p + self.eps)


def f_log():
    return Scores(1e-12), torch.randn(8, 16)


class Router(nn.Module):
    def __init__(self, offset):
        super().__init__()
        self.gate = nn.Linear(16, 8)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.offset = offset

    def forward(self, x):
        scores = self.gate(x) + self.offset
        weight, chosen = scores.topk(2, dim=-1)
        weight = weight.softmax(-1)
        out = torch.zeros_like(x)
        for i, e in enumerate(self.experts):
            w = (weight * (chosen == i)).sum(-1, keepdim=True)
            out = out + w * e(x)
        return out


def f_router():
    return Router(4000.0), torch.randn(300, 16)


def h_router():
    return Router(0.0), torch.randn(300, 16)


class Soft(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(16, 16)
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        h = self.lin(x) * 20
        h = torch.log(1 + torch.exp(h))
        return self.out(h)


def f_softplus():
    return Soft(), torch.randn(8, 16)


class Fourier(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(32, 8)
        self.freq = 2.0 ** torch.arange(16)

    def forward(self, coords):
        phase = coords[..., None] * self.freq.to(coords.dtype)
        feats = torch.cat([phase.sin(), phase.cos()], -1)
        return self.out(feats).mean(1)


def f_fourier():
    return Fourier(), torch.rand(16, 3)
