"""Small trainings whose steps fail, each with its fixed twin; the guilty lines are marked."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

CAUSES = {}


def target(cause):
    """Make `name()` and `name_fixed()` of a function of `fixed`."""

    def register(function):
        name = function.__name__
        CAUSES[name] = cause
        globals()[f"{name}_fixed"] = lambda: function(True)
        return lambda: function(False)

    return register


def classes(*shape, n=12, spread=0.3, seed=0):
    """Batches of three classes around three centres."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(3, *shape, generator=generator)
    batches = []
    for _ in range(3):
        y = torch.randint(0, 3, (n,), generator=generator)
        batches.append(((centres[y] + spread * torch.randn(n, *shape, generator=generator),), (y,)))
    return batches


def lines(d, *, n=16, seed=0):
    """Batches of a linear regression."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(d, 1, generator=generator) / d**0.5
    inputs = [torch.randn(n, d, generator=generator) for _ in range(3)]
    return [((x,), (x @ weights,)) for x in inputs]


def masked(*, empty):
    """Batches with a mask of 1 and 0; where `empty`, one row has no 1."""
    batches = []
    for (x,), (y,) in classes(5, 6, n=8, spread=0.5):
        mask = torch.ones(8, 5)
        mask[:, 3:] = 0
        mask[2] = 0 if empty else 1
        batches.append(((x, mask), (y,)))
    return batches


def sgd(lr):
    return lambda model: torch.optim.SGD(model.parameters(), lr)


class Block(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        with torch.no_grad():
            self.up.weight.mul_(gain)
            self.down.weight.mul_(gain)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))  # guilty: checkpointed_block


class Checkpointed(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.inp, self.blocks = nn.Linear(6, 8), nn.ModuleList([Block(1.0), Block(gain)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.inp(x)
        for block in self.blocks:
            h = h + checkpoint(block, h, use_reentrant=False)
        return self.head(self.norm(h))


@target("activation-overflow")
def checkpointed_block(fixed):
    return Checkpointed(1.0 if fixed else 900.0), classes(6), F.cross_entropy, "fp16-mixed", sgd(0.05)


class Hub(nn.Module):
    def __init__(self, share):
        super().__init__()
        self.share = share
        self.encode, self.norm, self.head = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)
        with torch.no_grad():
            self.encode.bias.fill_(200.0)

    def forward(self, x, source, sink):
        message = self.encode(x)[source] * self.share
        total = torch.zeros(len(x), 8, dtype=message.dtype)
        total.index_add_(0, sink, message)  # guilty: sum_at_a_hub
        return self.head(self.norm(total))


@target("reduction-overflow")
def sum_at_a_hub(fixed):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(20, 4, generator=generator)
    source = torch.randint(0, 20, (500,), generator=generator)
    sink = torch.cat([torch.zeros(420, dtype=torch.long), torch.randint(0, 20, (80,), generator=generator)])
    batches = [((x, source, sink), ((x[:, 0] > 0).long(),))]
    return Hub(1 / 400 if fixed else 1.0), batches, F.cross_entropy, "fp16-mixed", sgd(0.05)


class Energy(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.gain, self.inp = gain, nn.Linear(6, 64)
        self.norm, self.wide, self.head = nn.LayerNorm(4), nn.Linear(1, 4), nn.Linear(4, 3)

    def forward(self, x):
        energy = (self.inp(x) * self.gain).square().sum(-1, keepdim=True, dtype=torch.float32)
        wide = self.wide(energy)  # guilty: fp32_sum_in_a_half_product
        return self.head(self.norm(wide))


@target("activation-overflow")
def fp32_sum_in_a_half_product(fixed):
    return Energy(0.5 if fixed else 40.0), classes(6), F.cross_entropy, "fp16-mixed", sgd(0.05)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x  # guilty: custom_function

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 * x * x


class Cubic(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.inp, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        with torch.no_grad():
            self.inp.weight.mul_(gain)

    def forward(self, x):
        return {"logits": self.head(self.norm(Cube.apply(self.inp(x))))}


@target("product-overflow")
def custom_function(fixed):
    def loss(out, y):
        return F.cross_entropy(out["logits"], y)

    return Cubic(1 if fixed else 120), classes(6), loss, "fp16-mixed", sgd(0.05)


class Autoencoder(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 8), nn.Linear(4, 6)
        with torch.no_grad():
            self.encode.bias[4] = bias

    def forward(self, x):
        mean, logvar = self.encode(x).chunk(2, -1)
        return self.decode(mean), mean, logvar


def evidence_bound(out, x):
    guess, mean, logvar = out
    divergence = -0.5 * (1 + logvar - mean.pow(2) - logvar.exp()).mean()  # guilty: variance_of_a_code
    return F.mse_loss(guess, x) + 1e-3 * divergence


@target("exp-overflow")
def variance_of_a_code(fixed):
    batches = [((x,), (x,)) for (x,), _ in classes(6)]
    return Autoencoder(1.0 if fixed else 11.6), batches, evidence_bound, "fp16-true", sgd(0.05)


class Steps(nn.Module):
    def __init__(self, fixed):
        super().__init__()
        self.fixed, self.inp, self.head, self.power = fixed, nn.Linear(6, 8), nn.Linear(8, 3), None

    def forward(self, x):
        h = self.inp(x)
        self.power = (h.detach() * 300).square().sum()  # inf, and nobody reads it
        step = torch.sigmoid(h * 20) if self.fixed else 1 / (1 + torch.exp(-h * 20))  # guilty: behind_a_dead_branch
        return self.head(step)


@target("exp-overflow")
def behind_a_dead_branch(fixed):
    return Steps(fixed), classes(6), F.cross_entropy, "fp16-true", sgd(0.05)


class Doubling(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.inp, self.head = nn.Linear(5, 4), nn.Linear(4, 1)
        with torch.no_grad():
            self.inp.bias.fill_(bias)

    def forward(self, x):
        return self.head(torch.log1p(2.0 ** self.inp(x)))  # guilty: power_of_two


@target("exp-overflow")
def power_of_two(fixed):
    return Doubling(3.0 if fixed else 16.5), lines(5), F.mse_loss, "fp16-true", sgd(0.01)


class Biased(nn.Module):
    def __init__(self, low):
        super().__init__()
        self.query, self.value, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        bias = torch.zeros(5, 5)
        bias[0] = low
        self.register_buffer("bias", bias)

    def forward(self, x):
        scores = self.query(x) @ x.transpose(1, 2) + self.bias  # guilty: mask_in_a_buffer
        return self.head((scores.softmax(-1) @ self.value(x)).mean(1))


@target("scalar-out-of-range")
def mask_in_a_buffer(fixed):
    return Biased(-1e4 if fixed else -1e9), classes(5, 6, n=8), F.cross_entropy, "fp16-true", sgd(0.05)


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 1)

    def forward(self, x, z):
        return self.head(self.norm(self.inp(torch.cat([x, z], 1))))  # guilty: joined_inputs


@target("input-out-of-range")
def joined_inputs(fixed):
    batches = [((x[:, :3], x[:, 3:] * (1 if fixed else 1e6)), (y,)) for (x,), (y,) in lines(6)]
    return Joined(), batches, F.mse_loss, "fp16-mixed", sgd(0.02)


def huber(out, y):
    return F.smooth_l1_loss(out, y)  # guilty: targets_beyond_the_format


@target("input-out-of-range")
def targets_beyond_the_format(fixed):
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    batches = [((x,), (y * (1 if fixed else 1e5),)) for (x,), (y,) in lines(5)]
    return model, batches, huber, "fp16-true", sgd(0.05)


def poisson(rate, y):
    return F.poisson_nll_loss(F.relu(rate), y, log_input=False, eps=1e-8)  # guilty: guard_of_a_rate


def soft_poisson(rate, y):
    return F.poisson_nll_loss(F.softplus(rate.float()), y.float(), log_input=False, eps=1e-3)


@target("eps-underflow")
def guard_of_a_rate(fixed):
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    batches = [((x,), ((x[:, :1] > 0).float(),)) for (x,), _ in lines(5)]
    return model, batches, soft_poisson if fixed else poisson, "fp16-true", sgd(0.01)


class Ball(nn.Module):
    def __init__(self, radius):
        super().__init__()
        self.radius, self.inp, self.head = radius, nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.atanh(torch.tanh(self.inp(x) * 3) * self.radius))  # guilty: edge_of_a_ball


@target("rounded-onto-singularity")
def edge_of_a_ball(fixed):
    return Ball(0.98 if fixed else 0.999), classes(6), F.cross_entropy, "bf16-true", sgd(0.01)


@target("optimizer-state-underflow")
def rows_without_gradients(fixed):
    model = nn.Sequential(nn.Embedding(30, 4), nn.Flatten(), nn.Linear(12, 3))
    tokens = torch.randint(0, 15, (10, 3), generator=torch.Generator().manual_seed(3))

    def make(m):
        return torch.optim.RMSprop(m.parameters(), 1e-3, eps=1e-3 if fixed else 1e-8)

    return model, [((tokens,), (tokens[:, 0] % 3,))], F.cross_entropy, "fp16-true", make


class Written(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.value, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x, mask):
        scores = self.query(x) @ x.transpose(1, 2)
        scores = scores.masked_fill(mask[:, None] == 0, float("-inf"))
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))  # guilty: softmax_by_hand
        weights = weights / weights.sum(-1, keepdim=True)
        return self.head((weights @ self.value(x)).mean(1))


@target("fully-masked-softmax")
def softmax_by_hand(fixed):
    return Written(), masked(empty=not fixed), F.cross_entropy, "bf16-mixed", sgd(0.05)


class Segments(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, segment):
        h = self.inp(x)
        total = torch.zeros(4, 8, dtype=h.dtype).index_add(0, segment, h)
        count = torch.zeros(4, dtype=h.dtype).index_add(0, segment, torch.ones(len(x), dtype=h.dtype))
        return self.head(total / count[:, None])  # guilty: segment_without_members


@target("empty-reduction")
def segment_without_members(fixed):
    batches = [((x, torch.arange(16) % (4 if fixed else 3)), (torch.arange(4) % 3,)) for (x,), _ in lines(6)]
    return Segments(), batches, F.cross_entropy, "fp16-mixed", sgd(0.05)


class Logs(nn.Module):
    def __init__(self, floor):
        super().__init__()
        self.floor, self.inp, self.head = floor, nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.inp(x).square() * (torch.arange(8) > 0) + self.floor
        return self.head(torch.where(h > 0, torch.log(h), 0.0))  # guilty: where_after_the_log


@target("singular-gradient")
def where_after_the_log(fixed):
    return Logs(0.1 if fixed else 0.0), classes(6), F.cross_entropy, "fp16-mixed", sgd(0.02)


@target("optimization-divergence")
def diverges_without_inf_in_fp32(fixed):
    return nn.Linear(6, 1), lines(6), F.mse_loss, "fp16-true", sgd(0.1 if fixed else 0.9)  # guilty by its rate
