"""Small trainings of many kinds that fail, each with its fixed twin; the guilty lines are marked."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

# Name to cause, and the module or parameter where no line is to blame.
CAUSES = {}


def target(cause, place=""):
    """Make `name()` and `name_fixed()` of a function of `fixed`."""

    def register(function):
        name = function.__name__
        CAUSES[name] = (cause, place)
        globals()[f"{name}_fixed"] = lambda: function(True)
        return lambda: function(False)

    return register


def loop(cause, place=""):
    """The same for a function that trains."""

    def register(function):
        name = function.__name__
        CAUSES[name] = (cause, place)

        def fixed(steps=24):
            return function(steps, True)

        def given(steps=24):
            return function(steps, False)

        globals()[f"{name}_fixed"] = fixed
        return given

    return register


def rng(seed):
    return torch.Generator().manual_seed(seed)


def blobs(*shape, kinds=4, n=20, num=3, spread=0.4, seed=0, scale=1.0):
    """Batches of points around a few centres."""
    generator = rng(seed)
    centres = torch.randn(kinds, *shape, generator=generator)
    found = []
    for _ in range(num):
        y = torch.randint(0, kinds, (n,), generator=generator)
        found.append(((scale * (centres[y] + spread * torch.randn(n, *shape, generator=generator)),), (y,)))
    return found


def curve(d=5, n=24, num=3, seed=0):
    """Batches of a smooth regression."""
    generator = rng(seed)
    found = []
    for _ in range(num):
        x = torch.randn(n, d, generator=generator)
        found.append(((x,), (torch.sin(x[:, :1]) + 0.3 * x[:, 1:2],)))
    return found


def sgd(lr, momentum=0.0):
    return lambda model: torch.optim.SGD(model.parameters(), lr, momentum=momentum)


def adam(lr, **options):
    return lambda model: torch.optim.Adam(model.parameters(), lr, **options)


def mse(out, y):
    return (out.float() - y.float()).pow(2).mean()


def logits_of(out, y):
    return F.cross_entropy(out.float(), y)


# --- range


class Tower(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.stages = nn.ModuleList([nn.Conv2d(6, 6, 3, padding=1) for _ in range(3)])
        self.head = nn.Linear(6, 4)
        with torch.no_grad():
            self.stages[2].weight.mul_(gain)

    def forward(self, x):
        h = F.gelu(self.stem(x))
        for stage in self.stages:
            h = h + stage(h)  # guilty: conv_tower
        h = F.layer_norm(h.float(), h.shape[1:])
        return self.head(h.amax((2, 3)))


@target("activation-overflow", "stages.2")
def conv_tower(fixed):
    batches = blobs(1, 7, 7, seed=11, scale=30)
    return Tower(1.0 if fixed else 20000.0), batches, F.cross_entropy, "fp16-mixed", sgd(0.05)


class Reader(nn.Module):
    def __init__(self, divide):
        super().__init__()
        self.divide = divide
        self.cell, self.query, self.out = nn.GRUCell(4, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        with torch.no_grad():
            self.query.weight.copy_(600 * torch.eye(16))

    def forward(self, x):
        h = x.new_zeros(len(x), 16)
        states = []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            states.append(h)
        memory = 40 * torch.stack(states, 1)
        q = self.query(memory.mean(1)) / (2000.0 if self.divide else 1.0)
        scores = torch.einsum("bd,btd->bt", q, memory)  # guilty: recurrent_reader
        weights = (scores - scores.amax(1, keepdim=True)).softmax(-1)
        return self.out((weights[..., None] * memory).sum(1))


@target("activation-overflow")
def recurrent_reader(fixed):
    return Reader(fixed), blobs(6, 4, seed=3), logits_of, "fp16-true", sgd(1e-3)


class Molecule(nn.Module):
    def __init__(self, mean):
        super().__init__()
        self.mean = mean
        self.message, self.norm, self.out = nn.Linear(5, 12), nn.LayerNorm(12), nn.Linear(12, 2)
        with torch.no_grad():
            self.message.bias.fill_(90.0)

    def forward(self, x, source, sink):
        m = F.relu(self.message(x))[source]
        if self.mean:
            m = m / 1500
        pooled = m.new_zeros(len(x), 12).scatter_add(0, sink[:, None].expand(-1, 12), m)  # guilty: graph_hub
        return {"atoms": self.out(self.norm(pooled))}


@target("reduction-overflow")
def graph_hub(fixed):
    generator = rng(5)
    x = torch.randn(30, 5, generator=generator)
    source = torch.randint(0, 30, (1400,), generator=generator)
    sink = torch.where(torch.rand(1400, generator=generator) < 0.8, 0, source.flip(0))

    def loss(out, y):
        return F.cross_entropy(out["atoms"], y)

    y = (x[:, 1] > 0).long()
    return Molecule(fixed), [((x, source, sink), (y,))], loss, "fp16-mixed", sgd(0.1)


class Bilinear(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.core = nn.Parameter(torch.randn(6, 6, 3, generator=rng(1)))

    def forward(self, x):
        z = torch.einsum("bi,ijk,bj->bk", x, self.core, x)  # guilty: trilinear_form
        return z * self.scale


@target("activation-overflow")
def trilinear_form(fixed):
    batches = blobs(6, kinds=3, seed=2, scale=3.0 if fixed else 180.0)
    return Bilinear(0.1 if fixed else 3e-5), batches, logits_of, "fp16-mixed", sgd(1e-2)


@target("product-overflow")
def squared_margin(fixed):
    def loss(out, y):
        sign = torch.where(y == 0, 1.0, -1.0).to(out.dtype)
        slack = (1 - sign * out[:, 0] * (1 if fixed else 60)).clamp(min=0)
        if fixed:
            slack = slack.float()
        return (slack * slack).mean() / 4096  # guilty: squared_margin

    model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 1))
    with torch.no_grad():
        model[2].weight.mul_(30)
    return model, blobs(4, kinds=2, seed=8), loss, "fp16-true", sgd(10.0 if fixed else 1e-2)


@dataclass
class Latent:
    mean: torch.Tensor
    spread: torch.Tensor
    decoded: torch.Tensor


class Encoder(nn.Module):
    def __init__(self, bound):
        super().__init__()
        self.bound = bound
        self.mean, self.spread, self.decode = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(3, 6)
        with torch.no_grad():
            self.spread.bias.fill_(12.0)

    def forward(self, x):
        spread = self.spread(x)
        if self.bound:
            spread = spread.clamp(max=4.0)
        mean = self.mean(x)
        return Latent(mean, spread, self.decode(mean))


@target("exp-overflow")
def latent_divergence(fixed):
    def loss(out, x):
        rebuilt = (out.decoded.float() - x).pow(2).mean()
        with torch.autocast("cpu", enabled=False):  # where CUDA's autocast would take the exponential in FP32
            kl = -0.5 * (1 + out.spread - out.mean.pow(2) - out.spread.exp())  # guilty: latent_divergence
        return rebuilt + 1e-3 * kl.float().mean()

    batches = [((x,), (x,)) for (x,), _ in blobs(6, seed=4)]
    return Encoder(fixed), batches, loss, "fp16-mixed", adam(1e-2)


class Gate(nn.Module):
    def __init__(self, own):
        super().__init__()
        self.own, self.a, self.b = own, nn.Linear(5, 20), nn.Linear(20, 4)
        with torch.no_grad():
            self.a.weight.mul_(12)

    def forward(self, x):
        z = self.a(x)
        z = torch.log(1 + torch.exp(z)) if self.own else F.softplus(z)  # guilty: softplus_by_hand
        return self.b(z / 20)


@target("exp-overflow")
def softplus_by_hand(fixed):
    return Gate(not fixed), blobs(5, seed=6), logits_of, "fp16-true", sgd(0.05)


@target("reduction-overflow")
def length_of_features(fixed):
    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(6, 400), nn.Linear(400, 4)
            with torch.no_grad():
                self.up.weight.mul_(40)

        def forward(self, x):
            h = self.up(x)
            squares = h * h
            total = squares.float().sum(-1) if fixed else squares.sum(-1)  # guilty: length_of_features
            length = total.sqrt().to(h.dtype)[:, None]
            return self.down(h / length * 20)

    return Unit(), blobs(6, seed=9), logits_of, "fp16-true", sgd(0.05)


class Pointer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.project = nn.Linear(4, 1)
        self.register_buffer("hidden", torch.tensor(hidden))
        self.out = nn.Linear(4, 4)

    def forward(self, x, used):
        scores = self.project(x)[..., 0]
        penalty = (1 - used.to(scores.dtype)) * self.hidden.to(scores.dtype)  # guilty: mask_by_product
        weights = (scores + penalty).softmax(-1)
        return self.out((weights[..., None] * x).sum(1))


@target("scalar-out-of-range")
def mask_by_product(fixed):
    batches = []
    for (x,), (y,) in blobs(5, 4, seed=10):
        used = torch.ones(len(x), 5)
        used[:, 4] = 0
        batches.append(((x, used), (y,)))
    return Pointer(-3e4 if fixed else -1e9), batches, logits_of, "fp16-true", sgd(0.1)


@target("input-out-of-range")
def clock_in_seconds(fixed):
    class Clock(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.out = nn.Linear(3, 16), nn.Linear(16, 4)

        def forward(self, x):
            h = self.inp(x / 86400 if fixed else x)  # guilty: clock_in_seconds
            return self.out(torch.tanh(h))

    batches = []
    for (x,), (y,) in blobs(3, seed=12):
        batches.append(((x.abs() * 1e5 / (1 if not fixed else 4),), (y,)))
    return Clock(), batches, logits_of, "fp16-mixed", sgd(0.1)


class InverseSquare(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide
        self.body, self.out = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)), nn.Linear(1, 1)

    def forward(self, x):
        r = 0.012 + 0.05 * torch.sigmoid(self.body(x))
        r = r.float() if self.wide else r
        force = r.pow(-2)  # guilty: inverse_square_law
        return force / 1000


@target("gradient-overflow")
def inverse_square_law(fixed):
    def loss(out, y):
        return 600 * (out.float() - 2 - y).pow(2).mean()

    def sink(model):
        return torch.optim.SGD(model.parameters(), 1e-7)

    return InverseSquare(fixed), curve(seed=13), loss, "fp16-true", sink


class ChannelNorm(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.eps, self.conv, self.out = eps, nn.Conv1d(2, 4, 3, padding=1), nn.Linear(4, 4)
        with torch.no_grad():
            self.conv.weight[3].zero_()

    def forward(self, x):
        h = self.conv(x)
        centred = h - h.mean(-1, keepdim=True)
        h = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + self.eps)  # guilty: norm_of_constant_channel
        return self.out(h.amax(-1))


@target("eps-underflow")
def norm_of_constant_channel(fixed):
    return ChannelNorm(1e-3 if fixed else 1e-9), blobs(2, 9, seed=14), logits_of, "fp16-true", sgd(0.05)


@target("eps-underflow")
def entropy_bonus(fixed):
    def loss(out, y):
        p = out.softmax(-1)
        eps = 1e-5 if fixed else 1e-10
        entropy = -(p * torch.log(p + eps)).sum(-1)  # guilty: entropy_bonus
        return F.cross_entropy(out.float(), y) - 0.01 * entropy.float().mean()

    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 4))
    with torch.no_grad():
        model[2].weight.mul_(60)
    return model, blobs(5, seed=15), loss, "fp16-true", sgd(0.02)


# --- the loss scale


def half_loop(steps, fixed, *, scale, loss_in_half, seed, weight=1.0):
    model = nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1 / weight)
    batches = curve(seed=seed)
    for step in range(steps):
        (x,), (y,) = batches[step % 3]
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        loss = (out - y.to(out.dtype)).pow(2).mean() if loss_in_half else weight * F.mse_loss(out.float(), y)
        yield model, optimizer, loss, (1024.0 if fixed else scale)


@loop("gradient-overflow")
def scale_beyond_half(steps, fixed):
    for model, optimizer, loss, scale in half_loop(steps, fixed, scale=2.0**17, loss_in_half=True, seed=16):
        (loss * scale).backward()  # guilty: scale_beyond_half
        if all(p.grad.isfinite().all() for p in model.parameters()):
            for p in model.parameters():
                p.grad /= scale
            optimizer.step()


@loop("gradient-underflow")
def rare_event_weight(steps, fixed):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, enabled=fixed)
    for _, optimizer, loss, _ in half_loop(steps, fixed, scale=1.0, loss_in_half=False, seed=17, weight=1e-8):
        scaler.scale(loss).backward()  # guilty: rare_event_weight
        scaler.step(optimizer)
        scaler.update()


# --- rounding


class Hyperbolic(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide, self.embed, self.out = wide, nn.Linear(4, 6), nn.Linear(6, 4)
        with torch.no_grad():
            self.embed.weight.mul_(3)

    def forward(self, x):
        v = self.embed(x)
        v = v.float() if self.wide else v
        norm = v.norm(dim=-1, keepdim=True)
        radius = torch.tanh(norm)
        away = torch.atanh(radius.clamp(max=1 - 1e-6))  # guilty: hyperbolic_distance
        return self.out((v / norm * away).to(self.out.weight.dtype))


@target("rounded-onto-singularity")
def hyperbolic_distance(fixed):
    batches = blobs(4, seed=18, scale=0.1 if fixed else 1.0)
    return Hyperbolic(fixed), batches, logits_of, "fp16-true", sgd(0.02)


class Squash(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide, self.net = wide, nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        with torch.no_grad():
            self.net[2].weight.mul_(10)

    def forward(self, x):
        u = self.net(x)
        if self.wide:
            u = u.float()
            return torch.tanh(u), 2 * (math.log(2) - u - F.softplus(-2 * u))
        a = torch.tanh(u)
        return a, torch.log(1 - a * a)  # guilty: squashed_policy


@target("rounded-onto-singularity")
def squashed_policy(fixed):
    def loss(out, y):
        action, log_slope = out
        return (action.float() - y).pow(2).mean() + 1e-3 * log_slope.float().mean()

    batches = [((x,), (x[:, :2].tanh(),)) for (x,), _ in blobs(4, seed=19)]
    return Squash(fixed), batches, loss, "fp16-mixed", sgd(0.02)


@loop("accumulator-stagnation")
def running_centre(steps, fixed):
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dtype = torch.float32 if fixed else torch.bfloat16
    centre = torch.full((6,), 2.0, dtype=dtype)
    batches = blobs(6, seed=20)
    for step in range(steps):
        (x,), (y,) = batches[step % 3]
        with torch.no_grad():
            centre = centre + 0.001 * (x.mean(0).to(dtype) - centre)  # guilty: running_centre
        optimizer.zero_grad()
        F.cross_entropy(model(x - centre.float()), y).backward()
        optimizer.step()


@target("update-lost-to-rounding", "optimizer.step")
def slow_finetuning(fixed):
    model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(32, 4))
    precision = "bf16-mixed" if fixed else "bf16-true"
    return model, blobs(3, 6, seed=21), logits_of, precision, sgd(5e-4)


@target("optimizer-state-underflow", "optimizer.step")
def rmsprop_in_half(fixed):
    model = nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 1))

    def rmsprop(model):
        return torch.optim.RMSprop(model.parameters(), 1e-3, eps=1e-4 if fixed else 1e-9)

    def loss(out, y):
        return 1e-2 * mse(out, y)

    return model, curve(seed=22), loss, "fp16-true", rmsprop


class Clockwork(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide
        self.inp, self.out = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, minute):
        dtype = torch.float32 if self.wide else self.inp.weight.dtype
        t = minute.to(dtype)  # guilty: minute_of_the_day
        rates = torch.tensor([1.7, 0.9, 0.31, 0.11], dtype=dtype)
        waves = torch.cat([torch.sin(t * rates), torch.cos(t * rates)], -1)
        return self.out(torch.relu(self.inp(waves.to(self.inp.weight.dtype))))


@target("integer-not-exact")
def minute_of_the_day(fixed):
    minute = torch.randint(300, 1440, (96, 1), generator=rng(23))
    y = (torch.sin(minute[:, 0] * 1.7) > 0).long()
    return Clockwork(fixed), [((minute,), (y,))], logits_of, "bf16-true", sgd(0.5)


class Kernel(nn.Module):
    def __init__(self, direct):
        super().__init__()
        self.direct, self.embed = direct, nn.Linear(4, 8)
        self.centres = nn.Parameter(torch.randn(12, 8, generator=rng(24)) * 0.3 + 6)
        self.out = nn.Linear(12, 4)
        with torch.no_grad():
            self.embed.weight.mul_(0.5)
            self.embed.bias.fill_(6.0)

    def forward(self, x):
        h = self.embed(x)
        if self.direct:
            square = (h.float()[:, None] - self.centres.float()).pow(2).sum(-1)
        else:
            c = self.centres
            square = h.pow(2).sum(-1)[:, None] + c.pow(2).sum(-1) - 2 * h @ c.t()  # guilty: gram_distances
        return self.out(torch.exp(-square))


@target("cancellation")
def gram_distances(fixed):
    return Kernel(fixed), blobs(4, seed=25), logits_of, "bf16-mixed", sgd(0.5)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 200))

    def forward(self, x):
        return self.net(x)


@target("cancellation")
def ratio_of_rounded_logs(fixed):
    def loss(out, action, old):
        logits = out.float() if fixed else out
        logp = torch.log_softmax(logits, -1).gather(1, action[:, None])[:, 0]
        if not fixed:
            logp = logp.to(torch.bfloat16)
        ratio = torch.exp((logp - old.to(logp.dtype)).float())  # guilty: ratio_of_rounded_logs
        return (ratio - 1).pow(2).mean() * 1e3

    torch.manual_seed(26)
    model = Policy()
    batches = []
    for k in range(3):
        x = torch.randn(32, 5, generator=rng(26 + k))
        action = torch.randint(0, 200, (32,), generator=rng(29 + k))
        with torch.no_grad():
            old = torch.log_softmax(model(x), -1).gather(1, action[:, None])[:, 0] + 0.04
        batches.append(((x,), (action, old)))
    return model, batches, loss, "bf16-mixed", sgd(2e-3)


# --- loops


def scaled_loop(steps, seed, *, lr=0.1):
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    batches = curve(seed=seed)
    for step in range(steps):
        (x,), (y,) = batches[step % 3]
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x), y)
        yield model, optimizer, scaler, loss


@loop("clip-before-unscale")
def clip_by_value(steps, fixed):
    for model, optimizer, scaler, loss in scaled_loop(steps, 30):
        scaler.scale(loss).backward()
        if fixed:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.05)  # guilty: clip_by_value
        scaler.step(optimizer)
        scaler.update()


@loop("scaler-misuse")
def backward_without_scale(steps, fixed):
    for _, optimizer, scaler, loss in scaled_loop(steps, 31):
        (scaler.scale(loss) if fixed else loss).backward()  # guilty: backward_without_scale
        scaler.step(optimizer)
        scaler.update()


@loop("scaled-grad-in-penalty")
def smooth_critic(steps, fixed):
    critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(critic.parameters(), 5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(steps):
        real = torch.randn(24, 4, generator=rng(step)) + 1
        fake = torch.randn(24, 4, generator=rng(step + 500))
        mixed = (0.5 * real + 0.5 * fake).requires_grad_()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            gap = critic(fake).mean() - critic(real).mean()
            score = critic(mixed).sum()
        (slope,) = torch.autograd.grad(scaler.scale(score), mixed, create_graph=True)  # guilty: smooth_critic
        if fixed:
            slope = slope / scaler.get_scale()
        penalty = (slope.float().norm(dim=1) - 1).pow(2).mean()
        scaler.scale(gap + 10 * penalty).backward()
        scaler.step(optimizer)
        scaler.update()


@loop("params-not-trained", "adapters")
def adapters_in_a_list(steps, fixed):
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(5, 8)
            made = [nn.Linear(8, 8), nn.Linear(8, 1)]
            self.adapters = nn.ModuleList(made) if fixed else made

        def forward(self, x):
            h = self.base(x)
            for adapter in self.adapters:
                h = adapter(torch.tanh(h))
            return h

    model = Adapted()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(steps):
        (x,), (y,) = curve(seed=33)[step % 3]
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()


# --- not precision


@target("bad-input-data", "batches[1].inputs[0]['image']")
def hole_in_an_image(fixed):
    class ByName(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv2d(1, 4, 3), nn.Linear(4, 4)

        def forward(self, batch):
            return {"logits": self.out(F.relu(self.conv(batch["image"])).mean((2, 3)))}

    batches = []
    for i, ((x,), (y,)) in enumerate(blobs(1, 6, 6, seed=34)):
        if i == 1 and not fixed:
            x[2, 0, 3, 3] = math.nan
        batches.append((({"image": x},), (y,)))
    return ByName(), batches, lambda out, y: F.cross_entropy(out["logits"], y), "fp16-mixed", sgd(0.1)


@target("optimization-divergence", "optimizer")
def greedy_convolutions(fixed):
    model = nn.Sequential(nn.Conv1d(2, 16, 3), nn.ReLU(), nn.Conv1d(16, 16, 3), nn.Flatten(), nn.Linear(80, 1))
    generator = rng(35)
    x = torch.randn(32, 2, 9, generator=generator) * 2
    return model, [((x,), (x[:, 0, :1] * 3,))], mse, "bf16-mixed", sgd(0.01 if fixed else 5.0)


@target("empty-reduction")
def nothing_detected(fixed):
    def loss(out, found, y):
        error = (out.float()[:, 0] - y).pow(2)[found]
        if fixed:
            return error.sum() / found.sum().clamp(min=1)
        return error.mean()  # guilty: nothing_detected

    batches = []
    for k, ((x,), (y,)) in enumerate(curve(seed=36)):
        found = torch.rand(len(x), generator=rng(k)) < (0.0 if k == 1 else 0.7)
        batches.append(((x,), (found, y[:, 0])))
    return nn.Linear(5, 1), batches, loss, "bf16-mixed", sgd(0.05)


class Retrieve(nn.Module):
    def __init__(self, open_rows):
        super().__init__()
        self.open_rows, self.q, self.k, self.out = open_rows, nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(4, 4)

    def forward(self, x, hidden):
        if self.open_rows:
            hidden = hidden & ~hidden.all(-1, keepdim=True)
        scores = (self.q(x) @ self.k(x).transpose(1, 2)).float()
        scores = torch.where(hidden[:, None], float("-inf"), scores)
        weights = F.softmax(scores, dim=-1)  # guilty: every_key_hidden
        return self.out((weights.to(x.dtype) @ x).mean(1))


@target("fully-masked-softmax")
def every_key_hidden(fixed):
    batches = []
    for (x,), (y,) in blobs(5, 4, seed=37):
        hidden = torch.zeros(len(x), 5, dtype=torch.bool)
        hidden[:, 3:] = True
        hidden[1] = True
        batches.append(((x, hidden), (y,)))
    return Retrieve(fixed), batches, logits_of, "bf16-mixed", sgd(0.05)


@target("singular-gradient")
def twin_anchors(fixed):
    def loss(out, other):
        gap = out.float() - other
        if fixed:
            return (gap.pow(2).sum(-1) + 1e-6).sqrt().mean()
        return gap.square().sum(-1).sqrt().mean()  # guilty: twin_anchors

    model = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(3))
    x = torch.randn(16, 3, generator=rng(38))
    other = x.clone()
    other[4:] += 0.5
    return model, [((x,), (other,))], loss, "bf16-true", sgd(0.2)


@target("clamp-kills-gradient")
def clipped_objective(fixed):
    def loss(out, y):
        ratio = torch.exp(out.float()[:, 0] - y)
        if not fixed:
            ratio = ratio.clamp(0.8, 1.2)  # guilty: clipped_objective
        return (ratio - 1).abs().mean()

    x = torch.randn(24, 4, generator=rng(39))
    return nn.Linear(4, 1), [((x,), (torch.full((24,), -6.0),))], loss, "fp16-mixed", sgd(1e-3)


# --- several at once


class Twofold(nn.Module):
    def __init__(self, gain, steep):
        super().__init__()
        self.steep = steep
        self.left, self.right = nn.Linear(5, 12), nn.Linear(5, 12)
        self.norm, self.out = nn.LayerNorm(12), nn.Linear(24, 4)
        with torch.no_grad():
            self.left.weight.mul_(gain)

    def forward(self, x):
        a = self.norm(self.left(x))  # guilty: two_faults
        b = torch.exp(self.steep * self.right(x))
        return self.out(torch.cat([a, (b / (1 + b)).to(a.dtype)], -1))


@target("activation-overflow")
def two_faults(fixed):
    model = Twofold(1.0 if fixed else 60000.0, 1.0 if fixed else 12.0)
    return model, blobs(5, seed=40), logits_of, "fp16-mixed", sgd(0.05)


@loop("activation-overflow", "0")
def schedule_behind_an_overflow(steps, fixed):
    model = nn.Sequential(nn.Linear(5, 16), nn.LayerNorm(16), nn.Linear(16, 1))
    with torch.no_grad():
        model[0].weight.mul_(1.0 if fixed else 1e5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=20)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for step in range(steps):
        (x,), (y,) = curve(seed=41)[step % 3]
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()


class Deep(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.inp, self.norm, self.out = nn.Linear(5, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        with torch.no_grad():
            self.blocks[2].weight.mul_(gain)

    def forward(self, x):
        h = self.inp(x)
        for block in self.blocks:
            h = checkpoint(
                lambda h, block=block: self.norm(block(h)), h, use_reentrant=False
            )  # guilty: recomputed_block
        return self.out(h)


@target("activation-overflow", "blocks.2")
def recomputed_block(fixed):
    return Deep(1.0 if fixed else 1e6), blobs(5, seed=42), logits_of, "fp16-mixed", sgd(0.05)


class Apart(nn.Module):
    def __init__(self):
        super().__init__()
        self.loud, self.faint = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        return self.loud(x), self.faint(x)


@target("gradient-underflow", "faint")
def losses_far_apart(fixed):
    def loss(out, y):
        loud, faint = out
        loud, faint = (loud.float() - 3 * y).pow(2).mean(), (faint.float() - y).pow(2).mean()
        return loud + faint if fixed else 3e5 * loud + 1e-7 * faint

    return Apart(), curve(4, seed=43), loss, "fp16-mixed", adam(3e-2, eps=1e-20)


class Protected(nn.Module):
    """A head in FP32, in the spelling of a model that was written for a GPU."""

    def __init__(self, fixed):
        super().__init__()
        self.fixed = fixed
        self.body, self.head = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 4, 3)

    def forward(self, x):
        h = F.relu(self.body(x))
        with torch.autocast("cuda", enabled=False):
            h = self.head(h.float() if self.fixed else h)  # guilty: island_of_a_gpu
        return h.mean((2, 3))


@target("autocast-region-misuse", "head")
def island_of_a_gpu(fixed):
    return Protected(fixed), blobs(1, 7, 7, seed=44), F.cross_entropy, "fp16-mixed", sgd(0.05)
