"""Which modules of a model a pattern means: by name, or by the name of their class. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from floatline.errors import PlanError, suggest

if TYPE_CHECKING:
    from torch import nn

_TYPE = "type:"


def name_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules below a model, by their qualified names."""
    modules: dict[str, nn.Module] = dict(model.named_modules())  # pyright: ignore[reportUnknownArgumentType]
    return {name: module for name, module in modules.items() if name}


def is_match(name: str, module: nn.Module, pattern: str) -> bool:
    """Whether a pattern means a module: 'decoder.*.norm' by its name, 'type:*Norm' by its class or a base of it."""
    if not pattern.startswith(_TYPE):
        return fnmatchcase(name, pattern)
    return any(fnmatchcase(kind, pattern.removeprefix(_TYPE)) for kind in _class_names(module))


def match_modules(names: Mapping[str, nn.Module], pattern: str, *, said: str) -> list[str]:
    """The names that a pattern means; PlanError with the nearest ones where it means none.

    Args:
        names: The model's modules, from `name_modules`.
        pattern: A name, a pattern, or 'type:' and a class.
        said: What the plan says of it, to begin the message with.
    """
    found = [name for name, module in names.items() if is_match(name, module, pattern)]
    if found:
        return found
    if pattern.startswith(_TYPE):
        kinds = list(dict.fromkeys(type(module).__name__ for module in names.values()))
        raise PlanError(f"{said}, but the model has no such type. {_nearest(pattern.removeprefix(_TYPE), kinds)}")
    raise PlanError(f"{said}, but the model has no such module. {_nearest(pattern, list(names))}")


def _nearest(pattern: str, known: list[str]) -> str:
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.5)
    return suggest(pattern, near or known[:8])


def _class_names(module: nn.Module) -> list[str]:
    """Names of its class and of what that was made from; nn.Module itself is everybody's."""
    return [base.__name__ for base in type(module).__mro__ if base.__name__ not in ("Module", "object")]
