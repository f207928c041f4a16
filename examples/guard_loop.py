"""A guarded training loop: bad batches, a schedule, a checkpoint, and going on from it with the same bits.

Run it with: python examples/guard_loop.py
"""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import floatline as fl
from floatline.numerics import cuda_autocast_lists

STEPS, SAVED_AT, BAD = 80, 40, (30, 60)


def build(folder: Path, *, resume: bool) -> tuple[nn.Module, fl.Guard]:
    """Model, optimizer, schedule and guard, as at the start of every run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = fl.optim.AdamW(model.parameters(), lr=1e-2)
    guard = fl.Guard(model, optimizer, plan="fp16-mixed", clip_norm=1.0, folder=folder, resume=resume)
    # The guard advances the schedule, on applied steps only.
    guard.scheduler(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS))
    return model, guard


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same batch for the same step; two of them are broken."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
    labels = x[:, :4].argmax(1)
    if step in BAD:
        x[0, 0] = float("nan")
    return x, labels


def train(model: nn.Module, guard: fl.Guard, first: int, last: int) -> None:
    """Some steps."""

    def compute_loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, labels = batch
        return F.cross_entropy(model(x).float(), labels)

    with fl.HalfOnCPU(), cuda_autocast_lists():  # FP16 on a CPU; not needed on a GPU
        for step in range(first, last):
            outcome = guard.step(compute_loss, make_batch(step))
            if outcome.due or step in BAD:
                print(f"step {step}: {outcome}")


def main() -> None:
    """Train, save on the way; then start again from the checkpoint, and compare."""
    folder = Path(tempfile.mkdtemp())
    model, guard = build(folder, resume=False)
    train(model, guard, 0, SAVED_AT)
    guard.save(folder / "checkpoints", extra={"next": SAVED_AT})
    train(model, guard, SAVED_AT, STEPS)
    print(guard.summary())
    guard.close()

    again, guard = build(folder, resume=True)
    first = guard.load(folder / "checkpoints")["next"]
    train(again, guard, first, STEPS)
    guard.close()
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    print(f"resumed at step {first}: the weights are {'the same, bit for bit' if same else 'different'}")
    print(f"both runs in the ledger: {fl.Ledger.read(folder).summary().splitlines()[0]}")


if __name__ == "__main__":
    main()
