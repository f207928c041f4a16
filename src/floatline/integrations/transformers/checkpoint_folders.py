"""Checkpoints of transformers in folders: a model with the tokens it is run on, its epsilons, and folded weights."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from floatline.base.files import read_bounded, write_whole
from floatline.errors import FoldError
from floatline.folding.proof import relative_error, run_quietly
from floatline.folding.recorded_graph import find_eps, name_modules
from floatline.folding.scale_fold import Fold

_ROW, _MOST_ROWS = 256, 16
# What is copied beside weights and config: tokenizers, templates, cards. No code, and nothing that is pickled.
_COPIED = (".json", ".txt", ".model", ".jinja", ".md")


@dataclass(frozen=True)
class Checkpoint:
    """A model from a folder, in FP32, and what it is run on.

    Attributes:
        folder: Where it is.
        model: The model.
        inputs: Arguments of its forward pass.
        eps: The setting of the config that each (module, attribute) takes its epsilon from.
    """

    folder: Path
    model: Any
    inputs: Any
    eps: dict[tuple[str, str], tuple[str, ...]]


def load_checkpoint(folder: str | Path, tokens: str | Path | None, *, inputs: Any = None) -> Checkpoint:
    """Load a checkpoint in FP32, with the settings of its epsilons; see `open_model`."""
    model, given = open_model(folder, tokens, inputs=inputs, dtype=torch.float32)
    model.config.dtype = _stored_dtype(Path(folder))
    return Checkpoint(Path(folder), model, given, find_eps_settings(model))


def open_model(
    folder: str | Path,
    tokens: str | Path | None,
    *,
    inputs: Any = None,
    dtype: torch.dtype | Literal["auto"] = "auto",
) -> tuple[Any, Any]:
    """A model and the arguments of its forward pass: from safetensors only; no code of the folder is run.

    Args:
        folder: A folder with config.json and safetensors files.
        tokens: A JSON file with token ids, as a list or a list of lists; or a text, where the folder has a tokenizer.
        inputs: Arguments for a model that takes no tokens, or where no tokens are given.
        dtype: Of the weights; 'auto' leaves them as the checkpoint has them.

    Raises:
        FoldError: Something cannot be read, or the model takes no tokens and nothing else is given.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise FoldError(f"'{folder}' has no config.json. Give the folder of a transformers checkpoint.")
    if not list(folder.glob("*.safetensors")):
        raise FoldError(f"'{folder}' has no .safetensors file. Save the model there with safetensors.")
    kind = _find_class(folder)
    model = _load(kind, folder, dtype)
    takes_tokens = model.main_input_name == "input_ids"
    if inputs is not None and (tokens is None or not takes_tokens):
        return model, inputs
    if tokens is None or not takes_tokens:
        raise FoldError(
            f"{kind.__name__} takes {model.main_input_name}, and none are given. Give tokens where it takes them, and "
            "otherwise a file with forward(seed): to diagnose --forward as its target, to fold and fit by --inputs."
        )
    ids = read_tokens(tokens, folder, vocabulary=model.get_input_embeddings().num_embeddings)
    given: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = ids
    return model, given


def read_tokens(path: str | Path, folder: Path, *, vocabulary: int) -> Tensor:
    """Token ids of a file, as rows of one length.

    Raises:
        FoldError: The file holds none, or one that the model does not know.
    """
    try:
        text = read_bounded(Path(path)).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FoldError(f"Tokens '{path}' cannot be read: {error}. Give a JSON file of token ids, or a text.") from None
    rows = _read_rows(text, path) if Path(path).suffix == ".json" else _tokenize(text, folder)
    length = min((len(row) for row in rows), default=0)
    if not length:
        raise FoldError(f"Tokens '{path}' are empty. Give at least one row of token ids.")
    wrong = next((one for row in rows for one in row if not 0 <= one < vocabulary), None)
    if wrong is not None:
        raise FoldError(f"Tokens '{path}' hold {wrong}, but the model has ids from 0 to {vocabulary - 1}.")
    return torch.tensor([row[:length] for row in rows[:_MOST_ROWS]])


def _read_rows(text: str, path: str | Path) -> list[list[int]]:
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    rows: Any = [found] if _is_row(found) and found else found
    if not isinstance(rows, list) or not all(map(_is_row, cast("list[Any]", rows))):
        raise FoldError(f"Tokens '{path}' are no JSON list of whole numbers. Give [1, 2, 3] or [[1, 2], [3, 4]].")
    return cast("list[list[int]]", rows)


def _is_row(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in cast("list[Any]", value))


def _tokenize(text: str, folder: Path) -> list[list[int]]:
    if not (folder / "tokenizer.json").is_file():
        raise FoldError(f"'{folder}' has no tokenizer.json to read a text with. Give token ids in a .json file.")
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    length = min(_ROW, len(ids))
    return [ids[start : start + length] for start in range(0, len(ids) - length + 1, length or 1)]


def find_eps_settings(model: Any) -> dict[tuple[str, str], tuple[str, ...]]:
    """The setting of the config that each epsilon comes from: found by changing one and building the model again.

    The model is built on the meta device, without memory for its weights.
    """
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    before = _read_eps(model)
    for setting in _eps_settings(model.config):
        changed = copy.deepcopy(model.config)
        set_eps(changed, setting, 2.0 * get_eps(changed, setting))
        with torch.device("meta"):
            other = _read_eps(type(model)(changed))
        found |= {place: setting for place, value in before.items() if other.get(place) != value}
    return found


def _read_eps(model: nn.Module) -> dict[tuple[str, str], float | None]:
    return {(name, key): value for name, module in name_modules(model) for key, value in find_eps(module).items()}


def _eps_settings(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in cast("dict[str, Any]", vars(config)).items():
        if "eps" in name and isinstance(value, float):
            yield (*path, name)
    for name in getattr(config, "sub_configs", {}):
        if getattr(config, name, None) is not None:
            yield from _eps_settings(getattr(config, name), (*path, name))


def get_eps(config: Any, setting: tuple[str, ...]) -> float:
    """The value of a setting of a config, or of a config in it."""
    for name in setting:
        config = getattr(config, name)
    return config


def set_eps(config: Any, setting: tuple[str, ...], value: float) -> None:
    """Set it."""
    for name in setting[:-1]:
        config = getattr(config, name)
    setattr(config, setting[-1], value)


def save_folded(checkpoint: Checkpoint, folded: Fold, out: str | Path) -> float:
    """Write the folded model to a new folder, as the checkpoint was, read it back and compare it.

    Weights keep the format of the checkpoint where that holds them exactly, and are written in FP32 where it does not.

    Returns:
        The largest relative difference between the outputs of the checkpoint and of what was written, in FP32: 0 where
        they are the same bit for bit.

    Raises:
        FoldError: The folder exists, or cannot be written, or what is read back computes something else.
    """
    out = Path(out)
    if out.exists():
        raise FoldError(f"'{out}' exists. Name a new folder.")
    try:
        with _new_folder(out) as draft:
            model: Any = copy.deepcopy(folded.model)
            model.config = copy.deepcopy(model.config)
            for setting, power in {checkpoint.eps[place]: power for place, power in folded.rewrite.eps.items()}.items():
                set_eps(model.config, setting, get_eps(model.config, setting) * 2.0**power)
            stored = checkpoint.model.config.dtype or torch.float32
            _narrow(model, stored)
            model.config.dtype = stored
            with _without_bars():
                model.save_pretrained(draft)
            for path in checkpoint.folder.iterdir():
                is_index = path.name.endswith(".index.json")
                if path.is_file() and path.suffix in _COPIED and not is_index and not (draft / path.name).exists():
                    shutil.copyfile(path, draft / path.name)
            write_whole(draft / "fold.json", json.dumps(folded.as_json(), indent=2, allow_nan=False))
            written = _load(type(checkpoint.model), draft, torch.float32)
            difference = relative_error(
                run_quietly(written, checkpoint.inputs), run_quietly(checkpoint.model, checkpoint.inputs)
            )
            if difference > folded.proof.tolerance:
                raise FoldError(
                    f"What transformers reads back is {difference:.1e} apart from '{checkpoint.folder}', so nothing "
                    "was written. Its config may not carry the change; use floatline.fold(model, inputs) in Python."
                )
    except OSError as error:
        raise FoldError(f"'{out}' cannot be written: {error}.") from None
    return difference


@contextlib.contextmanager
def _new_folder(out: Path) -> Generator[Path]:
    """A folder that gets its name when all of it is written."""
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield draft
        draft.chmod(0o755)
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _narrow(model: nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        narrow = parameter.detach().to(dtype)
        if torch.equal(narrow.to(parameter.dtype), parameter.detach()):
            parameter.data = narrow


def _find_class(folder: Path) -> Any:
    import transformers

    try:
        config: Any = json.loads(read_bounded(folder / "config.json"))
        name: Any = config["architectures"][0]
    except (OSError, ValueError, RecursionError, KeyError, IndexError, TypeError):
        raise FoldError(
            f"'{folder / 'config.json'}' names no architecture. Save the model with save_pretrained."
        ) from None
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise FoldError(
            f"transformers {transformers.__version__} has no model {name!r}. Its code is not run from the folder."
        )
    return kind


@contextlib.contextmanager
def _without_bars() -> Generator[None]:
    """transformers draws no progress bars of its own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _load(kind: Any, folder: Path, dtype: torch.dtype | str) -> Any:
    try:
        with _without_bars():
            model = kind.from_pretrained(folder, use_safetensors=True, local_files_only=True, dtype=dtype)
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        raise FoldError(f"'{folder}' cannot be loaded: {type(error).__name__}: {said}") from error
    return model.eval()


def _stored_dtype(folder: Path) -> torch.dtype:
    """The format that most of the checkpoint's weights are in."""
    from safetensors import safe_open

    sizes: dict[torch.dtype, int] = {}
    names = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    for path in sorted(folder.glob("*.safetensors")):
        with cast("Any", safe_open(path, framework="pt")) as file:
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                part = file.get_slice(key)
                dtype = names.get(part.get_dtype(), torch.float32)
                sizes[dtype] = sizes.get(dtype, 0) + torch.Size(part.get_shape()).numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
