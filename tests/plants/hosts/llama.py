"""Trains a tiny Llama to copy what it saw before a separator."""

import argparse

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

# site: helpers

p = argparse.ArgumentParser()
p.add_argument("--iters", type=int, default=30)
p.add_argument("--lr", type=float, default=5e-3)
p.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
cfg = p.parse_args()
torch.manual_seed(4)
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[cfg.precision]
amp = torch.autocast(device, dtype=dtype, enabled=cfg.precision != "fp32")
net = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
).to(device)
opt = torch.optim.AdamW(net.parameters(), lr=cfg.lr)
scaler = torch.amp.GradScaler(device, enabled=cfg.precision == "fp16")
# site: setup model=net opt=opt


def batch(n, length=5):
    words = torch.randint(2, 24, (n, 1)).expand(n, length)
    line = torch.cat([words, torch.ones(n, 1, dtype=torch.long), words], 1)
    return line[:, :-1].to(device), line[:, 1:].to(device)


for it in range(cfg.iters):
    x, y = batch(24)
    with amp:
        logits = net(x).logits[:, 4:].flatten(0, 1)
        y = y[:, 4:].flatten()
        loss = F.cross_entropy(logits, y)
        # site: inner x=logits loss=loss target=y
    # site: aux x=logits loss=loss target=y
    opt.zero_grad()
    # site: update loss=loss opt=opt model=net
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    # end
    # site: step model=net loss=loss step=it
    if it % 10 == 0:
        print(f"iter {it} loss {loss.item():.4f}")

with torch.no_grad(), amp:
    x, y = batch(200)
    logits = net(x).logits[:, 4:].flatten(0, 1)
    y = y[:, 4:].flatten()
    # site: eval x=logits target=y
    nll = F.cross_entropy(logits, y).item()
# site: final model=net
print(f"copy loss {nll:.4f}")
