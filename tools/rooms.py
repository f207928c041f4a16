"""Writes the table of rooms into CONTRIBUTING.md, from the first lines of the rooms themselves.

python tools/rooms.py
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE, PAGE = ROOT / "src" / "floatline", ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- Made by tools/rooms.py. Do not edit by hand. -->\n", "<!-- End of the rooms. -->\n"


def first_line(path: Path) -> str:
    """What a file says it holds."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def table() -> str:
    """Files at the top and rooms, each with its sub-rooms."""
    rows = [(f"{path.name}", first_line(path)) for path in sorted(SOURCE.glob("[!_]*.py"))]
    for init in sorted(SOURCE.rglob("__init__.py")):
        room = init.parent.relative_to(SOURCE)
        if room.parts:
            rows.append((f"{room.as_posix()}/", first_line(init)))
    return "".join(f"| `{name}` | {says} |\n" for name, says in rows)


def fill(page: str) -> str:
    """The page, with the table of today between its marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}| room | what it holds |\n|---|---|\n{table()}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
