"""WorkloadConfig: the settings of a reference workload, from its variants, a YAML file and key=value pairs."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from floatline.errors import PlanError, TargetError, suggest
from floatline.plans.yaml_files import parse_yaml, read_yaml


class WorkloadConfig(BaseModel):
    """Settings of a workload: plain values, each with a default. A key that is not known is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    if not TYPE_CHECKING:  # type checkers keep the signature made from the fields

        def __init__(self, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise TargetError(_explain(type(self), error)) from None


def read_config(path: str | Path) -> dict[str, Any]:
    """The settings in a YAML file; TargetError where it holds none."""
    try:
        return read_yaml(Path(path), what="Config")
    except PlanError as error:
        raise TargetError(str(error)) from None


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Settings on top of each other, the later ones win; mappings inside are merged key by key."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            old = merged.get(key)
            if isinstance(old, Mapping) and isinstance(value, Mapping):
                value = merge(cast("Mapping[str, Any]", old), cast("Mapping[str, Any]", value))
            merged[key] = value
    return merged


def parse_pairs(pairs: Iterable[str]) -> dict[str, Any]:
    """Settings from 'key=value' and 'outer.inner=value'; a value is read as YAML reads it.

    Raises:
        TargetError: A text without '=', or a value that YAML cannot read.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign or not all(part.isidentifier() for part in key.split(".")):
            raise TargetError(f"Setting '{pair}' is not key=value. Write such as learning_rate=0.001.")
        try:
            value = parse_yaml(text)
        except yaml.YAMLError:
            raise TargetError(f"Setting '{pair}': the value cannot be read. Write a plain number or text.") from None
        for part in reversed(key.split(".")):
            value = {part: value}
        settings = merge(settings, cast("dict[str, Any]", value))
    return settings


def _explain(config: type[WorkloadConfig], error: ValidationError) -> str:
    """The first problem as one sentence with the value, and one with what to do."""
    problems = error.errors(include_url=False)
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = config.model_fields if len(first["loc"]) == 1 else ()
        return f"Setting '{where}' is not known. {suggest(str(first['loc'][-1]), known)}"
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, Exception):
        return f"{where}: {inner}" if where else str(inner)
    return f"Setting '{where}' is {reprlib.repr(first['input'])}: {first['msg'].lower()}. Change it."
