"""Training steps for the compiler: six that a planted backend gets wrong, and seven that nothing is wrong with.

As a script it trains one of them: `python step_cases.py CASE BACKEND [WAY]`.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, ROWS = 32, 32


class Shift(nn.Module):
    """Moves and scales by constants."""

    def forward(self, x: Tensor) -> Tensor:
        """(x + 1.5) * 2."""
        return (x + 1.5) * 2.0


class Branch(nn.Module):
    """A 16-bit branch beside an FP32 stream."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        """Add what the branch finds."""
        return x + self.inner(x.bfloat16())


class Centre(nn.Module):
    """Takes a running mean away."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Update the mean, then centre."""
        self.mean.lerp_(x.detach().mean(0), 0.25)
        return x - self.mean


class Energy(nn.Module):
    """The energy of each row, apart from the others'."""

    def forward(self, x: Tensor) -> Tensor:
        """Widened first: 16 bits would lose what is left of the difference."""
        energy = x.float().square().sum(-1, keepdim=True)
        return (energy - energy.mean()).to(x.dtype) * x


class Mix(nn.Module):
    """Attention over rows, as many as there are columns."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """softmax(q k) x."""
        return torch.softmax(self.q(x) @ self.k(x).mT, dim=-1) @ x


class Heads(nn.Module):
    """torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Causal, with four heads."""
        q, k, v = self.qkv(x[None]).view(1, ROWS, 3, 4, -1).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)


class Breaks(nn.Module):
    """Code that torch.compile takes in two graphs."""

    def forward(self, x: Tensor) -> Tensor:
        """A number is read in between."""
        x = torch.tanh(x)
        return x * 2 if x.sum().item() > 0 else x * 3


class Writes(nn.Module):
    """Writes into what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale rows in place."""
        y = x * 1.0
        y[::2].mul_(0.5)
        y.add_(x)
        return y


class Tied(nn.Module):
    """One weight for the way in and the way out."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        """Up and down."""
        return self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A middle part between linear layers."""

    def __init__(self, *middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), nn.Sequential(*middle), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        """First, middle, last."""
        return self.last(self.middle(self.first(x)))


@dataclass(frozen=True)
class StepCase:
    """A step.

    Args:
        make: Gives the parts in the middle.
        dtype: Of weights and inputs.
        mixed: Whether BF16 autocast is on.
        scale: Of the inputs.
        plant: Name of the backend that gets it wrong; '' where nothing is wrong.
        wrong: Class of the module that is wrong then.
    """

    make: Callable[[], list[nn.Module]]
    dtype: torch.dtype = torch.float32
    mixed: bool = False
    scale: float = 1.0
    plant: str = ""
    wrong: str = ""

    def build(self) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        """The model and a batch."""
        torch.manual_seed(0)
        model = Net(*self.make())
        if self.dtype != torch.float32:
            model.to(self.dtype)
        x = torch.randn(ROWS, WIDTH) * self.scale
        return model, (x.to(self.dtype), torch.randint(8, (ROWS,)))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.mixed):
            return F.cross_entropy(model(batch[0]).float(), batch[1])


CASES: dict[str, StepCase] = {
    "folded": StepCase(lambda: [nn.Tanh(), Shift(), nn.GELU()], plant="folds_wrongly", wrong="Shift"),
    "relu": StepCase(
        lambda: [nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()],
        plant="drops_a_relu",
        wrong="ReLU",
    ),
    "promotion": StepCase(lambda: [Branch(), nn.Tanh()], scale=20.0, plant="promotes_wrongly", wrong="Branch"),
    "stale": StepCase(lambda: [nn.Tanh(), Centre()], plant="keeps_old_buffers", wrong="Centre"),
    "cast": StepCase(lambda: [Energy()], dtype=torch.bfloat16, plant="drops_a_cast", wrong="Energy"),
    "axis": StepCase(lambda: [nn.LayerNorm(WIDTH), Mix()], plant="sums_another_axis", wrong="Mix"),
    "dropout": StepCase(lambda: [nn.Dropout(0.3), nn.GELU()]),
    "batchnorm": StepCase(lambda: [nn.BatchNorm1d(WIDTH), nn.ReLU()]),
    "attention": StepCase(lambda: [nn.LayerNorm(WIDTH), Heads()], dtype=torch.bfloat16),
    "autocast": StepCase(lambda: [nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)], mixed=True),
    "breaks": StepCase(lambda: [Breaks(), nn.LayerNorm(WIDTH)]),
    "writes": StepCase(lambda: [Writes(), nn.GELU()]),
    "tied": StepCase(lambda: [Tied(), nn.GELU()]),
}
SICK = [name for name, case in CASES.items() if case.plant]
HEALTHY = [name for name, case in CASES.items() if not case.plant]


def train(name: str, backend: Any, way: str = "module") -> None:
    """Four steps, compiled in one of the ways that torch has, or not at all."""
    case = CASES[name]
    model, batch = case.build()
    compute = case.loss
    if way == "module":
        run = torch.compile(model, backend=backend)
    elif way == "in place":
        model.compile(backend=backend)
        run = model
    elif way == "function":
        run, compute = model, torch.compile(backend=backend)(case.loss)
    else:
        run = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        loss = compute(run, batch)
        loss.backward()
        optimizer.step()
        sys.stdout.write(f"loss {loss.item():.4f}\n")


if __name__ == "__main__":
    from tests.agreement.compiled import plants

    train(sys.argv[1], getattr(plants, sys.argv[2], sys.argv[2]), *sys.argv[3:])
