"""Spoken words: which, by whom, how fast and how high, from a seed; and the samples that eSpeak NG gives for them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import espeakng_loader
import torch
from torch import Tensor

from floatline.errors import TargetError
from floatline.systems.audio_lora import espeak

SAMPLE_RATE = 16_000

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COMMANDS = ("yes", "no", "up", "down", "left", "right", "stop", "go")
WORDS = DIGITS + COMMANDS
# What the shipped base has heard: other words, by the voices that training may use.
BASE_WORDS = (
    "able", "apple", "back", "bed", "big", "bird", "book", "box", "cat", "cold", "day", "dog", "door", "deep",
    "east", "end", "far", "fish", "food", "fox", "girl", "gold", "hand", "happy", "head", "home", "house", "jump",
    "key", "king", "lake", "last", "light", "line", "lost", "milk", "moon", "night", "north", "old", "open", "paper",
    "park", "rain", "red", "river", "road", "sheila", "silver", "slow", "snow", "south", "spoon", "street", "summer",
    "table", "tree", "under", "visual", "wait", "water", "west", "window", "winter", "work", "yellow", "young",
)  # fmt: skip
TRAIN_VOICES = (
    "m1", "m2", "m3", "m4", "m5", "m7", "f1", "f2", "f3", "f4", "Alex", "Andrea", "Andy", "Annie", "Denis", "Diogo",
    "Gene", "Hugo", "Lee", "Marco", "Mario", "Michael", "Mike", "Reed", "adam", "anika", "antonio", "aunty", "belinda",
    "benjamin", "caleb", "david", "edward", "gustave", "ian", "john", "linda", "max", "paul", "quincy", "rob", "victor",
)  # fmt: skip
HELD_OUT_VOICES = ("m6", "m8", "f5", "Alicia", "steph", "robert", "travis", "zac")


class Utterance(NamedTuple):
    """One word, as it is to be spoken.

    Args:
        word: The word.
        voice: A voice variant of eSpeak NG.
        rate: Words a minute.
        pitch: From 0 to 99.
    """

    word: str
    voice: str
    rate: int
    pitch: int


def draw_utterances(
    words: Sequence[str], voices: Sequence[str], *, takes: int, seed: int | str
) -> tuple[Utterance, ...]:
    """Every word by every voice, each `takes` times at a rate and a pitch of its own."""
    chance = random.Random(f"utterances {seed}")  # noqa: S311
    return tuple(
        Utterance(word, voice, rate=chance.randint(160, 230), pitch=chance.randint(30, 70))
        for word in words
        for voice in voices
        for _ in range(takes)
    )


@lru_cache(maxsize=4)
def speak(utterances: tuple[Utterance, ...]) -> tuple[Tensor, ...]:
    """The samples of each utterance at 16 kHz, between -1 and 1, without the silence before and after.

    Numerics:
        The same bits for the same list, whatever was spoken before. Checked by tests/systems/test_audio_lora.py.

    Raises:
        TargetError: eSpeak NG does not speak.
    """
    asked = {
        "library": espeakng_loader.get_library_path(),
        "data": espeakng_loader.get_data_path(),
        "utterances": [(u.word, f"en-us+{u.voice}", u.rate, u.pitch) for u in utterances],
    }
    ran = subprocess.run(
        [sys.executable, "-I", str(Path(espeak.__file__))],
        input=json.dumps(asked).encode(),
        capture_output=True,
        check=False,
    )
    if ran.returncode != 0:
        said = (ran.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        raise TargetError(f"No speech was made: {said}. Install espeakng-loader again.")
    line, _, samples = ran.stdout.partition(b"\n")
    header = json.loads(line)
    heard = torch.frombuffer(bytearray(samples), dtype=torch.int16).float() / 32768
    pieces = torch.split(heard, [size // 2 for size in header["bytes"]])
    return tuple(_trim(resample(piece, header["sample_rate"])) for piece in pieces)


def resample(samples: Tensor, rate: float) -> Tensor:
    """From a sample rate to 16 kHz: the same spectrum, cut off at 8 kHz, or with nothing above what there is."""
    wanted = round(len(samples) * SAMPLE_RATE / rate)
    spectrum: Tensor = torch.fft.rfft(samples)[: wanted // 2 + 1]  # pyright: ignore[reportUnknownVariableType]
    return torch.fft.irfft(spectrum, n=wanted) * (wanted / len(samples))  # pyright: ignore[reportUnknownVariableType]


def _trim(samples: Tensor) -> Tensor:
    loud = (samples.abs() > 0.01).nonzero()
    return samples[int(loud[0]) : int(loud[-1]) + 1].clone()
