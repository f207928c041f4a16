"""The model of the ten-minute tour: it learns which of two items a user prefers, and FP16 breaks its loss.

The loss takes the log of a sigmoid. Float32 holds the probability of a pair that the model gets very wrong; in FP16 it
is 0, and its log is -inf. `tour.py:fixed` is the same with `logsigmoid`.
"""

import torch
from torch import nn
from torch.nn import functional as F

USERS, ITEMS, WIDTH = 64, 128, 16


class Ranker(nn.Module):
    """Scores two items for a user, and gives the difference."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, WIDTH), nn.Embedding(ITEMS, WIDTH)
        self.hidden, self.score = nn.Linear(2 * WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, 1)

    def forward(self, user: torch.Tensor, better: torch.Tensor, worse: torch.Tensor) -> torch.Tensor:
        """How much more the first item is liked."""
        first, second = (torch.cat([self.users(user), self.items(item)], -1) for item in (better, worse))
        return (self.score(F.gelu(self.hidden(first))) - self.score(F.gelu(self.hidden(second)))).squeeze(-1)


def ranking_loss(margin: torch.Tensor) -> torch.Tensor:
    """Bayesian personalized ranking, written by hand."""
    return -torch.log(torch.sigmoid(margin)).mean()


def fixed_loss(margin: torch.Tensor) -> torch.Tensor:
    """The same function, in a form that FP16 can hold."""
    return -F.logsigmoid(margin).mean()


def make_batches(seed: int) -> list:
    """Pairs that a hidden taste has put in order."""
    generator = torch.Generator().manual_seed(seed)
    tastes = torch.randn(USERS, 4, generator=generator)
    traits = torch.randn(ITEMS, 4, generator=generator)
    batches = []
    for _ in range(12):
        user = torch.randint(USERS, (256,), generator=generator)
        pair = torch.randint(ITEMS, (256, 2), generator=generator)
        liked = (tastes[user, None] * traits[pair]).sum(-1)
        order = liked.argsort(-1, descending=True)
        better, worse = pair.gather(1, order).unbind(1)
        batches.append(((user, better, worse), ()))
    return batches


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def build(seed: int = 0) -> tuple:
    """The broken one."""
    torch.manual_seed(seed)
    model = Ranker()
    with torch.no_grad():
        model.score.weight.mul_(50)  # pretrained elsewhere, and sure of itself
    return model, make_batches(seed), ranking_loss, "fp16-mixed", make_optimizer


def fixed(seed: int = 0) -> tuple:
    """The one that trains."""
    model, batches, _, precision, optimizer = build(seed)
    return model, batches, fixed_loss, precision, optimizer
