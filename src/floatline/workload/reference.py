"""Reference workloads: the systems in `floatline.workloads`, found by name; NAME:VARIANT is one with other settings."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from floatline.errors import TargetError, suggest
from floatline.workload.config import WorkloadConfig, merge, parse_pairs, read_config
from floatline.workload.workload import Workload

# A name, not an import: the workloads stand on top of the house, and nothing below may need them.
_ROOM = "floatline.workloads"


@dataclass(frozen=True)
class Reference:
    """A reference workload with its settings.

    Args:
        name: As in `floatline train NAME`.
        module: Has `Config`, `VARIANTS` and `build(config, seed)`.
        config: The settings.
    """

    name: str
    module: ModuleType
    config: WorkloadConfig

    def build(self, seed: int = 0) -> Workload:
        """The workload; it keeps its settings, so that a run can be resumed with the same."""
        made: Workload = self.module.build(self.config, seed=seed)
        return replace(made, settings={"workload": self.name, **self.config.model_dump(mode="json")})


def find_reference(
    text: str, *, preset: str | None = None, config: str | Path | None = None, pairs: Iterable[str] = ()
) -> Reference | None:
    """The reference workload that a target names; None where it names none.

    Later settings win: the variant, the preset, the file, the pairs.

    Args:
        text: NAME or NAME:VARIANT.
        preset: A second variant, such as a size.
        config: A YAML file with settings.
        pairs: Settings as key=value.

    Raises:
        TargetError: A variant or a setting that is not there, or a package that is missing.
    """
    name, _, variant = text.partition(":")
    if name not in reference_names():
        return None
    module = _import(name)
    layers: list[Mapping[str, Any]] = [_variant(module, name, each) for each in (variant, preset) if each]
    if config is not None:
        layers.append(_of(name, read_config(config), config))
    settings = merge(*layers, parse_pairs(pairs))
    try:
        return Reference(name, module, module.Config(**settings))
    except TargetError as error:
        raise TargetError(f"Workload '{text}': {error}") from None


@cache
def reference_names() -> tuple[str, ...]:
    """Names of the reference workloads; nothing is imported for it but the folder they lie in."""
    spec = importlib.util.find_spec(_ROOM)
    places = (spec.submodule_search_locations or []) if spec is not None else []
    return tuple(sorted(found.name for found in pkgutil.iter_modules(places) if not found.name.startswith("_")))


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"{_ROOM}.{name}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing == "floatline":
            raise
        raise TargetError(
            f"Workload '{name}' needs {missing}. Install it with: pip install 'floatline[workloads]'."
        ) from None


def _variant(module: ModuleType, name: str, variant: str) -> Mapping[str, Any]:
    known: Mapping[str, Mapping[str, Any]] = module.VARIANTS
    if variant not in known:
        raise TargetError(f"Workload '{name}' has no variant '{variant}'. {suggest(variant, known)}")
    return known[variant]


def _of(name: str, settings: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """The settings of a file; one that a run kept names its workload."""
    own = settings.pop("workload", name)
    if own != name:
        raise TargetError(f"Config '{path}' is of workload '{own}', not '{name}'. Name that one, or another file.")
    return settings
