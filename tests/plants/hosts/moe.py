"""Sequences of symbols by attention and a mixture of experts, routed token by token."""

import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

# site: helpers


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.heads = heads

    def forward(self, x, pad):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)
        hidden = pad[:, None, None, :]
        # site: attention scores=scores mask=hidden q=q k=k
        scores = scores.masked_fill(hidden, float("-inf"))
        out = F.softmax(scores, dim=-1).to(v.dtype) @ v
        return self.proj(out.transpose(1, 2).reshape(b, n, d))


class Experts(nn.Module):
    def __init__(self, dim, num_experts=6, k=2):
        super().__init__()
        self.router = nn.Linear(dim, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim)) for _ in range(num_experts)
        )
        self.k = k

    def forward(self, x):
        gate = self.router(x)
        # site: choose x=gate
        weight, chosen = gate.float().softmax(-1).topk(self.k, dim=-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            share = (weight * (chosen == e)).sum(-1, keepdim=True)
            out = out + share.to(x.dtype) * expert(x)
        return out


class Model(nn.Module):
    def __init__(self, vocab=40, dim=32, classes=5):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention, self.moe = Attention(dim, 4), Experts(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, tokens):
        pad = tokens == 0
        x = self.embed(tokens)
        x = x + self.attention(self.norm1(x), pad)
        x = x + self.moe(self.norm2(x))
        keep = (~pad).unsqueeze(-1)
        return self.head((x * keep).sum(1) / keep.sum(1))


def sequences(n, length=12, classes=5):
    target = torch.randint(0, classes, (n,))
    tokens = torch.randint(1, 40, (n, length))
    topic = torch.rand(n, length) < 0.5
    tokens = torch.where(topic, 1 + 7 * target[:, None] + torch.randint(0, 7, (n, length)), tokens)
    return tokens.masked_fill(torch.arange(length) >= torch.randint(6, length + 1, (n, 1)), 0), target


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
    args = parser.parse_args()
    torch.manual_seed(8)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[args.precision]
    ctx = torch.autocast(device_type=device, dtype=dtype, enabled=args.precision != "fp32")
    model = Model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16")
    # site: setup model=model opt=optimizer
    for step in range(args.steps):
        tokens, target = (t.to(device) for t in sequences(48))
        optimizer.zero_grad()
        with ctx:
            logits = model(tokens)
            loss = F.cross_entropy(logits, target)
            # site: inner x=logits loss=loss target=target
        # site: aux x=logits loss=loss target=target
        # site: update loss=loss opt=optimizer model=model
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        # end
        # site: step model=model loss=loss step=step
        if step % 10 == 0:
            print(f"step {step}: {loss.item():.4f}")
    right, seen = 0, 0
    model.eval()
    with torch.inference_mode():
        for _ in range(4):
            tokens, target = (t.to(device) for t in sequences(200))
            with ctx:
                logits = model(tokens)
            # site: eval x=logits target=target
            right += (logits.argmax(-1) == target).sum().item()
            seen += len(target)
    # site: final model=model
    print(f"accuracy {right / seen:.4f} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
