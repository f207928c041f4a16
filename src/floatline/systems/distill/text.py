"""The text, its two tokenizers, and batches of windows that both see.

The text is chapters 1 to 16 of Jane Austen's "Pride and Prejudice" (1813), which is in the public domain. It was taken
from the CRAN package janeaustenr 1.0.0, whose source is Project Gutenberg; lines were joined to paragraphs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from floatline.errors import TargetError
from floatline.systems.distill.alignment import align_positions

_FOLDER = Path(__file__).parent
_TEXT = _FOLDER / "pride_and_prejudice.txt"
TEACHER_WEIGHTS = _FOLDER / "teacher.safetensors"
TOKENIZERS = {name: _FOLDER / f"{name}_tokenizer.json" for name in ("teacher", "student")}
_HELD_OUT = "Chapter 16\n"  # to the end


class Windows(NamedTuple):
    """Windows of text as both tokenizers see them.

    Args:
        ids: Student's tokens, [windows, length + 1].
        teacher_ids: Teacher's tokens of the same text, padded at the end, which a causal model never sees.
        positions: For each student position the teacher's that has read the same text; 0 where there is none.
        aligned: Where there is one.
    """

    ids: Tensor
    teacher_ids: Tensor
    positions: Tensor
    aligned: Tensor


@cache
def read_text(path: str | None = None) -> str:
    """The shipped text, or a file's."""
    try:
        return Path(path or _TEXT).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TargetError(f"Text '{path}' cannot be read: {error}. Give a text file in UTF-8.") from None


def split_text(text: str) -> tuple[str, str]:
    """The part to train on, and the last part, which is held out: chapter 16, or the last eighth of another text."""
    place = text.find(_HELD_OUT)
    place = place if place > 0 else len(text) * 7 // 8
    return text[:place], text[place:]


@cache
def load_tokenizer(folder: str | None, name: str) -> Tokenizer:
    """The tokenizer of a model's folder, or the shipped one of that name: 'teacher' or 'student'."""
    path = TOKENIZERS[name] if folder is None else Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise TargetError(f"{name}_path '{folder}' has no tokenizer.json. Save the tokenizer beside the model.")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises no class of its own
        raise TargetError(f"{name}_path: '{path}' is no tokenizer: {error}. Save or download it again.") from None


def cut_windows(text: str, starts: list[int], *, length: int, student: Tokenizer, teacher: Tokenizer) -> Windows:
    """Windows of `length` + 1 student tokens from places in the text.

    Args:
        text: Where they are cut from.
        starts: Places, in characters, at least `reach(length)` before the end.
        length: Tokens that are predicted in each.
        student: Its tokenizer.
        teacher: Its tokenizer; it reads the same characters.
    """
    rows: list[tuple[list[int], list[int], list[int]]] = []
    for start in starts:
        own = student.encode(text[start : start + _characters(length)], add_special_tokens=False)
        if len(own.ids) <= length:
            raise TargetError(f"The text is too short for windows of {length} tokens. Give a smaller length.")
        ids, spans = own.ids[: length + 1], own.offsets[: length + 1]
        theirs = teacher.encode(text[start : start + spans[-1][1]], add_special_tokens=False)
        rows.append((ids, theirs.ids, align_positions(spans[:-1], theirs.offsets)))
    longest = _round_up(max(len(theirs) for _, theirs, _ in rows))
    positions = torch.tensor([row[2] for row in rows])
    return Windows(
        torch.tensor([row[0] for row in rows]),
        torch.tensor([theirs + [0] * (longest - len(theirs)) for _, theirs, _ in rows]),
        positions.clamp(min=0),
        positions >= 0,
    )


def find_starts(text: str, *, length: int) -> list[int]:
    """Where a window may begin: at words, far enough from the end."""
    last = len(text) - _characters(length)
    return [0, *(i for i, letter in enumerate(text[:last]) if letter in " \n")] if last > 0 else []


def tile_tokens(text: str, *, length: int, student: Tokenizer) -> Tensor:
    """The whole text in student tokens, in rows of `length` + 1 that overlap by one token; the rest is left out."""
    ids = torch.tensor(student.encode(text, add_special_tokens=False).ids)
    if len(ids) <= length:
        raise TargetError(f"The held-out text has {len(ids)} tokens. Give a length below that.")
    return ids.unfold(0, length + 1, length).contiguous()


def _characters(length: int) -> int:
    return 8 * (length + 1)  # more than any window of English takes


def _round_up(tokens: int) -> int:
    return -(-tokens // 8) * 8
