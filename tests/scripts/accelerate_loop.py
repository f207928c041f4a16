"""Trains a gated tabular classifier with a plain accelerate loop."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def get_dataloader(batch_size, seed=0):
    """Ten classes in 24 features, of which half are noise."""
    g = torch.Generator().manual_seed(seed)
    centers = torch.randn(10, 12, generator=g) * 1.5
    y = torch.randint(0, 10, (1280,), generator=g)
    x = torch.cat([centers[y] + torch.randn(1280, 12, generator=g), torch.randn(1280, 12, generator=g)], 1)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True)


class GatedClassifier(nn.Module):
    """Each layer has a gate on its units; gates sharpen with the temperature."""

    def __init__(self, features=24, width=96, classes=10, temperature=0.05):
        super().__init__()
        self.temperature = temperature
        self.inp = nn.Linear(features, width)
        self.gate = nn.Linear(features, width)
        self.mid = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, classes)

    def forward(self, x):
        gate_logits = self.gate(x) / self.temperature
        gate = torch.sigmoid(gate_logits)
        h = F.gelu(self.inp(x)) * gate
        h = self.norm(h + F.gelu(self.mid(h)))
        entropy = F.binary_cross_entropy_with_logits(gate_logits, gate.detach())
        return self.out(h), entropy


def training_function(args):
    torch.manual_seed(args.seed)
    use_cpu = not torch.cuda.is_available()
    precision = {"fp32": "no"}.get(args.precision, args.precision)
    accelerator = Accelerator(
        cpu=use_cpu, mixed_precision=precision, gradient_accumulation_steps=args.gradient_accumulation_steps
    )
    if use_cpu and precision == "fp16":
        # accelerate leaves FP16 off on a CPU without a word
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu")

    model = GatedClassifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    train_dataloader = get_dataloader(args.batch_size)
    updates = args.num_epochs * len(train_dataloader) // args.gradient_accumulation_steps
    lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=updates, pct_start=0.2)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )

    completed = 0
    for epoch in range(args.num_epochs):
        model.train()
        for x, y in train_dataloader:
            with accelerator.accumulate(model):
                logits, entropy = model(x)
                loss = F.cross_entropy(logits, y) + args.entropy_weight * entropy
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed += 1
                if completed % 5 == 0 or completed == 1:
                    lr = lr_scheduler.get_last_lr()[0]
                    accelerator.print(f"epoch {epoch} update {completed} loss {loss.item():.4f} lr {lr:.4f}")


def main():
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument("--num_epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--entropy_weight", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
