"""Training that goes wrong without inf or NaN. `HERE` marks the line to blame."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn


class SignSGD(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(seed, low, high, *shape):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def sgd(lr):
    return lambda model: torch.optim.SGD(model.parameters(), lr)


def adam(lr):
    return lambda model: torch.optim.Adam(model.parameters(), lr)


def mlp(features, outputs):
    return nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, outputs))


def classes(seed, samples=48):
    x = draw(seed, samples, 6)
    return [((x,), (x[:, :3].argmax(1),))]


def mse(out, y):
    return (out.float() - y.float()).pow(2).mean()


def underflow_of_weighted_loss():
    def loss(out, y):
        return 1e-7 * F.cross_entropy(out.float(), y)  # HERE

    return mlp(6, 3), classes(2), loss, "fp16-true", lambda model: SignSGD(model.parameters(), 4e-3)


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.tensor(2048.0))
        self.net = mlp(6, 3)

    def forward(self, x):
        self.seen += 1  # HERE
        return self.net(x)


def counter_that_stops():
    return Counted(), classes(14), F.cross_entropy, "fp16-true", sgd(0.5)


def average_that_stops(steps=30):
    model = mlp(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ((x,), (y,)) = classes(12)[0]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(p.sign())
    averages = [p.detach().half() for p in model.parameters()]
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                averages[i] = 0.9999 * averages[i] + 0.0001 * p.to(averages[i].dtype)  # HERE


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(2, 2)

    def forward(self, x):
        at = torch.arange(5000, 5000 + x.shape[1], dtype=x.dtype)  # HERE
        angle = at * (math.pi / 2)
        return self.out(torch.stack([angle.sin(), angle.cos()], -1))[None] + 0 * x[..., None]


def positions_from_arange():
    y = (torch.arange(64) % 4 < 2).long().expand(2, 64)

    def loss(out, y):
        return F.cross_entropy(out.float().flatten(0, 1), y.flatten())

    return Positions(), [((draw(19, 2, 64),), (y,))], loss, "fp16-true", sgd(0.5)


class Clock(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(2, 2)

    def forward(self, seconds):
        angle = seconds * (2 * math.pi / 16)  # HERE
        return self.out(torch.stack([angle.sin(), angle.cos()], 1))


def timestamps_as_floats():
    t = whole(20, 10000, 30000, 64)
    return Clock(), [((t.float(),), ((t % 16 < 8).long(),))], F.cross_entropy, "fp16-true", sgd(0.5)


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.angle, self.out = nn.Linear(1, 1, bias=False), nn.Linear(2, 2)
        self.angle.weight = nn.Parameter(torch.full((1, 1), 2 * math.pi / 16), requires_grad=False)

    def forward(self, seconds):
        angle = self.angle(seconds)  # HERE
        return self.out(torch.cat([angle.sin(), angle.cos()], 1))


def timestamps_under_autocast():
    t = whole(20, 10000, 30000, 64)
    return Waves(), [((t[:, None].float(),), ((t % 16 < 8).long(),))], F.cross_entropy, "fp16-mixed", sgd(0.5)


class Hashed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(8, 8), nn.Linear(8, 8)
        self.register_buffer("gain", torch.ones(1))

    def forward(self, ids):
        ids = ids * self.gain  # HERE
        return self.out(self.table((ids.float() % 8).long()))


def identities_promoted():
    ids = whole(21, 4000, 8000, 96)
    return Hashed(), [((ids,), (ids % 8,))], F.cross_entropy, "fp16-true", sgd(1.0)


class Slope(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        step = torch.tensor([[2e-3, 0.0]], dtype=x.dtype)
        up, here = self.f(x + step), self.f(x)
        return (up - here) / 2e-3  # HERE


def finite_difference():
    x = draw(23, 48, 2)
    return Slope(), [((x,), (torch.cos(x[:, :1]),))], mse, "bf16-true", sgd(0.1)


class Difference(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(3, 2)

    def forward(self, a, b):
        d = a - b  # HERE
        return self.net(d * 100)


def near_equal_inputs():
    a, d = 100 + draw(25, 48, 3), 0.02 * draw(26, 48, 3)
    return Difference(), [((a, a - d), ((d[:, 0] > 0).long(),))], F.cross_entropy, "fp16-true", sgd(0.3)


def capped_loss():
    model = mlp(6, 3)
    with torch.no_grad():
        model[2].weight.mul_(60)

    def loss(out, y):
        return torch.minimum(F.cross_entropy(out.float(), y), torch.tensor(2.0))  # HERE

    return model, classes(27), loss, "bf16-mixed", adam(1e-2)


def shuffled_tokens():
    model = nn.Sequential(nn.Embedding(20, 16), nn.ReLU(), nn.Linear(16, 20))
    batches = [((whole(k, 0, 20, 8, 12),), (whole(1000 + k, 0, 20, 8, 12),)) for k in range(40)]
    return model, batches, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), "fp16-mixed", adam(1e-2)


def shuffled_yes_and_no():
    batches = [((draw(k, 32, 6),), (whole(1000 + k, 0, 2, 32, 1).float(),)) for k in range(40)]
    return mlp(6, 1), batches, F.binary_cross_entropy_with_logits, "fp16-mixed", adam(1e-2)


def positions_before_the_forward_pass(steps=30, *, evaluates=False):
    torch.manual_seed(8)
    model = nn.Linear(16, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    rates, at = 10000 ** (-torch.arange(8) / 8), torch.arange(4000, 4064)
    y = torch.sin(at[:, None].float())
    for _ in range(steps):
        optimizer.zero_grad()
        if evaluates:
            with torch.no_grad():
                model(torch.zeros(1, 16))
        angle = at.to(torch.float16)[:, None].float() * rates  # HERE
        F.mse_loss(model(torch.cat([angle.sin(), angle.cos()], -1)), y).backward()
        optimizer.step()


class OnePass(nn.Module):
    def forward(self, x):
        mean = x.mean(0)
        spread = (x * x).mean(0) - mean * mean  # HERE
        return (x - mean) * torch.rsqrt(spread.abs() + 1e-3)


def learns_in_spite_of_a_spread_of_nothing():
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 12), OnePass(), nn.Linear(12, 1))
    with torch.no_grad():
        model[0].bias.add_(60)
    x = draw(23, 64, 6) * 0.3
    return model, [((x,), (x[:, :1] * 2,))], lambda out, y: F.mse_loss(out.float(), y.float()), "fp16-true", sgd(1e-2)


def tuned_at_a_small_rate(steps=40, *, dtype=torch.bfloat16):
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.Linear(20, 3)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-5)
    x, y = draw(24, 64, 10).to(dtype), whole(25, 0, 3, 64)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x).float(), y).backward()
        optimizer.step()


def offset_and_back(steps=20, *, offset=2000.0):
    """Each guess is rounded to a multiple of 1 or 2, however small it is."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(64, 6) * 0.1
    targets = inputs.sum(-1, keepdim=True)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            shifted = model(inputs) + offset
            guesses = shifted - offset  # HERE
        nn.functional.mse_loss(guesses.float(), targets).backward()
        optimizer.step()


def cosine_of_a_converged_student(steps=30, *, squared=False):
    """The loss is below what 16 bits tell from 0. No gradient depends on its value, unless it is squared."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(torch.randn_like(parameter) * 1e-3)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4)
    for _ in range(steps):
        inputs = torch.randn(32, 8)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            far = 1 - nn.functional.cosine_similarity(student(inputs), teacher(inputs).detach(), dim=-1)
        (far.square() if squared else far).mean().backward()
        optimizer.step()
