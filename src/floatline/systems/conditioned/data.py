"""Sequences that follow a category's rule with a known accuracy, and the losses that are possible on them."""

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


def best_conditioned_loss(sequences: Sequences, vocabulary: int) -> float:
    """The loss that the best model has in expectation, in nats per token: the entropy of the next token.

    Numerics:
        a ln(1/a) + (1-a) ln((V-1)/(1-a)) for an accuracy a, with 0 ln 0 = 0, averaged over all counted positions in
        float64. Checked by tests/systems/test_conditioned.py.
    """
    accuracy = _accuracy_of_positions(sequences).double()
    wrong = 1 - accuracy
    entropy = -torch.xlogy(accuracy, accuracy) - torch.xlogy(wrong, wrong / (vocabulary - 1))
    return float(entropy[sequences.targets != IGNORED].mean())


def best_unconditioned_loss(sequences: Sequences, rules: Tensor) -> float:
    """The loss of the best model that sees the tokens alone, in nats per token, on these sequences.

    It knows the rules, and must learn category and accuracies from the tokens so far: Bayes' rule, exactly.

    Numerics:
        With accuracies of the arcsine distribution and k of n tokens right so far, the next one is right with
        probability (k + 1/2) / (n + 1) (the estimator of Krichevsky and Trofimov). The categories are weighed by what
        they gave to the tokens so far, in float64. No model without the conditions has a lower loss in expectation.
        Checked by tests/systems/test_conditioned.py.
    """
    num_accuracies = sequences.accuracies.shape[1]
    num_categories, vocabulary = rules.shape
    num, length = sequences.tokens.shape
    right = torch.zeros(num, num_categories, num_accuracies, dtype=torch.float64)
    seen = torch.zeros(num, 1, num_accuracies, dtype=torch.float64)
    log_weights = torch.zeros(num, num_categories, dtype=torch.float64)  # of the categories, not normalised
    total, count = 0.0, 0
    for t in range(length):
        counted = sequences.targets[:, t] != IGNORED
        token, target = (part[:, t].clamp(0, vocabulary - 1) for part in (sequences.tokens, sequences.targets))
        hit = (rules.T[token] == target[:, None]).double()
        i = t % num_accuracies
        is_right = (right[:, :, i] + 0.5) / (seen[:, :, i] + 1)
        likelihood = torch.where(hit.bool(), is_right, (1 - is_right) / (vocabulary - 1))
        predicted = (log_weights.softmax(1) * likelihood).sum(1)
        total -= float(predicted[counted].log().sum())
        count += int(counted.sum())
        right[:, :, i] += hit
        seen[:, :, i] += 1
        log_weights += likelihood.log()
    return total / count


def _accuracy_of_positions(sequences: Sequences) -> Tensor:
    length, num_accuracies = sequences.tokens.shape[1], sequences.accuracies.shape[1]
    return sequences.accuracies[:, torch.arange(length, device=sequences.accuracies.device) % num_accuracies]
