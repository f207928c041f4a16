"""Perplexity on held-out text, and the baseline that a student has to beat."""

from __future__ import annotations

import math
from collections import Counter
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from floatline.systems.distill.config import Config
from floatline.systems.distill.text import load_tokenizer, read_text, split_text, tile_tokens


@torch.no_grad()
def perplexity(model: nn.Module, held: Tensor) -> float:
    """The student's perplexity for each of its tokens on held-out text.

    Numerics:
        exp of the mean cross-entropy, summed in float64.

    Args:
        model: The distiller.
        held: Rows of tokens; each predicts its second to its last.
    """
    device = next(model.parameters()).device
    student = model.get_submodule("student")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for first in range(0, len(held), 32):
        rows = held[first : first + 32].to(device)
        logits = student(rows[:, :-1]).logits
        total += F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
    return math.exp(total.item() / held[:, 1:].numel())


def unigram_perplexity(config: Config) -> float:
    """The baseline: each token by its frequency in the training text, plus one."""
    tokenizer = load_tokenizer(config.student_path, "student")
    train_text, held_out = split_text(read_text(config.text_path))
    counts = Counter(tokenizer.encode(train_text, add_special_tokens=False).ids)
    total = counts.total() + tokenizer.get_vocab_size()
    rows = tile_tokens(held_out, length=config.length, student=tokenizer)
    held = cast("list[int]", rows[:, 1:].flatten().tolist())
    return math.exp(-sum(math.log((counts[i] + 1) / total) for i in held) / len(held))
