"""What a question about a word looks like as tokens: the shipped base spells, a loaded one has its own tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from floatline.errors import TargetError

_PAD, _END, _AUDIO, _ASK, _FIRST = range(5)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Tokens:
    """The tokens around an answer, and those of it.

    Args:
        audio: Stands where the audio's features go, once for each.
        pad: Fills up what is shorter.
        end: Ends the answer.
        before: Before the audio.
        after: Between the audio and the answer.
        encode: The tokens of a word.
        decode: The text of tokens.
    """

    audio: int
    pad: int
    end: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


def spell() -> Tokens:
    """A letter for each token."""

    def encode(word: str) -> list[int]:
        strange = next((letter for letter in word if letter not in _LETTERS), None)
        if strange is not None:
            raise TargetError(f"Text '{word[:40]}' has '{strange}': the shipped base writes a to z. Give a base_path.")
        return [_FIRST + _LETTERS.index(letter) for letter in word]

    def decode(ids: list[int]) -> str:
        return "".join(_LETTERS[i - _FIRST] for i in ids if i >= _FIRST and i - _FIRST < len(_LETTERS))

    return Tokens(
        audio=_AUDIO, pad=_PAD, end=_END, before=(), after=(_ASK,),
        encode=encode, decode=decode,
    )  # fmt: skip


def read_tokens(folder: str, config: Any, *, question: str) -> Tokens:
    """Those of a model in a folder; one that the Trainer or `save_pretrained` wrote from the shipped base spells.

    Args:
        folder: Has tokenizer.json, unless the model has as few tokens as the shipped one.
        config: The model's.
        question: What it is asked after the audio.
    """
    text = config.text_config
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        if text.vocab_size <= 32 and config.audio_token_id == _AUDIO:
            return spell()
        raise TargetError(f"base_path '{folder}' has no tokenizer.json. Copy the model's there.")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no class of its own
        raise TargetError(f"base_path: '{file}' is no tokenizer: {error}. Save or download it again.") from None
    around = [tokenizer.token_to_id(name) for name in ("<|audio_bos|>", "<|audio_eos|>")]
    before, closing = ((i,) if i is not None else () for i in around)
    end = text.eos_token_id if text.eos_token_id is not None else tokenizer.token_to_id("<|endoftext|>")
    if end is None:
        raise TargetError(f"base_path '{folder}' names no token that ends a text. Set eos_token_id in config.json.")
    pad = config.pad_token_id if getattr(config, "pad_token_id", None) is not None else end
    asked = tokenizer.encode(question, add_special_tokens=False).ids
    return Tokens(
        audio=config.audio_token_id, pad=pad, end=end, before=before, after=(*closing, *asked),
        encode=lambda word: tokenizer.encode(word, add_special_tokens=False).ids, decode=tokenizer.decode,
    )  # fmt: skip
