"""A language model as small as one can be and still be judged: one hidden layer over the two characters before."""

import torch
import torch.nn.functional as F
from torch import nn

import floatline as fl
from floatline.workload import Workload

SYMBOLS, WIDTH, BATCH, NUM_BATCHES = 12, 32, 64, 40


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, WIDTH)
        self.up, self.down = nn.Linear(2 * WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, SYMBOLS)

    def forward(self, tokens):
        return self.down(F.relu(self.up(self.embed(tokens).flatten(1))))


def loss_fn(logits, targets):
    return F.cross_entropy(logits.float(), targets)


def make_rows(seed, number):
    """Three characters each; the third depends on the two before it."""
    dice = torch.Generator().manual_seed(seed)
    odds = (2.5 * torch.randn(SYMBOLS, SYMBOLS, SYMBOLS, generator=dice)).softmax(-1)
    pairs = torch.randint(0, SYMBOLS, (number, 2), generator=dice)
    third = torch.multinomial(odds[pairs[:, 0], pairs[:, 1]], 1, generator=dice)
    return pairs, third[:, 0]


def make(seed, *, lr=1e-3, precision="fp16-mixed", make_optimizer=None):
    pairs, third = make_rows(seed, BATCH * NUM_BATCHES + 1024)
    torch.manual_seed(seed)
    model = Model()
    train, held = slice(0, BATCH * NUM_BATCHES), slice(BATCH * NUM_BATCHES, None)
    rows = zip(pairs[train].split(BATCH), third[train].split(BATCH), strict=True)

    def val_loss(model):
        return float(loss_fn(model(pairs[held]), third[held]))

    return Workload(
        model,
        [((x,), (y,)) for x, y in rows],
        loss_fn,
        precision,
        make_optimizer or (lambda model: torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)),
        val_loss,
    )


def build(seed=0):
    return make(seed)


def still(seed=0):
    """A learning rate of 0."""
    return make(seed, lr=0.0)


def same(seed=0):
    """A target that does not look at its seed."""
    return make(3)


def half(seed=0):
    """An optimizer that takes 16-bit weights."""
    return make(seed, make_optimizer=lambda model: fl.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0))


def crash(seed=0):
    """Seed 1 ends its process without a word."""
    import os

    if seed == 1:
        os._exit(9)
    return make(seed)


def slow(seed=0):
    """Takes so long over each batch that it can be killed on the way."""
    import time

    def wait(logits, targets):
        time.sleep(0.02)
        return loss_fn(logits, targets)

    workload = make(seed)
    return Workload(workload.model, workload.batches, wait, "fp16-mixed", workload.make_optimizer, workload.evaluate)


def train(steps=1):
    """Only a function that trains; nothing can be built from it."""
