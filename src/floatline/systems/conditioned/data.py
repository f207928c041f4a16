"""Sequences that follow a category's rule with a known accuracy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100  # targets with this value do not count, as in torch's cross_entropy


@dataclass(frozen=True)
class Sequences:
    """What a generator sees and should say, one row for a sequence.

    Args:
        tokens: (n, length) token ids; `vocabulary` stands for padding.
        accuracies: (n, num_accuracies) in [0, 1]; entry i holds for positions t with t % num_accuracies == i.
        categories: (n,) which rule.
        targets: (n, length) the next token, IGNORED at padding.
    """

    tokens: Tensor
    accuracies: Tensor
    categories: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, index: Tensor | slice) -> Sequences:
        """Some of them."""
        return Sequences(self.tokens[index], self.accuracies[index], self.categories[index], self.targets[index])

    def to(self, device: torch.device) -> Sequences:
        """The same on a device."""
        return Sequences(*(part.to(device) for part in (self.tokens, self.accuracies, self.categories, self.targets)))

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the model takes."""
        return self.tokens, self.accuracies, self.categories


def make_rules(vocabulary: int, num_categories: int, generator: torch.Generator) -> Tensor:
    """One permutation of the tokens for each category: `rules[category, token]` is the right next token."""
    return torch.stack([torch.randperm(vocabulary, generator=generator) for _ in range(num_categories)])


def sample_sequences(
    num: int, length: int, rules: Tensor, *, num_accuracies: int, generator: torch.Generator
) -> Sequences:
    """Draw sequences: categories uniform, lengths uniform between half and full.

    Accuracies have the arcsine distribution on [0, 1], which has more of the ends than a uniform one. The next token is
    the rule's with probability `accuracy`, else one of the others, all alike.
    """
    num_categories, vocabulary = rules.shape
    accuracies = torch.sin(torch.rand(num, num_accuracies, generator=generator) * math.pi / 2) ** 2
    categories = torch.randint(num_categories, (num,), generator=generator)
    tokens = torch.randint(vocabulary, (num, length + 1), generator=generator)
    for t in range(length):
        right = rules[categories, tokens[:, t]]
        # 1 to vocabulary - 1 steps away from the right token is any other one.
        away = torch.randint(1, vocabulary, (num,), generator=generator)
        follows = torch.rand(num, generator=generator) < accuracies[:, t % num_accuracies]
        tokens[:, t + 1] = torch.where(follows, right, (right + away) % vocabulary)
    lengths = torch.randint((length + 1) // 2, length + 1, (num, 1), generator=generator)
    padded = torch.arange(length) >= lengths
    return Sequences(
        tokens[:, :-1].masked_fill(padded, vocabulary),
        accuracies,
        categories,
        tokens[:, 1:].masked_fill(padded, IGNORED),
    )
