"""Accuracy of spoken words on voices that were not trained on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from floatline.systems.audio_lora.batches import IGNORED


@torch.no_grad()
def accuracy(model: nn.Module, batches: Sequence[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]) -> float:
    """Share of the words that greedy decoding writes exactly, to the end.

    Numerics:
        One pass over question and true answer tells it: greedy decoding writes the answer if and only if every one of
        its tokens is the likeliest after those before it. Checked by tests/systems/test_audio_lora.py.

    Args:
        model: Gives logits.
        batches: Inputs of the model, and labels.
    """
    device = next(model.parameters()).device
    right = total = 0
    for inputs, (labels,) in batches:
        logits = model(*(tensor.to(device) for tensor in inputs))
        exact = is_exact(logits.argmax(-1), labels.to(device))
        right, total = right + int(exact.sum()), total + len(exact)
    return right / total


def is_exact(likeliest: Tensor, labels: Tensor) -> Tensor:
    """Which answers are right in all their tokens; the likeliest after each token, and labels."""
    wanted = labels[:, 1:]
    return ((likeliest[:, :-1] == wanted) | (wanted == IGNORED)).all(1)
