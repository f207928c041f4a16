"""A workload of your own, with a held-out metric: every command takes it as a target.

    floatline doctor examples/custom_workload.py
    floatline train examples/custom_workload.py --plan fp16-mixed --steps 200
    floatline validate examples/custom_workload.py --plan fp16-mixed --plan bf16-mixed

Run by itself it trains under guard, in this process: python examples/custom_workload.py
"""

import tempfile

import torch
import torch.nn.functional as F
from torch import nn

from floatline.workload import Workload

ROWS, CLASSES = 64, 5


class Net(nn.Module):
    """A small convolutional net."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2), nn.ReLU())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits, in FP32 for the loss."""
        return self.head(self.body(images).mean((2, 3))).float()


def make_rows(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Stripes of five widths, with noise."""
    labels = torch.randint(CLASSES, (count,), generator=generator)
    waves = torch.sin(torch.arange(16) * (labels[:, None] + 1) * 0.5)
    return waves[:, None, None, :] + 0.3 * torch.randn(count, 1, 16, 16, generator=generator), labels


def build(seed: int = 0) -> Workload:
    """Everything that a run needs, from its seed alone."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(16):
        images, labels = make_rows(ROWS, generator)
        batches.append(((images,), (labels,)))
    held_out = make_rows(256, torch.Generator().manual_seed(10_000))

    def evaluate(model: nn.Module) -> float:
        """The loss of rows that are never trained on."""
        images, labels = (part.to(next(model.parameters()).device) for part in held_out)
        return F.cross_entropy(model(images.to(next(model.parameters()).dtype)), labels).item()

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=5e-3)

    return Workload(Net(), batches, F.cross_entropy, "fp16-mixed", make_optimizer, evaluate=evaluate)


def main() -> None:
    """What `floatline train` does."""
    from floatline.training import Trainer

    result = Trainer(build(), folder=tempfile.mkdtemp(), steps=60).run()
    print(f"{result.applied} of {result.attempted} steps applied, held-out loss {result.metric:.3f}")


if __name__ == "__main__":
    main()
