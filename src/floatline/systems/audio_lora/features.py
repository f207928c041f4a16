"""Log-mel features as Whisper's feature extractor makes them, of audio of any length."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers.audio_utils import mel_filter_bank  # pyright: ignore[reportUnknownVariableType]

from floatline.systems.audio_lora.speech import SAMPLE_RATE

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
