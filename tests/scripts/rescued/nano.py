"""
A small character-level GPT, trained on a corpus that is made on the spot.
$ python nano.py --precision fp16 --max_iters 100
"""
import sys
import math
import time
from contextlib import nullcontext

import torch
import torch.nn as nn
from torch.nn import functional as F

# -----------------------------------------------------------------------------
# default config values
# I/O
eval_interval = 32
log_interval = 8
eval_iters = 2
# data
gradient_accumulation_steps = 2  # used to simulate larger batch sizes
batch_size = 8  # the micro-batch size
block_size = 32
# model
n_layer = 2
n_head = 4
n_embd = 32
# adamw optimizer
learning_rate = 8e-3
max_iters = 64
weight_decay = 1e-1
beta1 = 0.9
beta2 = 0.95
adam_eps = 1e-6
grad_clip = 1.0  # clip gradients at this value, or disable if == 0.0
# learning rate decay settings
warmup_iters = 6
lr_decay_iters = 64
min_lr = 8e-4
# system
precision = "fp16"  # 'fp32', 'bf16' or 'fp16'; the latter brings a GradScaler
seed = 1337
# -----------------------------------------------------------------------------
argv = [part for arg in sys.argv[1:] for part in arg.split("=", 1)]
for key, val in zip(argv[::2], argv[1::2]):
    key = key.lstrip("-")
    assert key in globals(), f"unknown config key: {key}"
    globals()[key] = type(globals()[key])(val)
assert precision in ("fp32", "fp16", "bf16")
# -----------------------------------------------------------------------------

torch.manual_seed(seed)
torch.set_num_threads(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
ptdtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
ctx = nullcontext() if precision == "fp32" else torch.autocast(device_type=device, dtype=ptdtype)


def make_corpus(n_sentences):
    g = torch.Generator().manual_seed(7)
    subjects = ["the cat", "the old king", "a sailor", "my brother", "the quiet nurse", "every student"]
    verbs = ["carries", "forgets", "paints", "repairs", "watches", "sells"]
    objects = ["a red lantern", "the broken clock", "seven apples", "his wooden boat", "the long letter"]
    places = ["in the garden", "at midnight", "near the harbour", "before winter"]
    pick = lambda words: words[torch.randint(len(words), (1,), generator=g).item()]
    return " ".join(f"{pick(subjects)} {pick(verbs)} {pick(objects)} {pick(places)}." for _ in range(n_sentences))


text = make_corpus(1000)
chars = sorted(set(text))
vocab_size = len(chars)
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text], dtype=torch.long)
n = int(0.9 * len(data))
splits = {"train": (0, n), "val": (n, len(data))}


def get_batch(split):
    lo, hi = splits[split]
    ix = torch.randint(lo, hi - block_size - 1, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    pos = ix[:, None] + torch.arange(block_size)  # where in the document the tokens are
    return x.to(device), y.to(device), pos.to(device)


class LayerNorm(nn.Module):
    """LayerNorm but with an optional bias."""

    def __init__(self, ndim, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class Rotary(nn.Module):
    def __init__(self, dim, base=1000.0):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim)), persistent=False)

    def forward(self, pos):
        with torch.autocast(device_type=device, enabled=False):
            freqs = pos[:, :, None].float() @ self.inv_freq[None, None, :].float()
        return freqs.cos()[:, None], freqs.sin()[:, None]


def apply_rotary(x, cos, sin):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1).type_as(x)


class TokenShift(nn.Module):
    """Exponential average over the tokens before, as in Mega, with a gate per channel."""

    def __init__(self, n_embd, decay=0.6):
        super().__init__()
        self.gate = nn.Parameter(torch.full((n_embd,), 0.1))
        self.decay = decay

    def forward(self, x):
        t = torch.arange(x.size(1), device=x.device, dtype=torch.float32)
        weight = torch.tril(self.decay ** (t[:, None] - t[None, :]).clamp(min=0))
        return x + self.gate * (weight @ x) * (1 - self.decay)


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        assert n_embd % n_head == 0
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x, cos, sin):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(n_embd, dim=2)
        k = k.view(B, T, n_head, C // n_head).transpose(1, 2)
        q = q.view(B, T, n_head, C // n_head).transpose(1, 2)
        v = v.view(B, T, n_head, C // n_head).transpose(1, 2)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd, bias=False)
        self.c_proj = nn.Linear(4 * n_embd, n_embd, bias=False)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = TokenShift(n_embd)
        self.ln_1 = LayerNorm(n_embd, bias=False)
        self.attn = CausalSelfAttention()
        self.ln_2 = LayerNorm(n_embd, bias=False)
        self.mlp = MLP()

    def forward(self, x, cos, sin):
        x = x + self.attn(self.ln_1(self.shift(x)), cos, sin)
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.rotary = Rotary(n_embd // n_head)
        self.h = nn.ModuleList([Block() for _ in range(n_layer)])
        self.ln_f = LayerNorm(n_embd, bias=False)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.08)
        elif isinstance(module, nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.2)

    def forward(self, idx, targets, pos):
        x = self.wte(idx)
        cos, sin = self.rotary(pos)
        for block in self.h:
            x = block(x, cos, sin)
        x = self.ln_f(x)
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


model = GPT()
model.to(device)

# initialize a GradScaler. If enabled=False scaler is a no-op
scaler = torch.amp.GradScaler(device, enabled=(precision == "fp16"))

# optimizer
decay_params = [p for p in model.parameters() if p.dim() >= 2]
nodecay_params = [p for p in model.parameters() if p.dim() < 2]
optim_groups = [
    {"params": decay_params, "weight_decay": weight_decay},
    {"params": nodecay_params, "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(optim_groups, lr=learning_rate, betas=(beta1, beta2), eps=adam_eps)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y, P = get_batch(split)
            with ctx:
                logits, loss = model(X, Y, P)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


# learning rate decay scheduler (cosine with warmup)
def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    coeff = 0.5 * (1.0 + math.cos(math.pi * decay_ratio))
    return min_lr + coeff * (learning_rate - min_lr)


# training loop
X, Y, P = get_batch("train")
t0 = time.time()
iter_num = 0
best_val_loss = 1e9
while True:
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr

    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        best_val_loss = min(best_val_loss, losses["val"].item())

    # forward backward update, with gradient accumulation
    for micro_step in range(gradient_accumulation_steps):
        with ctx:
            logits, loss = model(X, Y, P)
            loss = loss / gradient_accumulation_steps  # scale the loss to account for gradient accumulation
        X, Y, P = get_batch("train")
        scaler.scale(loss).backward()
    # clip the gradient
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    # step the optimizer and scaler if training in fp16
    scaler.step(optimizer)
    scaler.update()
    # flush the gradients as soon as we can, no need for this memory anymore
    optimizer.zero_grad(set_to_none=True)

    if iter_num % log_interval == 0:
        lossf = loss.item() * gradient_accumulation_steps
        print(f"iter {iter_num}: loss {lossf:.4f}, time {(time.time() - t0) * 1000:.0f}ms")
    iter_num += 1

    # termination conditions
    if iter_num > max_iters:
        break

losses = estimate_loss()
print(f"final: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
