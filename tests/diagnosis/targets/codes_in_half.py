"""A loop that chooses codes by distances, whose products it computes in 16 bits."""

import torch
from torch import nn


def train(steps=60, dtype=torch.bfloat16):
    torch.manual_seed(0)
    centers = torch.randn(64, 16) + 8.0
    table = nn.Parameter(centers + 0.3 * torch.randn(64, 16))
    head = nn.Linear(16, 64)
    optimizer = torch.optim.Adam([table, *head.parameters()], lr=2e-2)
    losses = []
    for _ in range(steps):
        labels = torch.randint(64, (128,))
        x = centers[labels] + 0.1 * torch.randn(128, 16)
        with torch.no_grad():
            products = x.to(dtype) @ table.to(dtype).T  # HERE
            distances = x.square().sum(1, keepdim=True) - 2 * products.float() + table.square().sum(1)
            codes = distances.argmin(1)
        loss = (table[codes] - x).square().mean() + nn.functional.cross_entropy(head(table[codes] - 8.0), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def in_fp32(steps=60):
    return train(steps, torch.float32)


if __name__ == "__main__":
    train(40)
