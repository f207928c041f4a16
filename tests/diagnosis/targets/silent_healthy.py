"""Training that looks like a silent failure and is none."""

import torch
import torch.nn.functional as F
from torch import nn


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sgd(lr):
    return lambda model: torch.optim.SGD(model.parameters(), lr)


def mse(out, y):
    return (out.float() - y.float()).pow(2).mean()


def converged_with_gradients_that_underflow():
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-20.0, 0, 0, 0], [20.0, 0, 0, 0]]))
        model.bias.zero_()
    x = draw(8, 32, 4)
    x = x.sign() * (x.abs() + 0.5)
    return model, [((x,), ((x[:, 0] > 0).long(),))], F.cross_entropy, "fp16-true", sgd(1e-2)


def converged_where_every_update_is_lost():
    model = nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0, 0.5, 0], [0, 1.0, 0, -0.5]]))
    x = draw(8, 32, 4).bfloat16().float()
    return model, [((x,), (x @ model.weight.detach().T,))], mse, "bf16-true", sgd(1e-2)


def margins_all_met():
    model = nn.Linear(6, 1)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
        model.weight[0, 0] = 40.0
    x = draw(33, 48, 6)
    x = x.sign() * (x.abs() + 0.2)

    def hinge(out, y):
        return (1 - out.float() * y.float()).clamp(min=0).mean()

    return model, [((x,), (x[:, :1].sign(),))], hinge, "fp16-mixed", sgd(0.1)


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4))
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(0.1)

    def forward(self, x):
        return self.net(x)


def plateau_before_it_learns():
    x = draw(19, 128, 6)
    y = (x[:, 0] > 0).long() * 2 + (x[:, 1] * x[:, 2] > 0).long()
    batches = [((x[i : i + 32],), (y[i : i + 32],)) for i in range(0, 128, 32)]
    return Slow(), batches, F.cross_entropy, "fp16-mixed", sgd(0.5)


class LayerScale(nn.Module):
    def __init__(self, depth=8, width=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.gains = nn.ParameterList(nn.Parameter(torch.full((width,), 1e-4)) for _ in range(depth))
        self.out = nn.Linear(width, 3)

    def forward(self, x):
        for layer, gain in zip(self.layers, self.gains, strict=True):
            x = x + gain * torch.relu(layer(x))
        return self.out(x)


def branches_that_round_away():
    x = draw(22, 48, 8)
    return LayerScale(), [((x,), (x[:, :3].argmax(1),))], F.cross_entropy, "bf16-true", sgd(0.5)


class MeanOfTokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(9, 8), nn.Linear(8, 2)

    def forward(self, ids):
        used = ids > 0
        count = used.sum(1, keepdim=True).to(self.out.weight.dtype)
        return self.out((self.table(ids) * used[..., None].to(count.dtype)).sum(1) / count)


def count_beyond_what_bf16_counts():
    ids = torch.randint(0, 9, (24, 400), generator=torch.Generator().manual_seed(25))
    y = torch.arange(24) % 2
    ids[y == 1] = ids[y == 1].clamp(0, 5)
    return MeanOfTokens(), [((ids,), (y,))], F.cross_entropy, "bf16-true", sgd(2.0)


class OnTheScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, year):
        return self.net(year / 2000 - 1)


def whole_numbers_used_smoothly():
    t = torch.randint(0, 4000, (64, 1), generator=torch.Generator().manual_seed(35)).float()
    return OnTheScale(), [((t,), ((t[:, 0] > 2000).long(),))], F.cross_entropy, "bf16-true", sgd(1.0)


def plateau_of_noise():
    batches = []
    for k in range(20):
        x = draw(200 + k, 16, 3)
        batches.append(((x,), (x @ torch.tensor([[0.1], [-0.05], [0.02]]) + draw(300 + k, 16, 1),)))
    return nn.Linear(3, 1), batches, mse, "bf16-true", sgd(0.05)


def long_search_for_a_scale(steps=40):
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**29)
    x = draw(5, 64, 6)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def average_that_moves(steps=30):
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    averages = [p.detach().half() for p in model.parameters()]
    x = draw(6, 48, 6)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
        optimizer.step()
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                averages[i] = 0.9 * averages[i] + 0.1 * p.to(averages[i].dtype)
