"""One batch of many holds a NaN, in the 14th step."""

import torch
from torch import nn


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 120

    def __getitem__(self, number):
        row = torch.sin(torch.arange(8.0) + number)
        if number == 53:
            row[2] = float("nan")
        return row, row.sum()[None]


def fit(model, loader):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for row, total in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            guess = model(row)
        nn.functional.mse_loss(guess.float(), total).backward()
        optimizer.step()


if __name__ == "__main__":
    torch.manual_seed(0)
    fit(nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1)), torch.utils.data.DataLoader(Rows(), batch_size=4))
