"""Two tokenizers made comparable: positions by the text that was read, tokens by the bytes they stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # SentencePiece's mark


def align_positions(own: Sequence[tuple[int, int]], theirs: Sequence[tuple[int, int]]) -> list[int]:
    """For each token the position in the other row that has read exactly the same text; -1 where there is none.

    A model at a position has read up to the end of that token, so two positions can be compared where two tokens end
    at the same character. A token that ends inside a character (byte-level ones do) has no such end.

    Args:
        own: Begin and end of each token, in characters.
        theirs: The same for the other tokenizer.
    """
    place = {end: i for i, end in enumerate(_clean_ends(theirs)) if end >= 0}
    return [place.get(end, -1) if end >= 0 else -1 for end in _clean_ends(own)]


def _clean_ends(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Where each token ends; -1 for an empty one, and where the next begins before that end."""
    begins = [begin for begin, _ in spans[1:]]
    nexts = [*begins, spans[-1][1] if spans else 0]
    return [end if begin < end <= after else -1 for (begin, end), after in zip(spans, nexts, strict=True)]


@dataclass(frozen=True)
class SharedVocabulary:
    """Tokens that stand for the same bytes in both vocabularies, and one outcome for all others.

    Args:
        own: Ids of the shared tokens in the first vocabulary, in the order of the outcomes.
        theirs: Their ids in the second.
        own_size: Tokens of the first.
        theirs_size: Tokens of the second.
    """

    own: tuple[int, ...]
    theirs: tuple[int, ...]
    own_size: int
    theirs_size: int

    def outcome_of(self) -> Tensor:
        """For each token of the first vocabulary its outcome; the last outcome is 'another token'."""
        outcomes = torch.full((self.own_size,), len(self.own))
        outcomes[list(self.own)] = torch.arange(len(self.own))
        return outcomes

    def orders(self) -> tuple[Tensor, Tensor]:
        """All ids of the first and of the second vocabulary, the shared ones first."""
        pairs = ((self.own, self.own_size), (self.theirs, self.theirs_size))
        first, second = (torch.tensor([*ids, *sorted(set(range(size)) - set(ids))]) for ids, size in pairs)
        return first, second


def share_vocabulary(own: Tokenizer, theirs: Tokenizer, *, own_size: int, theirs_size: int) -> SharedVocabulary:
    """Match the tokens of two vocabularies by their bytes.

    Args:
        own: The first tokenizer.
        theirs: The second.
        own_size: Outputs of the first model; a model may have more than its tokenizer has tokens.
        theirs_size: Outputs of the second.
    """
    by_bytes = _ids_by_bytes(theirs)
    pairs = [(i, by_bytes[raw]) for raw, i in sorted(_ids_by_bytes(own).items(), key=lambda item: item[1])
             if raw in by_bytes]  # fmt: skip
    pairs = [(i, j) for i, j in pairs if i < own_size and j < theirs_size]
    return SharedVocabulary(tuple(i for i, _ in pairs), tuple(j for _, j in pairs), own_size, theirs_size)


def coarsen(logits: Tensor, order: Tensor, num_shared: int) -> Tensor:
    """Log-probabilities of the shared tokens, and of 'another token' as the last.

    Numerics:
        Computed in FP32. No mass is dropped or spread: what lies on other tokens is their exact sum, so the result sums
        to 1. The divergence of two coarsened distributions is at most that of the whole ones. Where every token is
        shared, the last log-probability is the smallest FP32 number instead of -inf, whose product with 0 is NaN.

    Args:
        logits: [..., tokens].
        order: Ids of all tokens, the shared ones first.
        num_shared: How many these are.
    """
    log_probs = logits.index_select(-1, order).float().log_softmax(-1)
    if num_shared == len(order):
        rest = torch.full_like(log_probs[..., :1], torch.finfo(torch.float32).min)
    else:
        rest = log_probs[..., num_shared:].logsumexp(-1, keepdim=True)
    return torch.cat([log_probs[..., :num_shared], rest], -1)


def _ids_by_bytes(tokenizer: Tokenizer) -> dict[bytes, int]:
    """The lowest id of each byte string; tokens that stand for no text (special ones) are left out."""
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    reads_bytes = _is_byte_level(tokenizer)
    found: dict[bytes, int] = {}
    for token, i in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if i not in special and token:
            found.setdefault(token_bytes(token, byte_level=reads_bytes), i)
    return found


def token_bytes(token: str, *, byte_level: bool) -> bytes:
    """The bytes that a token stands for.

    Args:
        token: As it is in the vocabulary.
        byte_level: Whether each letter stands for a byte, as in GPT-2; else spaces are marked, as in SentencePiece.
    """
    if byte_level:
        letters = _byte_letters()
        # A token that was added by hand is plain text.
        return bytes(letters[x] for x in token) if all(x in letters for x in token) else token.encode()
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()


@cache
def _byte_letters() -> dict[str, int]:
    """GPT-2's letter for each byte: itself where it prints, else the next free one from 256 on."""
    prints = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in prints}
    hidden = [byte for byte in range(256) if byte not in set(prints)]
    return letters | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether its decoder, alone or in a sequence, is ByteLevel."""
    decoder: dict[str, Any] = json.loads(tokenizer.to_str())["decoder"] or {}
    parts: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    return any(part.get("type") == "ByteLevel" for part in parts)
