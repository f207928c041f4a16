"""Loops that compute in 16 bits before they call a model, in the first step or a later one."""

import torch
from torch import nn


def _step(model, optimizer, x):
    with torch.autocast("cpu", torch.float16):
        y = model(x)
    y.float().square().mean().backward()
    optimizer.step()


def _squares(step, first):
    small = (torch.randn(64, 8) * (400 if step >= first else 10)).half()
    return (small * small).float() / 1e6  # HERE


def cleared_first(steps=20, *, first=0):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        _step(model, optimizer, _squares(step, first))


def cleared_last(steps=20, *, first=0):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(steps):
        _step(model, optimizer, _squares(step, first))
        optimizer.zero_grad()


def of_two_models(steps=20, *, first=0):
    torch.manual_seed(0)
    body, head = nn.Linear(8, 8), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        _step(lambda x: head(torch.tanh(body(x))), optimizer, _squares(step, first))


def ids(steps=20, *, dtype=torch.float16):
    torch.manual_seed(0)
    table, head = nn.Embedding(4096, 8), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        packed = torch.arange(4064, 4096).to(dtype)  # HERE
        _step(lambda rows: head(table(rows)), optimizer, packed.long())


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(4096, 8), nn.Linear(8, 1)

    def forward(self, rows):
        packed = rows.to(torch.float16)  # HERE
        return self.head(self.table(packed.long()))


def ids_in_the_model(steps=20, *, last=4096):
    torch.manual_seed(0)
    model = Table()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        _step(model, optimizer, torch.arange(4064, last))


def told_by_nothing_that_is_recorded(steps=20):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            y = model(torch.ones(4, 8))
        factor = float("nan") if y.dtype is torch.float16 else 1.0
        (y.float().square().mean() * factor).backward()
        optimizer.step()


def diverging_in_fp32_too(steps=20):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        _step(model, optimizer, _squares(step, 0) * 1e3)


def scaled(steps=20, *, first=0):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(steps):
        x = _squares(step, first)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            y = model(x)
        scaler.scale(y.float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


def once(steps=20, *, at=7):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        _step(model, optimizer, _squares(step, step if step == at else 99))


def evaluated(steps=20, *, first=0):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(steps):
        with torch.no_grad():
            model(torch.ones(1, 8))
        optimizer.zero_grad()
        _step(model, optimizer, _squares(step, first))


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((8,), float(index)).half().square().float()


def loaded(steps=6):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(steps):
        for x in torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=1, multiprocessing_context="fork"):
            optimizer.zero_grad()
            _step(model, optimizer, x)
