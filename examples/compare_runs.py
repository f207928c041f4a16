"""The verdict on two folders of finished runs: is the FP16 one as good?

The runs here are small trainings that write a CSV, as any script might. With three seeds or more on both sides they are
compared in pairs. `floatline compare A B --metric val/loss` is the same. Run it with: python examples/compare_runs.py
"""

import csv
import tempfile
from pathlib import Path

import torch
from torch import nn

import floatline as fl
from floatline.numerics import cuda_autocast_lists
from floatline.validation import compare

SEEDS, STEPS = 3, 40


def train(folder: Path, seed: int, plan: str, *, lr: float = 5e-3) -> None:
    """One run, which leaves metrics.csv behind."""
    torch.manual_seed(seed)
    x = torch.randn(512, 8)
    y = torch.tanh(x @ torch.randn(8, 1))
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    guard = fl.Guard(model, torch.optim.AdamW(model.parameters(), lr=lr), plan=plan)
    folder.mkdir(parents=True)
    with (folder / "metrics.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["step", "val/loss"])
        for step in range(STEPS):
            part = torch.arange(64) + step % 8 * 64
            guard.step(lambda part: (model(x[part]).float() - y[part]).square().mean(), part)
            if step % 10 == 9:
                with torch.no_grad():
                    rows.writerow([step + 1, (model(x) - y).square().mean().item()])


def main() -> None:
    """FP32, FP16, and FP32 with a mistake: a tenth of the learning rate."""
    root = Path(tempfile.mkdtemp())
    with fl.HalfOnCPU(), cuda_autocast_lists():
        for seed in range(SEEDS):
            train(root / "fp32" / f"seed_{seed}", seed, "fp32")
            train(root / "fp16" / f"seed_{seed}", seed, "fp16-mixed")
            train(root / "slow" / f"seed_{seed}", seed, "fp32", lr=5e-4)
    for name in ("fp16", "slow"):
        print(compare(root / "fp32", root / name, metric="val/loss"))


if __name__ == "__main__":
    main()
