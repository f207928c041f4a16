"""Settings of the fine-tuning, and those that have a name."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from floatline.workload import WorkloadConfig

Format = Literal["fp32", "fp16", "bf16"]


class Config(WorkloadConfig):
    """Settings of the fine-tuning.

    Args:
        precision: Plan that it is trained in.
        adapters: Format that PEFT leaves the adapters in: 'fp32', or 'base', that of the base.
        optimizer: 'adamw' as torch has it; 'adamw-fused', the Trainer's default in transformers 5; 'exact',
            floatline's, with an exact FP32 master of 16-bit weights.
        learning_rate: Of the adapters.
        weight_decay: Of the adapters.
        clip_norm: Largest gradient norm; null leaves the plan's.
        rank: Of the adapters; they are scaled by 2 in any rank.
        checkpointing: Gradient checkpointing in encoder and language model.
        batch_size: Utterances of a batch.
        accumulate: Batches for each update.
        num_batches: Batches of a pass; with `audio` it is all of the recordings.
        takes: Times that each voice speaks each word for training.
        audio: Folder or JSONL file of recordings with their texts; null speaks words.
        holdout: Share of the recordings that is held out, where nothing says which.
        cut_audio: Cut off recordings that are longer than the encoder takes; else they are refused.
        question: What a loaded base is asked after the audio.
        noise_db: How many decibels the noise of training is below the speech.
        data_seed: Of rates and pitches; noise and order are the run's seed.
        base: 'shipped', a small one that has learnt other words; 'random', one of the sizes below that knows
            nothing, to measure time and memory.
        base_path: Folder of a Qwen2-Audio model with safetensors, in one file or several, and tokenizer.json; null
            takes `base`.
        base_weights: Format that the frozen base is held in.
        mel_bins: Of a random base.
        audio_positions: Positions of a random base's encoder, 20 ms each; shorter audio is padded.
        audio_seconds: Length that audio is repeated to, to measure time and memory; null leaves it.
        audio_width: Width of a random base's encoder.
        audio_layers: Its layers.
        audio_heads: Its attention heads.
        text_width: Width of a random base's language model.
        text_layers: Its layers.
        text_heads: Its attention heads.
        vocabulary: Its tokens.
    """

    precision: str = "fp16-mixed"
    adapters: Literal["fp32", "base"] = "fp32"
    optimizer: Literal["adamw", "adamw-fused", "exact"] = "adamw"
    learning_rate: float = Field(default=3e-3, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float | None = Field(default=1.0, gt=0)
    rank: int = Field(default=8, ge=1)
    checkpointing: bool = True
    batch_size: int = Field(default=16, ge=1)
    accumulate: int = Field(default=1, ge=1)
    num_batches: int = Field(default=54, ge=1)
    takes: int = Field(default=1, ge=1)
    audio: str | None = None
    holdout: float = Field(default=0.1, gt=0, lt=1)
    cut_audio: bool = False
    question: str = "Which word is spoken? "
    noise_db: float = 25.0
    data_seed: int = 0
    base: Literal["shipped", "random"] = "shipped"
    base_path: str | None = None
    base_weights: Format = "fp16"
    mel_bins: int = Field(default=40, ge=8)
    audio_positions: int = Field(default=32, ge=8)
    audio_seconds: float | None = Field(default=None, gt=0)
    audio_width: int = Field(default=64, ge=4)
    audio_layers: int = Field(default=1, ge=1)
    audio_heads: int = Field(default=4, ge=1)
    text_width: int = Field(default=64, ge=4)
    text_layers: int = Field(default=1, ge=1)
    text_heads: int = Field(default=4, ge=1)
    vocabulary: int = Field(default=32, ge=32)


VARIANTS: dict[str, dict[str, object]] = {
    "broken": {"adapters": "base"},
    # The team's remedy: everything in FP16, no loss scale. The optimizer is the Trainer's.
    "no_scaler": {"adapters": "base", "precision": "fp16-true", "optimizer": "adamw-fused"},
    "no_scaler_unfused": {"adapters": "base", "precision": "fp16-true"},
    "bf16": {"precision": "bf16-mixed", "base_weights": "bf16"},
    "fp32_adapters": {},
    "native_fp16": {"adapters": "base", "precision": "fp16-true", "optimizer": "exact"},
    "paper_r64": {"rank": 64, "batch_size": 8, "accumulate": 8, "learning_rate": 2e-3},
    # A base that knows nothing costs the same: this size is for time and memory.
    "h200": {
        "base": "random",
        "rank": 64,
        "learning_rate": 1e-4,
        "batch_size": 128,
        "num_batches": 2,
        "takes": 1,
        "mel_bins": 128,
        "audio_positions": 1500,
        "audio_seconds": 30.0,
        "audio_width": 1024,
        "audio_layers": 16,
        "audio_heads": 16,
        "text_width": 2048,
        "text_layers": 16,
        "text_heads": 16,
        "vocabulary": 32_000,
    },
}
