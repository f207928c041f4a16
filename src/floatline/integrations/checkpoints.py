"""A model directory of transformers and a file of prompt tokens, as a forward pass. Needs transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from floatline.errors import TargetError

_HELP = "Write token ids: JSON (a list, or lists of one length), or a prompt of numbers a line."


def load_checkpoint(folder: str | Path, tokens: str | Path) -> tuple[Any, dict[str, Tensor]]:
    """A causal language model as its checkpoint has it, and the prompts that it reads.

    Weights are read from safetensors only, and no code of the folder is run. Nothing is downloaded.

    Args:
        folder: With config.json and safetensors.
        tokens: A file of token ids, see `read_tokens`.

    Raises:
        TargetError: The folder holds no such model, or the file no such tokens.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise TargetError(f"There is no config.json in '{folder}'. Give the folder of a transformers model.")
    ids = read_tokens(tokens)
    try:
        from transformers import AutoModelForCausalLM
    except ModuleNotFoundError:
        raise TargetError(
            f"Model '{folder}' needs transformers. Install it with: pip install 'floatline[hf]'."
        ) from None
    try:
        model: Any = cast(Any, AutoModelForCausalLM).from_pretrained(
            path, dtype="auto", local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except Exception as error:  # whatever a folder that is no model makes transformers raise
        words = next(iter(str(error).splitlines()), type(error).__name__)
        raise TargetError(f"Model '{folder}' cannot be loaded: {words[:300]}") from None
    size = int(model.get_input_embeddings().num_embeddings)
    if int(ids.max()) >= size or int(ids.min()) < 0:
        raise TargetError(
            f"'{tokens}' has ids from {int(ids.min())} to {int(ids.max())}; the model has 0 to {size - 1}."
        )
    return model, {"input_ids": ids}


def read_tokens(file: str | Path) -> Tensor:
    """Token ids of a file, one row for each prompt; prompts of several lengths are cut to the shortest.

    Raises:
        TargetError: The file cannot be read, or holds something else.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TargetError(f"Tokens '{file}' cannot be read: {error}. {_HELP}") from None
    try:
        given: Any = json.loads(text) if text.lstrip().startswith("[") else [x.split() for x in text.splitlines()]
        rows = given if given and isinstance(given[0], list) else [given]
        prompts = [[int(token) for token in row] for row in rows if row]
    except (ValueError, TypeError, RecursionError):
        prompts = []
    if not prompts:
        raise TargetError(f"Tokens '{file}' hold no token ids. {_HELP}")
    length = min(map(len, prompts))
    return torch.tensor([prompt[:length] for prompt in prompts])
