"""Log-probs of given tokens by a causal language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from floatline.agreement.logprobs.files import Scored
from floatline.errors import ParityError


def score(model: nn.Module, sequences: Sequence[Scored], *, batch_size: int, modes: Sequence[Any] = ()) -> Tensor:
    """The log-probs that a model gives to the tokens that a file has log-probs of, one after the other.

    Numerics:
        The logits are widened to float32 (float64 stays) before their log-softmax. Sequences are padded on the right,
        where a causal model does not look.

    Args:
        model: Called with token ids, sequences by positions; returns logits, or an object that has them.
        sequences: What is scored.
        batch_size: How many sequences at a time.
        modes: Dispatch modes to run in.
    """
    found: list[Tensor] = []
    device = next(model.parameters()).device
    with torch.no_grad():
        for start in range(0, len(sequences), batch_size):
            chunk = sequences[start : start + batch_size]
            ids = pad_sequence([one.tokens for one in chunk], batch_first=True).to(device)
            for mode in modes:
                mode.__enter__()
            try:
                logits = logits_of(model(ids), ids)
            finally:
                for mode in reversed(modes):
                    mode.__exit__(None, None, None)
            found += [_pick(row, one) for row, one in zip(logits, chunk, strict=True)]
    return torch.cat(found)


def logits_of(output: Any, ids: Tensor) -> Tensor:
    """The logits in what a model returned."""
    held: Any = cast("tuple[Any, ...]", output)[0] if isinstance(output, tuple) else output
    logits = getattr(held, "logits", held)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != ids.shape:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ParityError(
            f"The model gives {shape} for tokens of {tuple(ids.shape)}. It must give logits: sequences by positions by "
            "vocabulary."
        )
    if int(ids.max()) >= logits.shape[-1]:
        raise ParityError(f"The file has token {int(ids.max())}, and the model knows {logits.shape[-1]} of them.")
    return logits


def _pick(logits: Tensor, one: Scored) -> Tensor:
    end = len(one.tokens)
    wide = logits[one.start - 1 : end - 1]
    wide = wide if wide.dtype == torch.float64 else wide.float()
    wanted = one.tokens[one.start :].to(logits.device)
    return wide.log_softmax(-1).gather(-1, wanted[:, None])[:, 0].double().cpu()
