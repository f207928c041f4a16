"""
Trains a small character-level GPT. Config is on the command line:
$ python gpt.py --n_layer=2 --max_iters=40 --precision fp16
"""

import argparse
import math
import time
from contextlib import nullcontext

import torch
import torch.nn as nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--block_size", type=int, default=24)
parser.add_argument("--n_layer", type=int, default=2)
parser.add_argument("--n_head", type=int, default=4)
parser.add_argument("--n_embd", type=int, default=64)
parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
parser.add_argument("--learning_rate", type=float, default=3e-3)
parser.add_argument("--min_lr", type=float, default=3e-4)
parser.add_argument("--warmup_iters", type=int, default=5)
parser.add_argument("--max_iters", type=int, default=40)
parser.add_argument("--weight_decay", type=float, default=1e-1)
parser.add_argument("--grad_clip", type=float, default=1.0)
parser.add_argument("--log_interval", type=int, default=5)
parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--backend", default="inductor")
config = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
ptdtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.precision]
ctx = nullcontext() if config.precision == "fp32" else torch.autocast(device_type=device, dtype=ptdtype)
torch.manual_seed(1337)

text = "the quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. " * 60
chars = sorted(set(text))
stoi = {c: i + 1 for i, c in enumerate(chars)}  # 0 is the padding
vocab_size = len(chars) + 1
data = torch.tensor([stoi[c] for c in text])


def get_batch():
    ix = torch.randint(len(data) - config.block_size - 1, (config.batch_size,))
    x = torch.stack([data[i : i + config.block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + config.block_size] for i in ix])
    return x.to(device), y.to(device)


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head, block_size):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.n_head = n_head
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x, pad):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class Block(nn.Module):
    def __init__(self, n_embd, n_head, block_size):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head, block_size)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x, pad):
        x = x + self.attn(self.ln_1(x), pad)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config.n_embd, config.n_head, config.block_size) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, idx, targets):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x, idx == 0)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def get_lr(it):
    if it < config.warmup_iters:
        return config.learning_rate * (it + 1) / config.warmup_iters
    ratio = (it - config.warmup_iters) / (config.max_iters - config.warmup_iters)
    return config.min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (config.learning_rate - config.min_lr)


model = GPT()
model.to(device)
decay = [p for p in model.parameters() if p.dim() >= 2]
nodecay = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": nodecay, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler(device, enabled=(config.precision == "fp16"))
if config.compile:
    print("compiling the model...")
    model = torch.compile(model, backend=config.backend)

X, Y = get_batch()
t0 = time.time()
for iter_num in range(config.max_iters):
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr

    for _micro_step in range(config.gradient_accumulation_steps):
        with ctx:
            loss = model(X, Y)
            loss = loss / config.gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()

    if config.grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

    if iter_num % config.log_interval == 0 or iter_num == config.max_iters - 1:
        lossf = loss.item() * config.gradient_accumulation_steps
        print(f"iter {iter_num}: loss {lossf:.4f}, lr {lr:.2e}, time {(time.time() - t0) * 1000:.0f}ms")
