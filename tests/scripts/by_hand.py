# Metric learning from scratch: no nn.Module, no torch.optim.
import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=60)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--margin", type=float, default=2.0)
parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
args = parser.parse_args()

torch.manual_seed(4)
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[args.precision]
half = args.precision != "fp32"
scale = 512.0 if args.precision == "fp16" else 1.0

# data: 6 groups of points in 20 dimensions
centers = torch.randn(6, 20)
labels = torch.randint(0, 6, (256,))
points = centers[labels] + 0.7 * torch.randn(256, 20)
points = (points - points.mean(0)) / points.std(0)
points, labels = points.to(device), labels.to(device)

# weights
w1 = torch.randn(20, 64, device=device) * (2 / 20) ** 0.5
b1 = torch.zeros(64, device=device)
gain = torch.ones(64, device=device)
w2 = torch.randn(64, 8, device=device) * (1 / 64) ** 0.5
w3 = torch.randn(8, 6, device=device) * 0.3
params = [w1, b1, gain, w2, w3]
for p in params:
    p.requires_grad_()


def embed(x):
    h = torch.relu(x @ w1 + b1)
    h = h * gain
    return h @ w2


def distances(z):
    diff = z[:, None] - z[None]
    return torch.linalg.vector_norm(diff.float(), dim=-1)


momentum = [torch.zeros_like(p) for p in params]
for epoch in range(args.epochs):
    batch = torch.randint(0, len(points), (48,), device=device)
    x, y = points[batch], labels[batch]
    with torch.autocast(device_type=device, dtype=dtype, enabled=half):
        z = embed(x)
        logits = z @ w3
        same = y[:, None] == y[None]
        d = distances(z)
        pull = d[same].mean()
        push = torch.relu(args.margin - d[~same]).mean()
        ce = torch.nn.functional.cross_entropy(logits, y)
        loss = ce + 0.1 * (pull + push)
    (loss * scale).backward()
    with torch.no_grad():
        for p, m in zip(params, momentum, strict=True):
            m.mul_(0.9).add_(p.grad / scale)
            p -= args.lr * m
            p.grad = None
    if epoch % 5 == 0 or epoch == args.epochs - 1:
        acc = (logits.argmax(1) == y).float().mean().item()
        print(f"epoch {epoch} loss {loss.item():.4f} acc {acc:.2f}")
