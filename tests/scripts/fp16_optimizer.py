"""Text classification with a half model and an FP16 optimizer that keeps an FP32 copy of every weight."""

import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class DynamicLossScaler:
    def __init__(self, init_scale=2.0**15, scale_factor=2.0, scale_window=200):
        self.loss_scale, self.scale_factor, self.scale_window = init_scale, scale_factor, scale_window
        self._iter = self._last_overflow_iter = 0

    def update_scale(self, overflow):
        if overflow:
            self.loss_scale /= self.scale_factor
            self._last_overflow_iter = self._iter
        elif (self._iter - self._last_overflow_iter) % self.scale_window == 0 and self._iter:
            self.loss_scale *= self.scale_factor
        self._iter += 1


class FP16Optimizer:
    def __init__(self, params, optimizer_cls, scaler, **kwargs):
        self.fp16_params = list(params)
        self.fp32_params = [nn.Parameter(p.detach().clone().float()) for p in self.fp16_params]
        self.optimizer = optimizer_cls(self.fp32_params, **kwargs)
        self.scaler = scaler

    def backward(self, loss):
        (loss * self.scaler.loss_scale).backward()

    def step(self, max_norm):
        for p32, p in zip(self.fp32_params, self.fp16_params, strict=True):
            p32.grad = p.grad.float()
            p32.grad.div_(self.scaler.loss_scale)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.fp32_params, max_norm)
        overflow = not math.isfinite(grad_norm)
        self.scaler.update_scale(overflow)
        if overflow:
            print(f"gradient overflow detected, setting loss scale to: {self.scaler.loss_scale}")
            return grad_norm
        self.optimizer.step()
        for p32, p in zip(self.fp32_params, self.fp16_params, strict=True):
            p.data.copy_(p32.data)
        return grad_norm

    def zero_grad(self):
        for p in self.fp16_params:
            p.grad = None


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        ms = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(ms + self.eps) * self.weight


class TextClassifier(nn.Module):
    def __init__(self, vocab=100, dim=64, classes=12, heads=4):
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        self.norm1, self.norm2, self.norm3 = RMSNorm(dim), RMSNorm(dim), RMSNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.fc1, self.fc2 = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)
        self.out = nn.Linear(dim, classes)

    def forward(self, tokens):
        pad = tokens == 0
        x = self.embed(tokens)
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(c // self.heads)
        scores = scores.masked_fill(pad[:, None, None], torch.finfo(scores.dtype).min)
        x = x + self.proj((scores.float().softmax(-1).to(x.dtype) @ v).transpose(1, 2).reshape(b, t, c))
        x = x + self.fc2(F.relu(self.fc1(self.norm2(x))))
        keep = (~pad).unsqueeze(-1).to(x.dtype)
        pooled = (self.norm3(x) * keep).sum(1) / keep.sum(1)
        return self.out(pooled)


def label_smoothed_nll_loss(logits, target, epsilon=0.1):
    lprobs = F.log_softmax(logits.float(), dim=-1)
    nll_loss = -lprobs.gather(1, target.unsqueeze(1)).squeeze(1)
    smooth_loss = -lprobs.mean(dim=-1)
    return ((1 - epsilon) * nll_loss + epsilon * smooth_loss).mean()


def make_batch(n, device, length=14):
    target = torch.randint(0, 12, (n,))
    tokens = torch.randint(1, 100, (n, length))
    topical = torch.rand(n, length) < 0.6
    tokens = torch.where(topical, 1 + target[:, None] * 8 + torch.randint(0, 8, (n, length)), tokens)
    lengths = torch.randint(5, length + 1, (n, 1))
    tokens = tokens.masked_fill(torch.arange(length)[None] >= lengths, 0)
    return tokens.to(device), target.to(device)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-update", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--clip-norm", type=float, default=1.0)
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
    args = parser.parse_args()
    torch.manual_seed(2)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[args.precision]
    model = TextClassifier().to(device)
    model.to(dtype)
    scaler = DynamicLossScaler() if args.precision == "fp16" else DynamicLossScaler(1.0, 1.0)
    optimizer = FP16Optimizer(
        model.parameters(), torch.optim.SGD, scaler, lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    for update in range(args.max_update):
        tokens, target = make_batch(args.batch_size, device)
        optimizer.zero_grad()
        loss = label_smoothed_nll_loss(model(tokens), target)
        optimizer.backward(loss)
        grad_norm = optimizer.step(args.clip_norm)
        if update % 5 == 0 or update == args.max_update - 1:
            print(f"update {update} | loss {loss.item():.4f} | gnorm {grad_norm:.3f} | scale {scaler.loss_scale:.0f}")


if __name__ == "__main__":
    main()
