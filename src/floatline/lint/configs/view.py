"""Setting, Document and Config: what a configuration says and where, whatever it is written in."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Key = str | int
Path = tuple[Key, ...]
# Whose settings they are. 'checkpoint' is a from_pretrained call whose model is trained; 'adapter' a call of PEFT.
Kind = Literal[
    "lightning",
    "fabric",
    "transformers",
    "accelerate",
    "deepspeed",
    "apex",
    "scaler",
    "autocast",
    "optimizer",
    "checkpoint",
    "adapter",
]
# 'mixed': FP32 weights, 16-bit compute (DeepSpeed's FP32 master weights count). 'true': the weights have 16 bits too.
Mode = Literal["fp16-mixed", "bf16-mixed", "fp16-true", "bf16-true", "fp32", ""]

_NUMBER = re.compile(r"[-+]?(\d{1,40}(\.\d{0,40})?|\.\d{1,40})([eE][-+]?\d{1,4})?")
_PRECISIONS: dict[str, Mode] = {
    "16": "fp16-mixed",
    "16-mixed": "fp16-mixed",
    "bf16": "bf16-mixed",
    "bf16-mixed": "bf16-mixed",
    "16-true": "fp16-true",
    "bf16-true": "bf16-true",
    "32": "fp32",
    "32-true": "fp32",
    "64": "fp32",
    "64-true": "fp32",
}
_MIXED: dict[str, Mode] = {"fp16": "fp16-mixed", "bf16": "bf16-mixed", "no": "fp32"}
_DTYPES = {
    **dict.fromkeys(("float16", "half", "fp16"), "fp16"),
    **dict.fromkeys(("bfloat16", "bf16"), "bf16"),
    **dict.fromkeys(("float32", "float", "fp32"), "fp32"),
}


class _Word:
    """A value that is not a plain one."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


UNKNOWN = _Word("unknown")  # an expression, an interpolation, a tag
NESTED = _Word("nested")  # settings of its own are below it


@dataclass(frozen=True)
class Setting:
    """One value, and where it stands.

    Args:
        path: Its keys from the top of the document.
        value: A string, number, boolean, None, UNKNOWN or NESTED.
        line: Of its key, counted from 1.
        column: Of its key, counted from 1.
        end_line: Where its value ends.
        end_column: Behind its last character.
    """

    path: Path
    value: object
    line: int
    column: int
    end_line: int = 0
    end_column: int = 0

    @property
    def key(self) -> str:
        """Its own name."""
        return str(self.path[-1])

    @property
    def is_on(self) -> bool:
        """Whether it is true, and nothing that only may be."""
        return self.value is True

    @property
    def is_empty(self) -> bool:
        """Whether it is null, off, or zero."""
        return self.value in (None, False, "") or self.number == 0

    @property
    def number(self) -> float | None:
        """Its number; YAML 1.1 reads 1e-8 as a string, but those who use it do not."""
        value = self.value
        if isinstance(value, bool):
            return None
        if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
            value = float(value)
        if not isinstance(value, (int, float)):
            return None
        try:
            number = float(value)
        except OverflowError:
            return math.inf
        return None if math.isnan(number) else number

    def __str__(self) -> str:
        """As it is written, more or less."""
        if self.value is None:
            return f"{self.key}: null"
        return f"{self.key}: {str(self.value).lower() if isinstance(self.value, bool) else self.value}"


def read_dtype(setting: Setting | None) -> str:
    """'fp16', 'bf16', 'fp32', or '' where the value names none of them."""
    if setting is None or not isinstance(setting.value, str):
        return ""
    return _DTYPES.get(setting.value.removeprefix("torch."), "")


@dataclass
class SettingsDocument:
    """One file, or one document of a YAML stream.

    Args:
        file: Its name.
        text: The whole file; rules look for words in it that say "this does not apply".
        settings: Every setting by its path. In Python, the first key is the call and its line.
        is_python: Whether the settings are arguments of calls.
        configs: Those of its parts that are known.
        is_open: Whether other files add to it (Hydra's defaults, an include): what is absent may be there.
        beside: The text of other files that load what it trains.
    """

    file: str
    text: str
    settings: Mapping[Path, Setting] = field(default_factory=dict[Path, Setting])
    is_python: bool = False
    configs: tuple[RunConfig, ...] = ()
    is_open: bool = False
    beside: str = ""

    def mentions(self, *words: str) -> bool:
        """Whether one of these (lower-case) words is anywhere in the file or beside it, comments too."""
        return any(word in self._lower for word in words)

    @cached_property
    def _lower(self) -> str:
        return (self.text + self.beside).lower()

    def find(self, *keys: str) -> Iterator[Setting]:
        """Every setting whose last key is one of these, wherever it is."""
        return (setting for path, setting in self.settings.items() if path and path[-1] in keys)

    def of_kind(self, *kinds: Kind) -> Iterator[RunConfig]:
        """The known parts of these kinds."""
        return (config for config in self.configs if config.kind in kinds)


@dataclass
class RunConfig:
    """The settings of one tool.

    Args:
        kind: Whose.
        root: The path of the part.
        document: Where it is.
        place: Where findings about what is absent are told.
        name: The class that is called or named, such as 'TrainingArguments' or 'torch.optim.Adam'; '' where none is.
        is_open: Whether more settings may come from elsewhere (`**options`).
    """

    kind: Kind
    root: Path
    document: SettingsDocument
    place: Setting
    name: str = ""
    is_open: bool = False

    def get(self, *keys: str) -> Setting | None:
        """A setting by its keys from the root; None where it is absent."""
        return self.document.settings.get((*self.root, *keys))

    def first(self, *keys: str) -> Setting | None:
        """The first of these settings that is there."""
        return next((found for key in keys if (found := self.get(key)) is not None), None)

    def is_on(self, *keys: str) -> bool:
        """Whether a setting is there and true."""
        found = self.get(*keys)
        return found is not None and found.is_on

    @property
    def mode(self) -> Mode:
        """What weights and compute are; '' where the configuration does not say."""
        return self.precision[0]

    @cached_property
    def precision(self) -> tuple[Mode, Setting | None]:
        """The mode, and the setting that says so."""
        if self.kind in ("lightning", "fabric"):
            return _read_word(self.get("precision"), _PRECISIONS)
        if self.kind == "accelerate":
            return _read_word(self.get("mixed_precision"), _MIXED)
        if self.kind == "autocast":
            dtype = self.get("dtype")
            modes: dict[str, Mode] = {"fp16": "fp16-mixed", "bf16": "bf16-mixed"}
            return modes.get(read_dtype(dtype), ""), dtype
        if self.kind in ("transformers", "deepspeed"):
            tail = ("enabled",) if self.kind == "deepspeed" else ()
            if self.is_on("fp16", *tail):
                return "fp16-mixed", self.get("fp16", *tail)
            bf16 = ("bf16", *tail) if self.get("bf16", *tail) else ("bfloat16", *tail)
            if self.is_on(*bf16):
                return "bf16-mixed", self.get(*bf16)
            return "", None
        return "", None


def _read_word(setting: Setting | None, words: dict[str, Mode]) -> tuple[Mode, Setting | None]:
    if setting is None or isinstance(setting.value, bool) or not isinstance(setting.value, (int, str)):
        return "", setting
    return words.get(str(setting.value), ""), setting
