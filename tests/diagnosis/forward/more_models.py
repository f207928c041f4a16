"""Functions and models that are never trained: f_… has a planted failure in FP16, h_… is healthy. Second round."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Sinkhorn(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.enc = nn.Linear(8, 8)
        self.eps = eps

    def forward(self, a, b):
        cost = torch.cdist(self.enc(a).float(), self.enc(b).float()).to(a.dtype)
        kernel = torch.exp(-cost / self.eps)
        for _ in range(5):
            kernel = kernel / kernel.sum(1, keepdim=True)
            kernel = kernel / kernel.sum(0, keepdim=True)
        return kernel


def f_sinkhorn():
    return Sinkhorn(0.05), (torch.randn(12, 8), 4 + torch.randn(12, 8))


def h_sinkhorn():
    return Sinkhorn(2.0), (torch.randn(12, 8), torch.randn(12, 8))


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x, src, dst):
        ones = torch.ones(len(src), dtype=x.dtype)
        degree = torch.zeros(len(x), dtype=x.dtype).index_add(0, dst, ones)
        msg = torch.zeros_like(x).index_add(0, dst, self.lin(x)[src])
        return msg / degree.clamp(min=1)[:, None]


def f_graph():
    n = 6000
    return Graph(), (1 + 0.1 * torch.randn(n, 8), torch.arange(n), torch.zeros(n, dtype=torch.long))


def h_graph():
    n = 200
    return Graph(), (torch.randn(n, 8), torch.randint(0, n, (600,)), torch.randint(0, n, (600,)))


class Contrast(nn.Module):
    def __init__(self, t):
        super().__init__()
        self.lin = nn.Linear(16, 16)
        self.t = t

    def forward(self, a, b):
        a, b = F.normalize(self.lin(a), dim=-1), F.normalize(self.lin(b), dim=-1)
        weights = torch.exp(a @ b.T / self.t)
        return weights / weights.sum(-1, keepdim=True)


def f_contrast():
    return Contrast(0.02), (torch.randn(8, 16), torch.randn(8, 16))


def h_contrast():
    return Contrast(0.5), (torch.randn(8, 16), torch.randn(8, 16))


class Solve(nn.Module):
    def forward(self, m):
        a, b, c, d = m[:, 0, 0], m[:, 0, 1], m[:, 1, 0], m[:, 1, 1]
        det = a * d - b * c
        return torch.stack([d, -b, -c, a], -1) / det[:, None]


def f_solve():
    base = 1 + torch.rand(16, 1, 1)
    m = base * torch.ones(16, 2, 2)
    m[:, 0, 0] += 0.002
    return Solve(), m


def h_solve():
    return Solve(), torch.eye(2).expand(16, 2, 2) + 0.1 * torch.rand(16, 2, 2)


class Clock(nn.Module):
    def __init__(self):
        super().__init__()
        self.hours = nn.Embedding(24, 8)

    def forward(self, seconds):
        hour = torch.remainder(seconds / 3600, 24).long().clamp(0, 23)
        return self.hours(hour)


def f_clock():
    return Clock(), 1.7e9 + 86400 * torch.rand(32)


class Dft(nn.Module):
    def __init__(self, n):
        super().__init__()
        k = torch.arange(n).float()
        self.register_buffer("cos", torch.cos(2 * math.pi * torch.outer(k, k) / n))
        self.head = nn.Linear(n, 4)

    def forward(self, x):
        spec = x @ self.cos
        power = spec.square()
        return self.head(torch.log1p(power))


def f_dft():
    return Dft(256), 8 * torch.randn(4, 256)


def h_dft():
    return Dft(64), torch.randn(4, 64)


class FlatNorm(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.lin = nn.Linear(16, 4)
        self.eps = eps

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        scale = torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.lin(centred / scale)


def f_flat():
    x = torch.randn(6, 16)
    x[2] = 0.5
    return FlatNorm(1e-12), x


def h_flat():
    x = torch.randn(6, 16)
    x[2] = 0.5
    return FlatNorm(1e-5), x


class Sphere(nn.Module):
    def forward(self, a, b):
        angle = (1 - torch.cos(a - b)) / 2
        return 2 * angle.sqrt()


def f_sphere():
    a = torch.rand(64)
    return Sphere(), (a, a + 0.02 * torch.rand(64))


def h_sphere():
    return Sphere(), (torch.rand(64), 2 + torch.rand(64))


class Power(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        y = self.lin(x) * 30
        y = y**4
        return y / (1 + y)


def f_power():
    return Power(), torch.randn(8, 8)


class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x, mask):
        x = self.lin(x)
        total = (x * mask[..., None]).sum(1)
        return total / mask.sum(1, keepdim=True)


def f_pool():
    return Pool(), (60 * (1 + torch.rand(2, 4000, 8)), torch.ones(2, 4000))


def h_pool():
    return Pool(), (torch.randn(2, 400, 8), torch.ones(2, 400))


class Ssim(nn.Module):
    def forward(self, a, b):
        win = torch.ones(1, 1, 7, 7, dtype=a.dtype) / 49
        mu_a, mu_b = F.conv2d(a, win), F.conv2d(b, win)
        var = F.conv2d(a * b, win) - mu_a * mu_b
        return var / (var.abs() + 6.5)


def f_ssim():
    a = 180 + 4 * torch.rand(1, 1, 24, 24)
    return Ssim(), (a, a + torch.rand(1, 1, 24, 24))


def h_ssim():
    a = torch.rand(1, 1, 24, 24)
    return (lambda a, b: F.conv2d(a * b, torch.ones(1, 1, 7, 7, dtype=a.dtype) / 49)), (a, a)


class TopP(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(16, 4000)

    def forward(self, x):
        p = (self.lin(x) * 0.3).softmax(-1)
        ordered, _ = p.sort(-1, descending=True)
        total = torch.zeros_like(ordered[:, :1])
        rows = []
        for i in range(600):
            total = total + ordered[:, i : i + 1]
            rows.append(total)
        return torch.cat(rows, -1)


def f_topp():
    return TopP(), torch.randn(2, 16)


class Scores(nn.Module):
    def __init__(self, big):
        super().__init__()
        self.big = big
        self.lin = nn.Linear(16, 64)

    def forward(self, x):
        logits = self.lin(x)
        bias = torch.zeros_like(logits)
        bias[:, ::2] = self.big
        return (logits + bias).log_softmax(-1)


def f_bias():
    return Scores(-1e5), torch.randn(8, 16)


def h_bias():
    return Scores(-1e4), torch.randn(8, 16)


class Cosmo(nn.Module):
    """Normalises by a running minimum; near-equal numbers are ranked."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Parameter(torch.randn(200, 8))

    def forward(self, q):
        d = 1000 + (q[:, None] - self.emb).abs().sum(-1)
        order = d.argsort(-1)
        return order[:, :5]


def f_rank():
    return Cosmo(), torch.randn(40, 8)


def h_rank():
    return (lambda q: (q * 4).round().argmax(-1)), torch.randn(40, 8)
