"""Writes docs/lint/: a page for every rule, and the table of them. `python tools/lint_pages.py`."""

from __future__ import annotations

from pathlib import Path, PurePath

from floatline.lint import RULES
from floatline.lint.rule import Rule, read_examples
from floatline.report.lint import rule_sections, rule_title

FOLDER = Path(__file__).parent.parent / "docs" / "lint"
_NOTE = "<!-- Made by tools/lint_pages.py from src/floatline/lint/rules/. Do not edit by hand. -->\n\n"
_GROUPS = {"FL0": "Files", "FL1": "Numbers", "FL2": "The training loop", "FL3": "Configurations"}
_LANGUAGES = {".py": "py", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml", ".sh": "sh"}
_SAFETY = {"safe": "`--fix`", "unsafe": "`--unsafe-fixes`", "no": ""}


def pages() -> dict[Path, str]:
    """Every page by its path."""
    made = {FOLDER / f"{rule.code}.md": _NOTE + _rule_page(rule) for rule in RULES.values()}
    return {FOLDER / "rules.md": _NOTE + _table(), **made}


def _rule_page(rule: type[Rule]) -> str:
    """The rule as Markdown; its examples are the ones that are tested."""
    parts = [
        f"# {rule.code} {rule.name}\n",
        f"{rule_title(rule)}.\n" if not rule_title(rule).endswith(".") else rule_title(rule),
    ]
    for heading, text in rule_sections(rule):
        parts.append(f"## {heading}\n\n{text}\n" if heading else f"{text}\n")
    parts.append(f"Instead: {rule.advice}\n")
    parts.append("## Flagged\n")
    for bad in read_examples(rule.bad):
        parts.append(_block(bad.source, bad.file))
        if bad.fixed is not None:
            parts.append("becomes\n")
            parts.append(_block(bad.fixed, bad.file))
    parts.append("## Not flagged\n")
    parts += [_block(good.source, good.file) for good in read_examples(rule.good)]
    if rule.cause is not None:
        parts.append(f"Cause: [{rule.cause.id}](../causes/{rule.cause.id}.md). ")
    parts.append(f"To keep a line as it is: `# floatline: allow[{rule.name}]`\n")
    return "\n".join(parts)


def _block(code: str, file: str) -> str:
    name = "" if file == "example.py" else f"{file}:\n\n"
    return f"{name}```{_LANGUAGES.get(PurePath(file).suffix, 'text')}\n{code}\n```\n"


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
