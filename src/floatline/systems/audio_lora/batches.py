"""Utterances as a Qwen2-Audio model reads them: log-mel features, examples, and the collator that pads and masks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.audio_utils import mel_filter_bank  # pyright: ignore[reportUnknownVariableType]

from floatline.systems.audio_lora.speech import SAMPLE_RATE, Utterance, resample, speak
from floatline.systems.audio_lora.tokens import Tokens
from floatline.workload import OnDemand

IGNORED = -100
"""Label of what is no part of an answer."""


@lru_cache(maxsize=8)
def make_examples(
    utterances: tuple[Utterance, ...], *, bins: int, seed: int | None, noise_db: float, seconds: float | None = None
) -> tuple[dict[str, Any], ...]:
    """Log-mel features and word of each utterance; the same again is not computed again.

    Args:
        utterances: What is spoken.
        bins: Mel bins.
        seed: Of noise, silence before the word, and a speed that moves its formants too; None leaves it as it is.
        noise_db: Decibels of the noise below the speech.
        seconds: Length that the audio is repeated to; None leaves it.
    """
    generator = torch.Generator().manual_seed(seed or 0)
    examples: list[dict[str, Any]] = []
    for utterance, samples in zip(utterances, speak(utterances), strict=True):
        if seconds is not None:
            wanted = round(seconds * SAMPLE_RATE)
            samples = samples.repeat(-(-wanted // len(samples)))[:wanted]
        if seed is not None:
            speed = 0.85 + 0.3 * float(torch.rand((), generator=generator))
            silence = int(torch.randint(0, 5 * HOP, (), generator=generator))
            samples = torch.nn.functional.pad(resample(samples, SAMPLE_RATE * speed), (silence, HOP))
            samples = add_noise(samples, noise_db, generator)
        examples.append({"features": log_mel(samples, bins=bins), "word": utterance.word})
    return tuple(examples)


@dataclass(frozen=True)
class AudioCollator:
    """Pads examples to a batch with its masks and labels, as `Qwen2AudioForConditionalGeneration` takes it.

    Args:
        tokens: The tokens around an answer, and those of it.
        positions: Positions of the encoder: it takes twice as many frames, always.
    """

    tokens: Tokens
    positions: int

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """One batch."""
        frames = 2 * self.positions
        features, lengths = list[Tensor](), list[int]()
        for example in examples:
            own: Tensor = example["features"][:, :frames]
            lengths.append(own.shape[1])
            features.append(torch.nn.functional.pad(own, (0, frames - own.shape[1]), value=float(own.min())))
        rows = [self._write(e["word"], length) for e, length in zip(examples, lengths, strict=True)]
        ids = pad_sequence([ids for ids, _ in rows], batch_first=True, padding_value=self.tokens.pad)
        labels = pad_sequence([labels for _, labels in rows], batch_first=True, padding_value=IGNORED)
        sizes = torch.tensor([len(ids) for ids, _ in rows])
        return {
            "input_ids": ids,
            "attention_mask": (torch.arange(ids.shape[1]) < sizes[:, None]).long(),
            "input_features": torch.stack(features),
            "feature_attention_mask": (torch.arange(frames) < torch.tensor(lengths)[:, None]).long(),
            "labels": labels,
        }

    def _write(self, word: str, frames: int) -> tuple[Tensor, Tensor]:
        tokens = self.tokens
        asked = [*tokens.before, *[tokens.audio] * num_audio_tokens(frames), *tokens.after]
        answer = [*tokens.encode(word), tokens.end]
        return torch.tensor(asked + answer), torch.tensor([IGNORED] * len(asked) + answer)


def num_audio_tokens(frames: int) -> int:
    """What the encoder makes of so many frames: a convolution and a pooling, each with stride 2."""
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


def draw_batches(
    examples: Sequence[dict[str, Any]], collate: AudioCollator, *, size: int, count: int, seed: int
) -> Sequence[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Batches in an order of the seed: pass after pass over the examples, each shuffled again.

    Those of files are made when they are asked for: a data set may not fit in memory.
    """
    chance, order = random.Random(f"order {seed}"), list[int]()  # noqa: S311
    while len(order) < size * count:
        order += chance.sample(range(len(examples)), len(examples))
    batches = OnDemand(
        lambda first: as_pair(collate([examples[i] for i in order[first : first + size]])),
        range(0, size * count, size),
    )
    return batches if isinstance(examples, OnDemand) else list(batches)


def as_pair(batch: dict[str, Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What goes into the model, and the labels."""
    names = ("input_ids", "attention_mask", "input_features", "feature_attention_mask")
    return tuple(batch[name] for name in names), (batch["labels"],)


WINDOW, HOP = 400, 160
"""Samples of a frame, and from one to the next: 25 and 10 ms."""


def add_noise(samples: Tensor, decibels: float, generator: torch.Generator) -> Tensor:
    """White noise, so many decibels below the mean power of the samples."""
    power = samples.square().mean() * 10 ** (-decibels / 10)
    return samples + torch.randn(len(samples), generator=generator) * power.sqrt()


def log_mel(samples: Tensor, *, bins: int) -> Tensor:
    """Log-mel features, [bins, frames]: one frame for each 10 ms.

    Numerics:
        FP32. The logarithm of the power, no less than 1e-10 and no less than 80 decibels below the largest, scaled to
        about -1 to 1. The same as `transformers.WhisperFeatureExtractor`, to 1e-4. Checked by
        tests/systems/test_audio_lora.py.
    """
    spectrum = torch.stft(samples, WINDOW, HOP, window=torch.hann_window(WINDOW), return_complex=True)
    power = spectrum[:, :-1].abs().square()
    levels = (_filters(bins) @ power).clamp(min=1e-10).log10()
    return (torch.maximum(levels, levels.max() - 8.0) + 4.0) / 4.0


@lru_cache(maxsize=2)
def _filters(bins: int) -> Tensor:
    bank: Any = mel_filter_bank(
        num_frequency_bins=WINDOW // 2 + 1,
        num_mel_filters=bins,
        min_frequency=0.0,
        max_frequency=SAMPLE_RATE / 2,
        sampling_rate=SAMPLE_RATE,
        norm="slaney",
        mel_scale="slaney",
    )
    return torch.from_numpy(bank.T.copy()).float()  # pyright: ignore[reportUnknownMemberType]
