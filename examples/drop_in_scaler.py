"""fl.LossScaler in a loop that was written for torch.amp.GradScaler: one line changes.

Both loops meet 160 batches whose gradients are not finite. torch's scale has no floor: after 144 halvings 1 / scale is
inf, and the first healthy step writes NaN into the weights. Run it with: python examples/drop_in_scaler.py
"""

import torch
from torch import nn

import floatline as fl
from floatline.numerics import cuda_autocast_lists

STEPS, BAD = 200, range(20, 180)


def train(scaler: torch.amp.GradScaler | fl.LossScaler) -> nn.Module:
    """The loop of PyTorch's own examples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        x = torch.randn(32, 8)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean()
        scaler.scale(loss).backward()
        if step in BAD:
            model[0].weight.grad[0, 0] = float("nan")
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model


def main() -> None:
    """torch's scaler, and ours."""
    for name, scaler in (
        ("torch.amp.GradScaler", torch.amp.GradScaler("cpu")),
        ("fl.LossScaler", fl.LossScaler("cpu")),
    ):
        with fl.HalfOnCPU(), cuda_autocast_lists():
            model = train(scaler)
        finite = all(bool(weight.isfinite().all()) for weight in model.parameters())
        print(f"{name}: scale {scaler.get_scale():g}, weights {'finite' if finite else 'NaN'}")


if __name__ == "__main__":
    main()
