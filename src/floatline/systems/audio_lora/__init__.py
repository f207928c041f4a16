"""audio_lora: an audio language model in FP16 learns spoken words by LoRA adapters."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from floatline import optim
from floatline.plans import Clip, KeptModule, Plan
from floatline.plans.presets import resolve_plan
from floatline.systems.audio_lora.batches import AudioCollator, as_pair, draw_batches, make_examples
from floatline.systems.audio_lora.config import VARIANTS, Config
from floatline.systems.audio_lora.model import Answerer, accuracy, add_adapters, answer_loss, build_base
from floatline.systems.audio_lora.recordings import load_examples
from floatline.systems.audio_lora.speech import HELD_OUT_VOICES, TRAIN_VOICES, WORDS, draw_utterances
from floatline.workload import OnDemand, Workload

__all__ = ["VARIANTS", "Config", "build"]

# Utterances that are evaluated together.
_EVALUATED = 48
# transformers leaves these buffers in FP32 when it loads a model in 16 bits; a cast of the whole model does not.
_POSITIONS = KeptModule(pattern="*rotary_emb", reason="16 bits round the frequencies of rotary positions.")


def build(config: Config, seed: int = 0) -> Workload:
    """The model with adapters, batches of spoken words, and accuracy on voices that are held out.

    Args:
        config: The settings.
        seed: Of the adapters' first weights, of the noise, and of the order of batches. Base and speech are the same
            for every seed.
    """
    base, tokens = build_base(config)
    collate = AudioCollator(tokens, positions=base.config.audio_config.max_source_positions)
    torch.manual_seed(seed)
    model = Answerer(add_adapters(base, config))
    train, held = make_data(config, collate, bins=base.config.audio_config.num_mel_bins, seed=seed)
    parts = OnDemand(lambda i: as_pair(collate(held[i : i + _EVALUATED])), range(0, len(held), _EVALUATED))
    held_batches = list(parts) if config.audio is None else parts
    count = config.num_batches if config.audio is None else max(len(train) // config.batch_size, 1)
    return Workload(
        model,
        draw_batches(train, collate, size=config.batch_size, count=count, seed=seed),
        answer_loss,
        make_plan(config),
        lambda model: make_optimizer(model, config),
        evaluate=lambda model: accuracy(model, held_batches),
        metric="accuracy",
        higher_is_better=True,
    )


def make_data(
    config: Config, collate: AudioCollator, *, bins: int, seed: int
) -> tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]]:
    """Examples to train on, with noise of the seed, and clean ones of other voices; or recordings as they are."""
    if config.audio is not None:
        return load_examples(
            config.audio,
            bins=bins,
            positions=collate.positions,
            tokens=collate.tokens,
            holdout=config.holdout,
            seed=config.data_seed,
            cut=config.cut_audio,
        )
    train = draw_utterances(WORDS, TRAIN_VOICES, takes=config.takes, seed=config.data_seed)
    used = config.batch_size * config.num_batches
    if used < len(train):
        train = tuple(random.Random(f"subset {config.data_seed}").sample(train, used))  # noqa: S311
    held = draw_utterances(WORDS, HELD_OUT_VOICES, takes=4, seed=f"held out {config.data_seed}")
    if config.audio_seconds is not None:  # to measure time and memory: long audio takes long to make
        held = held[: config.batch_size]
    return (
        make_examples(train, bins=bins, seed=seed, noise_db=config.noise_db, seconds=config.audio_seconds),
        make_examples(held, bins=bins, seed=None, noise_db=config.noise_db, seconds=config.audio_seconds),
    )


def make_plan(config: Config) -> Plan:
    """The plan of the settings, with their clipping and accumulation."""
    plan = resolve_plan(config.precision)
    changes: dict[str, Any] = {"accumulate": config.accumulate}
    if config.clip_norm is not None:
        changes["clip"] = Clip(max_norm=config.clip_norm)
    if not plan.mixed and plan.weights != "fp32":
        changes["fp32_modules"] = (*plan.fp32_modules, _POSITIONS)
    return plan.model_copy(update=changes)


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """The optimizer of the adapters."""
    trained = [param for param in model.parameters() if param.requires_grad]
    if config.optimizer == "exact":
        return optim.AdamW(trained, lr=config.learning_rate, weight_decay=config.weight_decay)
    return torch.optim.AdamW(
        trained,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        fused=config.optimizer == "adamw-fused" or None,
    )
