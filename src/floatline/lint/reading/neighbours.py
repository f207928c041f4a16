"""What the other modules of a linted tree hold: numbers under a name, and schedulers that their classes make.

They are read as text, on demand and once; none of them is parsed for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePath

from floatline.base.files import read_bounded

_LARGEST = 1_000_000  # bytes; what is larger holds no constants that were written by hand
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_SCHEDULER = re.compile(r"^[ \t]+(self\.\w+)[ \t]*=[ \t]*(?:[\w.]*\.)?(\w+LR|get_\w*schedule\w*)\(", re.MULTILINE)


class LintedTree:
    """The Python files of a linted tree.

    Args:
        files: Their names, as findings have them.
    """

    def __init__(self, files: Iterable[str]) -> None:
        self._files = frozenset(str(PurePath(file)) for file in files if file.endswith(".py"))
        self._texts: dict[str, str] = {}

    def find_number(self, file: str, module: str, name: str) -> float | None:
        """A number that a module gives a name, once, at its top.

        Args:
            file: The file that imports it.
            module: What it imports it from, with the dots in front.
            name: The name in that module.
        """
        text = self.read(file, module)
        given = re.findall(rf"^{re.escape(name)}[ \t]*(?::[^=\n]*)?=(?!=)([^#\n]*)", text, re.MULTILINE)
        number = given[0].strip() if len(given) == 1 else ""
        return float(number) if _NUMBER.fullmatch(number) else None

    def find_schedulers(self, file: str, module: str, name: str) -> set[str]:
        """Attributes, as `self.lr`, that a module which holds the class makes from a scheduler of learning rates.

        Args:
            file: The file that imports the class.
            module: What it imports it from, with the dots in front.
            name: The class.
        """
        text = self.read(file, module)
        if not re.search(rf"^class {re.escape(name)}\b", text, re.MULTILINE):
            return set()
        return {found[1] for found in _SCHEDULER.finditer(text)}

    def read(self, file: str, module: str) -> str:
        """The text of a module of the tree; '' where it is none of it, or cannot be read."""
        found = self._find(PurePath(file), module)
        if found and found not in self._texts:
            try:
                self._texts[found] = read_bounded(Path(found), most=_LARGEST).decode("utf-8-sig")
            except (OSError, ValueError):
                self._texts[found] = ""
        return self._texts.get(found, "")

    def _find(self, file: PurePath, module: str) -> str:
        bare = module.lstrip(".")
        level = len(module) - len(bare)
        above = list(file.parents)
        for folder in above[level - 1 : level] if level else above:
            place = folder.joinpath(*bare.split(".")) if bare else folder
            for one in (f"{place}.py", str(place / "__init__.py")):
                if one in self._files:
                    return one
        return ""
