"""The rules, one file each, gathered by their codes."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence

from floatline.errors import LintError, suggest
from floatline.lint.rule import Rule


def _gather() -> dict[str, type[Rule]]:
    found: dict[str, type[Rule]] = {}
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        loaded = importlib.import_module(module.name)
        for value in vars(loaded).values():
            if (
                isinstance(value, type)
                and issubclass(value, Rule)
                and value.__module__ == module.name
                and "code" in vars(value)
            ):
                found[value.code] = value
    return dict(sorted(found.items()))


RULES: dict[str, type[Rule]] = _gather()


def find_rule(name: str) -> type[Rule]:
    """A rule by its code or its name.

    Raises:
        LintError: There is none.
    """
    for rule in RULES.values():
        if name.strip().lower() in (rule.code.lower(), rule.name):
            return rule
    known = [word for rule in RULES.values() for word in (rule.code, rule.name)]
    near = suggest(name, known)
    if near.startswith("Known:"):  # all of them are no help
        near = f"The {len(RULES)} rules are {known[0]} to {known[-2]}; docs/lint/rules.md lists them."
    raise LintError(f"Rule {name!r} is not known. {near}")


def choose_rules(select: Sequence[str], ignore: Sequence[str], *, half: bool = False) -> list[type[Rule]]:
    """The rules that are selected and not ignored; each by code, beginning of a code, or name.

    Without a selection, all but those that are asked only if they are selected.

    Args:
        select: What is selected; nothing: see above.
        ignore: What is not asked.
        half: Whether those are asked as well.

    Raises:
        LintError: A word fits no rule.
    """
    chosen = [
        rule
        for rule in RULES.values()
        if (any(_fits(rule, word) for word in select) if select else half or not rule.only_if_selected)
    ]
    for word in (*select, *ignore):
        if not any(_fits(rule, word) for rule in RULES.values()):
            find_rule(word)
    return [rule for rule in chosen if not any(_fits(rule, word) for word in ignore)]


def _fits(rule: type[Rule], word: str) -> bool:
    return rule.name == word or (word.upper().startswith("FL") and rule.code.startswith(word.upper()))
