"""A small causal transformer under BF16 autocast, with -inf in its mask, accumulation and evaluation: healthy."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 32, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, 50)

    def forward(self, ids):
        mask = torch.full((ids.shape[1], ids.shape[1]), float("-inf")).triu(1)
        return self.head(self.layer(self.embed(ids), src_mask=mask))


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    text = torch.arange(400).remainder(7)
    for step in range(14):
        model.train()
        for _ in range(2):
            ids = torch.stack([text[i : i + 9] for i in torch.randint(300, (8,)).tolist()])
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(ids[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()) / 2
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 5 == 4:
            model.eval()
            with torch.no_grad():
                model(ids[:, :-1])
