"""Tensors and Python values in the plain forms that safetensors and JSON can hold, and back without loss."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from floatline.base.json_values import decode_number, encode_number
from floatline.errors import GuardError

# What every safetensors release can hold; all other dtypes go as bytes.
_KNOWN = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
DAMAGE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What values of another kind than was written can raise when they are read."""

_NUMBER, _TUPLE, _ITEMS = "$number", "$tuple", "$items"


def encode_state(value: Any, place: str = "state") -> Any:
    """The same value in JSON's types; GuardError, with its place, where it holds anything else.

    Numerics:
        Lossless, but for the payload of a NaN: non-finite floats become {"$number": "NaN"}, tuples {"$tuple": […]},
        dicts with keys that are not plain texts {"$items": [[key, value], …]}.

    Args:
        value: None, bool, int, float, str, and lists, tuples and dicts of them.
        place: Where it stands, for the message.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_NUMBER: encode_number(value)}
    if isinstance(value, list | tuple):
        row = cast("list[Any] | tuple[Any, ...]", value)
        items = [encode_state(item, f"{place}[{number}]") for number, item in enumerate(row)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        fields = cast("dict[Any, Any]", value)
        if all(isinstance(key, str) and not key.startswith("$") for key in fields):
            return {key: encode_state(item, f"{place}[{key!r}]") for key, item in fields.items()}
        items = [[encode_state(key, place), encode_state(item, f"{place}[{key!r}]")] for key, item in fields.items()]
        return {_ITEMS: items}
    raise GuardError(
        f"{place} is a {type(value).__name__}, which a checkpoint cannot hold. "
        "Give numbers, texts, lists, tuples and dicts, and tensors among the tensors."
    )


def decode_state(value: Any) -> Any:
    """What `encode_state` was given; ValueError for anything that it never returns."""
    if isinstance(value, list):
        return [decode_state(item) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, Any]", value)
    tag = next(iter(fields), "")
    if not tag.startswith("$"):
        return {key: decode_state(item) for key, item in fields.items()}
    if tag == _NUMBER:
        return decode_number(fields[tag])
    if tag == _TUPLE:
        return tuple(decode_state(item) for item in fields[tag])
    if tag == _ITEMS:
        return {decode_state(key): decode_state(item) for key, item in fields[tag]}
    raise ValueError(f"{tag!r:.40} is not known")


def flatten_tensors(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Tensors that safetensors takes, and how those that are not themselves come back.

    Args:
        tensors: Dense tensors by name, on any device.

    Returns:
        Contiguous CPU tensors of which no two share memory, by key. And for each name that is not simply the
        tensor under its key: the key, and where it differs dtype, shape and strides.
    """
    flat: dict[str, Tensor] = {}
    forms: dict[str, dict[str, Any]] = {}
    seen: dict[tuple[Any, ...], str] = {}
    pieces: set[int] = set()
    for name, tensor in tensors.items():
        _check(name, tensor)
        tensor = tensor.detach()
        same = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() and same in seen:
            forms[name] = {"key": seen[same], "alias": True}
            continue
        key = name if _is_plain(name) else f"tensor {len(flat)}"
        while key in flat or (key != name and key in tensors):
            key += "'"
        seen[same] = key
        form: dict[str, Any] = {} if key == name else {"key": key}
        values = tensor.resolve_conj().resolve_neg()
        if not values.is_contiguous() and torch.empty_like(values, device="meta").stride() == values.stride():
            form["strides"] = list(values.stride())  # dense, such as channels_last: states may follow that order
        values = values.to("cpu").contiguous()
        if values.dtype not in _KNOWN:
            form |= {"dtype": str(values.dtype).removeprefix("torch."), "shape": list(values.shape)}
            values = values.reshape(-1).view(torch.uint8)
        piece = values.untyped_storage().data_ptr()
        flat[key] = values.clone() if piece in pieces else values  # safetensors refuses tensors that share memory
        pieces.add(piece)
        if form:
            forms[name] = {"key": key, **form}
    return flat, forms


def unflatten_tensors(flat: dict[str, Tensor], forms: dict[str, dict[str, Any]]) -> dict[str, Tensor]:
    """What `flatten_tensors` was given, on the CPU and in memory of its own; ValueError, KeyError or TypeError else."""
    # safetensors' tensors lie in the file: a copy outlives it, and is aligned.
    loaded = {key: tensor.clone() for key, tensor in flat.items()}
    made: dict[str, Tensor] = {}
    by_key: dict[str, Tensor] = {}
    for name, form in forms.items():
        if form.get("alias"):
            continue
        if form["key"] in by_key:
            raise ValueError(f"{name!r:.60} is a second copy")  # thousands of them would fill the memory
        _check_form(name, form, flat)
        tensor = loaded[form["key"]]
        if "dtype" in form:
            tensor = tensor.view(getattr(torch, form["dtype"])).reshape(form["shape"])
        if "strides" in form:
            tensor = torch.empty_strided(tensor.shape, form["strides"], dtype=tensor.dtype).copy_(tensor)
        made[name] = by_key[form["key"]] = tensor
    for key, tensor in loaded.items():
        if key not in by_key:
            made[key] = by_key[key] = tensor
    for name, form in forms.items():
        if form.get("alias"):
            made[name] = by_key[form["key"]]
    return made


def _check_form(name: str, form: dict[str, Any], flat: dict[str, Tensor]) -> None:
    """Refuse what would make more of a tensor than the file holds."""
    tensor = flat[form["key"]]
    if "dtype" in form and not isinstance(getattr(torch, str(form["dtype"]), None), torch.dtype):
        raise ValueError(f"{name!r:.60} has a dtype that is not known")
    if "dtype" in form and tensor.dtype != torch.uint8:
        raise ValueError(f"{name!r:.60} is kept as bytes, and they are none")
    shape = form.get("shape", list(tensor.shape))
    if "shape" in form and math.prod(shape) > tensor.numel():
        raise ValueError(f"{name!r:.60} has more elements than bytes")
    if "strides" in form:
        last = sum((size - 1) * stride for size, stride in zip(shape, form["strides"], strict=True))
        if min(form["strides"], default=1) < 0 or last >= max(1, math.prod(shape)):
            raise ValueError(f"{name!r:.60} has strides that do not fit")


def _check(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GuardError(f"Tensor {name!r} is a {type(tensor).__name__}. Put it into the state, or make it a tensor.")
    kind = ""
    if tensor.layout is not torch.strided:
        kind = "sparse"
    elif tensor.is_quantized:
        kind = "quantized"
    elif tensor.device.type == "meta":
        kind = "on the meta device, without values"
    elif type(tensor) not in (Tensor, torch.nn.Parameter) and hasattr(tensor, "device_mesh"):
        kind = "sharded"
    if kind:
        raise GuardError(f"Tensor {name!r} is {kind}, which a checkpoint cannot hold. Give its dense, whole values.")


def _is_plain(name: str) -> bool:
    """Whether safetensors can hold the name; it keeps one for itself, and it wants UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return name != "__metadata__"
