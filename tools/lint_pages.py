"""Writes docs/lint/: a page for every rule, and the table of them. `python tools/lint_pages.py`."""

from __future__ import annotations

from pathlib import Path

from floatline.lint import RULES
from floatline.report.lint import rule_page

FOLDER = Path(__file__).parent.parent / "docs" / "lint"
_NOTE = "<!-- Made by tools/lint_pages.py from src/floatline/lint/rules/. Do not edit by hand. -->\n\n"
_GROUPS = {"FL0": "Files", "FL1": "Numbers", "FL2": "The training loop", "FL3": "Configurations"}
_SAFETY = {"safe": "`--fix`", "unsafe": "`--unsafe-fixes`", "no": ""}


def pages() -> dict[Path, str]:
    """Every page by its path."""
    made = {FOLDER / f"{rule.code}.md": _NOTE + rule_page(rule) for rule in RULES.values()}
    return {FOLDER / "rules.md": _NOTE + _table(), **made}


def _table() -> str:
    parts = ["# The rules\n\nHow they are used: [lint](../lint.md).\n"]
    for start, title in _GROUPS.items():
        parts.append(f"## {title}\n\n| rule | flags | fixed by |\n|---|---|---|")
        for rule in RULES.values():
            if rule.code.startswith(start):
                flags = (rule.__doc__ or "").strip().splitlines()[0].removeprefix("Flags ").replace("|", "\\|")
                asked = " (only if selected, or with `--half`)" if rule.only_if_selected else ""
                link = f"[{rule.code}]({rule.code}.md) {rule.name}{asked}"
                parts.append(f"| {link} | {flags} | {_SAFETY[rule.fix_safety]} |")
        parts.append("")
    return "\n".join(parts)


def main() -> None:
    """Write them; a page whose rule is gone goes too."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    made = pages()
    for old in FOLDER.glob("*.md"):
        if old not in made:
            old.unlink()
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
    print(f"{len(made)} pages in docs/lint")


if __name__ == "__main__":
    main()
