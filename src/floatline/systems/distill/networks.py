"""Teacher and student: transformers models, made from a config or loaded from a folder; and a teacher's exits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from floatline.errors import TargetError
from floatline.precision.dtypes import DTYPES
from floatline.systems.distill.config import Config
from floatline.systems.distill.text import TEACHER_WEIGHTS

_NORMS = ("transformer.ln_f", "model.norm", "gpt_neox.final_layer_norm", "model.decoder.final_layer_norm")


def build_student(config: Config, *, vocabulary: int) -> nn.Module:
    """The model that is trained: from `student_path`, or made here."""
    if config.student_path is not None:
        return _load(config.student_path, "student", vocabulary)
    sizes = (config.student_width, config.student_layers, config.student_heads)
    return _make(
        config.student_family, sizes, positions=config.length, vocabulary=vocabulary, dropout=config.dropout, tied=False
    )


def build_teacher(config: Config, *, vocabulary: int) -> nn.Module:
    """The model that is learnt from, frozen: from `teacher_path`, the shipped weights, or (to measure speed) random."""
    if config.teacher_path is not None:
        model: nn.Module = _load(config.teacher_path, "teacher", vocabulary)
    else:
        shipped = config.teacher == "shipped"
        sizes = (96, 3, 4) if shipped else (config.teacher_width, config.teacher_layers, config.teacher_heads)
        # A teacher may cut the same text into more tokens than the student does.
        positions = 96 if shipped else 2 * config.length
        model = _make("gpt2", sizes, positions=positions, vocabulary=vocabulary, dropout=config.dropout)
        if shipped:
            weights = {name: tensor.float() for name, tensor in load_file(TEACHER_WEIGHTS).items()}
            model.load_state_dict(weights, strict=False)  # the head is the embedding, stored once
    return model.to(DTYPES[config.teacher_weights])


def _make(
    family: str, sizes: tuple[int, int, int], *, positions: int, vocabulary: int, dropout: float, tied: bool = True
) -> nn.Module:
    width, layers, heads = sizes
    if family == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
                intermediate_size=8 * width // 3, max_position_embeddings=positions, attention_dropout=dropout,
                bos_token_id=None, eos_token_id=None, use_cache=False,
            )
        )  # fmt: skip
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary, n_embd=width, n_layer=layers, n_head=heads, n_positions=positions,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
            activation_function="gelu_pytorch_tanh",  # GPT-2's own function as one operation, which keeps less
            bos_token_id=None, eos_token_id=None, use_cache=False, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def _load(folder: str, name: str, vocabulary: int) -> nn.Module:
    """A model from a local folder; safetensors only, since a pickle can run anything."""
    if not list(Path(folder).glob("*.safetensors")):
        raise TargetError(f"{name}_path '{folder}' has no .safetensors file. Save the model there with safetensors.")
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, use_safetensors=True, local_files_only=True, dtype=torch.float32
        )
    except (OSError, ValueError) as error:
        said = next(iter(str(error).splitlines()), "")
        raise TargetError(f"{name}_path '{folder}' cannot be loaded: {said} Give a transformers model.") from None
    outputs = outputs_of(model)
    if outputs < vocabulary:
        raise TargetError(
            f"{name}_path '{folder}' has {outputs} outputs for the {vocabulary} tokens of its tokenizer. "
            "Give the tokenizer that the model was trained with."
        )
    model.config.use_cache = False
    return cast("nn.Module", model)


def width_of(model: nn.Module) -> int:
    """Width of the hidden states."""
    return int(_head(model).weight.shape[1])


def outputs_of(model: nn.Module) -> int:
    """How many tokens the model gives logits for."""
    return int(_head(model).weight.shape[0])


def num_layers(model: nn.Module) -> int:
    """How many layers there are to exit from."""
    return int(cast("Any", model).config.num_hidden_layers)


def num_positions(model: nn.Module) -> int:
    """The longest row of tokens that the model takes."""
    return int(cast("Any", model).config.max_position_embeddings)


def read_exits(
    model: nn.Module, ids: Tensor, *, exits: Sequence[int], positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Logits and normalized states after some of a model's layers, read by its own norm and head.

    Args:
        model: A causal language model of transformers.
        ids: Tokens, [batch, length].
        exits: Layers, counted from 1; the last one is the model's own output.
        positions: Where to read, [batch, places]; None reads everywhere.

    Returns:
        Logits [batch, places, exits, tokens] and states [batch, places, exits, width].
    """
    hidden: tuple[Tensor, ...] = cast("Any", model)(ids, output_hidden_states=True, logits_to_keep=1).hidden_states
    states: list[Tensor] = []
    for layer in exits:
        state = hidden[layer]
        if positions is not None:
            state = state.gather(1, positions[..., None].expand(-1, -1, state.shape[-1]))
        # transformers gives the last state after the norm, and the others before it.
        states.append(state if layer == len(hidden) - 1 else _final_norm(model)(state))
    stacked = torch.stack(states, 2)
    return _head(model)(stacked), stacked


def _head(model: nn.Module) -> nn.Linear:
    return cast("Any", model).get_output_embeddings()


def _final_norm(model: nn.Module) -> nn.Module:
    for name, module in model.named_modules():  # pyright: ignore[reportUnknownVariableType]
        if name in _NORMS:
            return module  # pyright: ignore[reportUnknownVariableType]
    raise TargetError(f"The last norm of {type(model).__name__} is not known. Use exits=[], the last layer alone.")
