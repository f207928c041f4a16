"""More trainings that look sick and are not."""

import torch
import torch.nn.functional as F
from torch import nn


def rng(seed):
    return torch.Generator().manual_seed(seed)


def blobs(*shape, kinds=4, n=20, num=3, spread=0.4, seed=0, scale=1.0):
    generator = rng(seed)
    centres = torch.randn(kinds, *shape, generator=generator)
    found = []
    for _ in range(num):
        y = torch.randint(0, kinds, (n,), generator=generator)
        found.append(((scale * (centres[y] + spread * torch.randn(n, *shape, generator=generator)),), (y,)))
    return found


def sgd(lr, **options):
    return lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr, **options)


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 4)
        self.register_buffer("mask", torch.full((7, 7), float("-inf")).triu(1))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / 6**0.5 + self.mask.to(q.dtype)
        return self.out((scores.softmax(-1).to(v.dtype) @ v)[:, -1])


def causal_mask_of_minus_inf():
    return Causal(), blobs(7, 6, seed=1), F.cross_entropy, "fp16-mixed", sgd(0.3)


def causal_mask_in_true_half():
    return Causal(), blobs(7, 6, seed=1), lambda o, y: F.cross_entropy(o.float(), y), "fp16-true", sgd(0.3)


def scale_from_far_above():
    model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4))

    def loss(out, y):
        return 3000 * F.cross_entropy(out.float(), y)

    return model, blobs(3, 6, seed=2), loss, "fp16-mixed", sgd(1e-4)


def sparse_table(steps=24):
    table, head = nn.Embedding(500, 8, sparse=True), nn.Linear(8, 3)
    optimizers = [torch.optim.SparseAdam(table.parameters(), 0.05), torch.optim.SGD(head.parameters(), 0.2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    generator = rng(3)
    ids = torch.randint(0, 40, (64,), generator=generator)
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(head(table(ids)), ids % 3)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()


def oscillating_game(steps=40):
    maker = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    judge = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    of_maker, of_judge = torch.optim.Adam(maker.parameters(), 5e-3), torch.optim.Adam(judge.parameters(), 5e-3)
    for step in range(steps):
        real = torch.randn(32, 2, generator=rng(step)) * 0.3 + 1
        noise = torch.randn(32, 2, generator=rng(900 + step))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            fake = maker(noise)
            told = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
        of_judge.zero_grad()
        told.backward()
        of_judge.step()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            fooled = F.softplus(-judge(maker(noise))).mean()
        of_maker.zero_grad()
        fooled.backward()
        of_maker.step()


def finished_long_ago():
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.5, -0.25, 1.0]]))
        model.bias.zero_()
    x = torch.randn(64, 3, generator=rng(5)).half().float()
    y = x @ model.weight.detach().T + 0.01 * torch.randn(64, 1, generator=rng(6))
    return model, [((x,), (y,))], lambda o, t: F.mse_loss(o.float(), t.float()), "fp16-mixed", sgd(1e-3)


def all_in_bf16():
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    )
    return model, blobs(1, 6, 6, seed=7), lambda o, y: F.cross_entropy(o.float(), y), "bf16-true", sgd(0.2)


def loud_but_in_range():
    class Loud(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.norm, self.out = nn.Linear(5, 16), nn.LayerNorm(16), nn.Linear(16, 4)
            with torch.no_grad():
                self.inp.weight.mul_(9000)

        def forward(self, x):
            return self.out(self.norm(self.inp(x)))

    return Loud(), blobs(5, seed=8), F.cross_entropy, "fp16-mixed", sgd(0.1)


def noisy_by_dropout():
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Dropout(0.7), nn.Linear(64, 4), nn.Dropout(0.1))
    return model, blobs(6, seed=9), F.cross_entropy, "fp16-mixed", sgd(0.1)


def attention_with_dropout():
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 4)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
            h = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
            return self.out(h.transpose(1, 2).flatten(2).mean(1))

    return Attend(), blobs(5, 8, seed=10), F.cross_entropy, "fp16-mixed", sgd(0.3)


def batch_norm_of_two():
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    return model, blobs(6, kinds=3, n=2, num=12, seed=11), F.cross_entropy, "fp16-mixed", sgd(0.02)


def frozen_on_purpose():
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4))
    for p in model[0].parameters():
        p.requires_grad_(False)
    return model, blobs(6, seed=12), F.cross_entropy, "fp16-mixed", sgd(0.3)


def accumulated_rightly(steps=12):
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    batches = blobs(6, seed=13)
    for _ in range(steps):
        optimizer.zero_grad()
        for (x,), (y,) in batches:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y) / 3
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def actions_ruled_out():
    def loss(out, y, allowed):
        logits = out.float().masked_fill(~allowed, float("-inf"))
        logp = logits.log_softmax(-1)
        p = logp.exp()
        entropy = -torch.where(p > 0, p * logp.clamp(min=-1e9), 0.0).sum(-1)
        return F.nll_loss(logp, y) - 0.001 * entropy.mean()

    batches = []
    for (x,), (y,) in blobs(5, seed=14):
        allowed = torch.ones(len(x), 4, dtype=torch.bool)
        allowed[torch.arange(len(x)), (y + 1) % 4] = False
        batches.append(((x,), (y, allowed)))
    return nn.Linear(5, 4), batches, loss, "fp16-mixed", sgd(0.2)


def hand_scale_that_fits(steps=24):
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    batches = blobs(6, seed=15)
    for step in range(steps):
        (x,), (y,) = batches[step % 3]
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        (loss * 512).backward()
        for p in model.parameters():
            p.grad.div_(512)
        optimizer.step()


def contrast_of_pairs():
    def loss(out, _):
        z = F.normalize(out.float(), dim=-1)
        a, b = z[::2], z[1::2]
        return F.cross_entropy(a @ b.t() / 0.1, torch.arange(len(a)))

    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 8))
    batches = []
    for (x,), (y,) in blobs(6, n=24, seed=16):
        x[1::2] = x[::2] + 0.05 * torch.randn(12, 6, generator=rng(1))
        batches.append(((x,), (y,)))
    return model, batches, loss, "bf16-mixed", sgd(0.3)


def gru_in_half():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.out = nn.GRU(4, 12, batch_first=True), nn.Linear(12, 4)

        def forward(self, x):
            return self.out(self.gru(x)[0][:, -1])

    return Last(), blobs(6, 4, seed=17), F.cross_entropy, "fp16-mixed", sgd(0.3)


LOOK_ALIKES = (
    "causal_mask_of_minus_inf",
    "causal_mask_in_true_half",
    "scale_from_far_above",
    "sparse_table",
    "oscillating_game",
    "finished_long_ago",
    "all_in_bf16",
    "loud_but_in_range",
    "noisy_by_dropout",
    "attention_with_dropout",
    "batch_norm_of_two",
    "frozen_on_purpose",
    "accumulated_rightly",
    "actions_ruled_out",
    "hand_scale_that_fits",
    "contrast_of_pairs",
    "gru_in_half",
)
