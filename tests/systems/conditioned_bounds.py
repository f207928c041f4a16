"""What is possible on the data of the conditioned transformer, and whether a model does what it is asked."""

from collections.abc import Sequence

import torch
from torch import Tensor

from floatline.systems.conditioned.data import IGNORED, Sequences
from floatline.systems.conditioned.model import ConditionedTransformer


def best_conditioned_loss(sequences: Sequences, vocabulary: int) -> float:
    """The loss that the best model has in expectation, in nats per token: the entropy of the next token.

    Numerics:
        a ln(1/a) + (1-a) ln((V-1)/(1-a)) for an accuracy a, with 0 ln 0 = 0, averaged over all counted positions in
        float64.
    """
    at = torch.arange(sequences.tokens.shape[1]) % sequences.accuracies.shape[1]
    accuracy = sequences.accuracies[:, at].double()
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


@torch.no_grad()
def generate(
    model: ConditionedTransformer, accuracies: Tensor, categories: Tensor, generator: torch.Generator
) -> Tensor:
    """Sample (n, length + 1) tokens, the first of each row drawn uniformly."""
    tokens = torch.randint(model.vocabulary, (len(categories), 1), generator=generator)
    for _ in range(model.length):
        probabilities = model(tokens, accuracies, categories)[:, -1].float().softmax(dim=-1)
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
    """The mean probability that the model gives to the rule's token, for each accuracy that it is asked for."""
    device = next(model.parameters()).device
    moved = {name: tensor.to(device) for name, tensor in vars(sequences).items()}
    sequences, rules = Sequences(**moved), rules.to(device)
    counted = sequences.targets != IGNORED
    right = rules[sequences.categories[:, None], sequences.tokens.clamp(max=model.vocabulary - 1)]
    answers: list[float] = []
    for accuracy in asked:
        logits = model(sequences.tokens, torch.full_like(sequences.accuracies, accuracy), sequences.categories)
        probabilities = logits.float().softmax(dim=-1).gather(-1, right[..., None])[..., 0]
        answers.append(float(probabilities[counted].mean()))
    return answers
