"""Small models, their optimizers and one step of each, for manifests."""

import copy

import torch
from torch import nn
from torch.nn import functional

import floatline as fl

WORDS = 48


class TinyLM(nn.Module):
    """An embedding, an attention, norms and a head, as language models have them."""

    def __init__(self, width=32, *, tied=False):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.lm_head = nn.Linear(width, WORDS, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, words):
        x = self.embed(words)
        q, k, v = self.qkv(self.norm(x.to(self.norm.weight.dtype)).to(self.qkv.weight.dtype)).chunk(3, dim=-1)
        x = x + functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        x = x + self.mlp(x.to(self.mlp[0].weight.dtype))
        return self.lm_head(x.to(self.lm_head.weight.dtype))


def words(seed=0):
    return torch.randint(0, WORDS, (4, 16), generator=torch.Generator().manual_seed(seed))


def make(kind=TinyLM, *, dtype=torch.float32, seed=0, **named):
    torch.manual_seed(seed)
    return kind(**named).to(dtype)


def step_of(model, optimizer, *, autocast=None, passes=1, wide_loss=True, scaler=None):
    """One step: forward, loss, backward, update."""

    def step():
        optimizer.zero_grad()
        for number in range(passes):
            batch = words(number)
            with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                logits = model(batch)
                logits = logits.float() if wide_loss else logits
                loss = functional.cross_entropy(logits.flatten(0, 1), batch.flatten())
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    return step


def adamw(model, lr=1e-4, kind=torch.optim.AdamW, **named):
    return kind([p for p in model.parameters() if p.requires_grad], lr=lr, **named)


def measure(model, optimizer=None, **named):
    """The manifest of one step."""
    optimizer = adamw(model) if optimizer is None else optimizer
    return fl.manifest(model, optimizer, step=step_of(model, optimizer, **named))


def text(manifest):
    return "\n".join(line.text for line in manifest.lines)


def copy_of(model):
    return copy.deepcopy(model)
