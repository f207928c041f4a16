"""The audio language model: a Qwen2-Audio made or loaded, frozen, with LoRA adapters; its loss and its accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn
from transformers import (
    Qwen2AudioConfig,
    Qwen2AudioEncoderConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2Config,
)

from floatline.errors import TargetError
from floatline.precision.dtypes import DTYPES
from floatline.systems.audio_lora.batches import IGNORED
from floatline.systems.audio_lora.config import Config
from floatline.systems.audio_lora.tokens import Tokens, read_tokens, spell

BASE_WEIGHTS = Path(__file__).with_name("base.safetensors")


class Answerer(nn.Module):
    """The model as a workload calls it: tensors in a row in, logits out.

    Args:
        network: A Qwen2-Audio, with adapters or without.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, input_features: Tensor, feature_attention_mask: Tensor
    ) -> Tensor:
        """Logits, [batch, length, tokens]."""
        return self.network(
            input_ids=input_ids,
            attention_mask=attention_mask,
            input_features=input_features,
            feature_attention_mask=feature_attention_mask,
            use_cache=False,
        ).logits


def answer_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the answer's tokens, in FP32; the logits of all others are not widened."""
    wanted = labels[:, 1:]
    answered = wanted != IGNORED
    return F.cross_entropy(logits[:, :-1][answered].float(), wanted[answered])


def build_base(config: Config) -> tuple[Any, Tokens]:
    """The base, frozen and in its format, and its tokens: from `base_path`, the shipped weights, or random."""
    if config.base_path is not None:
        model: Any = _load(config.base_path, DTYPES[config.base_weights])
        tokens = read_tokens(config.base_path, model.config, question=config.question)
    else:
        with torch.random.fork_rng():
            torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
            model = make_model(config if config.base == "random" else Config())
        if config.base == "shipped":
            model.load_state_dict({name: tensor.float() for name, tensor in load_file(BASE_WEIGHTS).items()})
        tokens = spell()
    for weight in model.parameters():  # not the buffers: rotary frequencies need FP32, and transformers keeps them so
        weight.data = weight.data.to(DTYPES[config.base_weights])
    return model.requires_grad_(False), tokens


def add_adapters(base: Any, config: Config) -> nn.Module:
    """The base with LoRA adapters in every linear layer, and gradient checkpointing.

    Args:
        base: Changed in place.
        config: Their rank and format. PEFT makes them in the format of the base, and then by itself in FP32, unless it
            is told not to.
    """
    lora = LoraConfig(r=config.rank, lora_alpha=2 * config.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora, autocast_adapter_dtype=config.adapters == "fp32")
    if config.checkpointing:
        cast("Any", model).gradient_checkpointing_enable({"use_reentrant": False})
    return cast("nn.Module", model)


def make_model(config: Config) -> Qwen2AudioForConditionalGeneration:
    """A model of these sizes, with random weights; torch's random numbers decide."""
    audio = Qwen2AudioEncoderConfig(
        num_mel_bins=config.mel_bins,
        max_source_positions=config.audio_positions,
        d_model=config.audio_width,
        encoder_layers=config.audio_layers,
        encoder_attention_heads=config.audio_heads,
        encoder_ffn_dim=2 * config.audio_width,
    )
    tokens = spell()
    text = Qwen2Config(
        vocab_size=config.vocabulary,
        hidden_size=config.text_width,
        num_hidden_layers=config.text_layers,
        num_attention_heads=config.text_heads,
        num_key_value_heads=config.text_heads,
        intermediate_size=3 * config.text_width,
        max_position_embeddings=config.audio_positions + 64,
        pad_token_id=tokens.pad,
        bos_token_id=None,
        eos_token_id=tokens.end,
        use_cache=False,
    )
    model = Qwen2AudioForConditionalGeneration(
        Qwen2AudioConfig(audio_config=audio, text_config=text, audio_token_index=tokens.audio)
    )
    encoder: Any = model.get_submodule("model.audio_tower")
    with torch.no_grad():
        encoder.embed_positions.weight.copy_(_sinusoids(config.audio_positions, config.audio_width))
    return model


def _sinusoids(length: int, width: int) -> Tensor:
    """Positions as Whisper has them."""
    rates = torch.exp(torch.arange(width // 2) * (-torch.log(torch.tensor(10_000.0)) / (width // 2 - 1)))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def _load(folder: str, dtype: torch.dtype) -> Any:
    """A model from a local folder; safetensors only, since a pickle can run anything.

    Each weight is brought to its format as it is read: there is never a second copy of the model.
    """
    if not list(Path(folder).glob("*.safetensors")):
        raise TargetError(f"base_path '{folder}' has no .safetensors file. Save the model there with safetensors.")
    try:
        return Qwen2AudioForConditionalGeneration.from_pretrained(
            folder, use_safetensors=True, local_files_only=True, dtype=dtype
        )
    except (OSError, ValueError) as error:
        said = next(iter(str(error).splitlines()), "")
        raise TargetError(f"base_path '{folder}' cannot be loaded: {said} Give a Qwen2-Audio model.") from None


@torch.no_grad()
def accuracy(model: nn.Module, batches: Sequence[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]) -> float:
    """Share of the words that greedy decoding writes exactly, to the end.

    Numerics:
        One pass over question and true answer tells it: greedy decoding writes the answer if and only if every one of
        its tokens is the likeliest after those before it. Checked by tests/systems/test_audio_lora.py.

    Args:
        model: Gives logits.
        batches: Inputs of the model, and labels.
    """
    device = next(model.parameters()).device
    right = total = 0
    for inputs, (labels,) in batches:
        logits = model(*(tensor.to(device) for tensor in inputs))
        exact = is_exact(logits.argmax(-1), labels.to(device))
        right, total = right + int(exact.sum()), total + len(exact)
    return right / total


def is_exact(likeliest: Tensor, labels: Tensor) -> Tensor:
    """Which answers are right in all their tokens; the likeliest after each token, and labels."""
    wanted = labels[:, 1:]
    return ((likeliest[:, :-1] == wanted) | (wanted == IGNORED)).all(1)
