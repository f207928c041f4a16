"""Small scripts that train within a second: what users have instead of a target."""

import textwrap
from pathlib import Path

TRAIN = """
    import argparse
    import torch
    from torch import nn

    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int)
    parser.add_argument("--out", default="model.pt")
    args = parser.parse_args()
    if args.seed is not None:
        torch.manual_seed(args.seed)
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(40):
        loss = LOSS
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} val loss {loss.item():.4f}")
    torch.save(model.state_dict(), args.out)
"""


def write_script(folder: Path, *, loss: str = "nn.functional.mse_loss(model(x), y)") -> Path:
    """A script that trains with a loss."""
    path = folder / "train.py"
    path.write_text(textwrap.dedent(TRAIN).replace("LOSS", loss), encoding="utf-8")
    return path
