"""Does the model do what it is asked? Sequences on request, and how often they follow the rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from floatline.errors import TargetError
from floatline.systems.conditioned.data import IGNORED, Sequences
from floatline.systems.conditioned.model import ConditionedTransformer, check_categories


@torch.no_grad()
def generate(
    model: ConditionedTransformer, accuracies: Tensor, categories: Tensor, *, generator: torch.Generator | None = None
) -> Tensor:
    """Sample (n, length + 1) tokens, the first of each row drawn uniformly.

    Args:
        model: On any device; the request may lie elsewhere.
        accuracies: (n, num_accuracies); numbers outside [0, 1] count as 0 or 1.
        categories: (n,).
        generator: Source of randomness, on the CPU. None uses torch's own.

    Raises:
        TargetError: An accuracy that is no number, or a category that does not exist.
    """
    lost = accuracies.isnan()
    if bool(lost.any()):
        raise TargetError(f"An accuracy of row {int(lost.nonzero()[0, 0])} is NaN. Give a number from 0 to 1.")
    check_categories(categories, model.conditioning.num_categories)
    device = next(model.parameters()).device
    asked, of = accuracies.clamp(0.0, 1.0).to(device), categories.to(device)
    tokens = torch.randint(model.vocabulary, (len(of), 1), generator=generator)
    for _ in range(model.length):
        probabilities = model(tokens.to(device), asked, of)[:, -1].float().softmax(dim=-1).cpu()
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    return tokens


def count_right(tokens: Tensor, categories: Tensor, rules: Tensor) -> Tensor:
    """Share of tokens, in each row, that follow the rule of the row's category."""
    right = rules[categories[:, None], tokens[:, :-1]]
    return (tokens[:, 1:] == right).double().mean(dim=1)


@torch.no_grad()
def measure_response(
    model: ConditionedTransformer, sequences: Sequences, rules: Tensor, asked: Sequence[float]
) -> list[float]:
    """The mean probability that the model gives to the rule's token, for each accuracy that it is asked for.

    Args:
        model: In evaluation mode.
        sequences: Whose tokens and categories are shown to it; their own accuracies are replaced.
        rules: The right next tokens.
        asked: Accuracies, the same for all positions.
    """
    device = next(model.parameters()).device
    here = sequences.to(device)
    counted = here.targets != IGNORED
    right = rules.to(device)[here.categories[:, None], here.tokens.clamp(max=model.vocabulary - 1)]
    answers: list[float] = []
    for accuracy in asked:
        logits = model(here.tokens, torch.full_like(here.accuracies, accuracy), here.categories)
        probabilities = logits.float().softmax(dim=-1).gather(-1, right[..., None])[..., 0]
        answers.append(float(probabilities[counted].mean()))
    return answers
