"""Writes docs/private_names.md from the list of private names: python tools/private_page.py."""

from __future__ import annotations

from pathlib import Path

from floatline.base.private_names import PRIVATES, TESTED, Private

PAGE = Path(__file__).parent.parent / "docs" / "private_names.md"
INTRO = f"""\
<!-- Made by tools/private_page.py from src/floatline/base/private_names.py. Do not edit by hand. -->

# Private names

What floatline touches of torch and of the frameworks that they may change without notice. They were looked up in torch
{TESTED}. Where a name without a fallback is gone, the command line says so in one line and ends with exit code 2; in a
script, Python's own error names it.

| names | for what | without them |
|---|---|---|
"""


def page() -> str:
    """The whole page as Markdown."""
    return INTRO + "\n".join(map(_row, PRIVATES)) + "\n"


def _row(private: Private) -> str:
    names = "<br>".join(f"`{name}`" for name in private.names)
    note = f" ({private.only})" if private.only else ""
    return f"| {names}{note} | {private.use} | {private.fallback or 'refused'} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
