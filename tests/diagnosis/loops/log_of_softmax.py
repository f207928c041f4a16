"""log(softmax(x)) with half weights: a probability below 6e-8 is 0."""

import sys

import torch
from torch import nn


def cross_entropy(logits, labels):
    probabilities = torch.softmax(logits, dim=-1)
    return -torch.log(probabilities).gather(1, labels[:, None]).mean()


if __name__ == "__main__":
    torch.manual_seed(1)
    classifier = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 5)).half()
    opt = torch.optim.SGD(classifier.parameters(), lr=0.01)
    for step in range(25):
        x = torch.randn(32, 10).half() * (4 if step < 12 else 60)
        opt.zero_grad()
        loss = cross_entropy(classifier(x), torch.randint(5, (32,)))
        loss.backward()
        opt.step()
        sys.stdout.write(f"{step} {loss.item():.3f}\n")
