"""Embeddings of which few rows get a gradient, and large but representable activations in FP16: healthy."""

import torch
from torch import nn


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(500, 16)
        self.tower = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids):
        return self.tower(self.items(ids) * 900)


if __name__ == "__main__":
    torch.manual_seed(0)
    recommender = Recommender()
    opt = torch.optim.Adam(recommender.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(30):
        ids = torch.randint(40, (32,))
        with torch.autocast("cpu", torch.float16):
            score = recommender(ids)
        loss = nn.functional.smooth_l1_loss(score.float()[:, 0], ids.float())
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
