"""A document as Markdown for a pull request; names and notes cannot become markup."""

from __future__ import annotations

import re

from floatline.report.document.document import Block, Chapter, Code, Curves, Document, Drawing, Part, Table, Words

_SIGNS = {
    "PASS": "✅",
    "MARGINAL": "⚠️",
    "FAIL": "❌",
    "INCONCLUSIVE": "❔",
    "REFUSED": "⛔",
    "AGREE": "✅",
    "FARTHER": "⚠️",
    "OTHER FUNCTION": "❌",
    "WRONG": "❌",
}
_ACTIVE = re.compile(r"([\\`*_{}\[\]#|~!])")


def markdown_of(document: Document) -> str:
    """The whole report, verdict first."""
    lines = [
        f"# {_SIGNS[document.verdict]} {document.verdict}: {escape(document.title)}",
        "",
        escape(document.subtitle),
        "",
        f"**{escape(document.reason)}** {escape(document.meaning)}",
        "",
        *(f"→ {_with_code(words)}\n" for words in document.todo),
        *(f"- ⚑ {escape(flag)}" for flag in document.flags),
        "",
        *_table(
            Table("", ("", "value", ""), tuple((tile.label, tile.value, tile.detail) for tile in document.tiles)),
        ),
    ]
    for part in document.before:
        lines += _part(part, 2)
    for chapter in document.chapters:
        lines += _chapter(chapter)
    for part in document.after:
        lines += _part(part, 2)
    lines += ["---", "", escape(document.footer), ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def escape(text: str) -> str:
    """Plain text that Markdown shows as it is, on one line and inside a table too."""
    flat = " ".join(text.split())
    flat = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _ACTIVE.sub(r"\\\1", flat)


def code(text: str) -> str:
    """A name as a code span that no backtick in it can end; a pipe in it does not end a table's cell."""
    flat = " ".join(text.split())
    if not flat:
        return ""
    fence = _fence(flat, 1)
    room = " " if flat.startswith("`") or flat.endswith("`") else ""
    return f"{fence}{room}{flat}{room}{fence}".replace("|", "\\|")


def _with_code(text: str) -> str:
    """Text in which what stands between two backticks is code."""
    pieces = " ".join(text.split()).split("`")
    if len(pieces) % 2 == 0:  # a lone backtick is one
        return escape(text)
    return "".join(code(piece) if at % 2 else _escape_piece(piece) for at, piece in enumerate(pieces))


def _escape_piece(piece: str) -> str:
    """With the spaces at its ends, which stand beside code."""
    return f"{' ' * piece.startswith(' ')}{escape(piece)}{' ' * (piece.endswith(' ') and len(piece) > 1)}"


def _fence(text: str, least: int) -> str:
    """Backticks, more than any run of them in the text."""
    return "`" * max(least, 1 + max((len(run) for run in re.findall("`+", text)), default=0))


def _chapter(chapter: Chapter) -> list[str]:
    lines = [f"## {escape(chapter.heading)}: {chapter.verdict}", ""]
    if chapter.folded:
        lines = [
            f"<details><summary>{_html(chapter.heading)}: {chapter.verdict}</summary>",
            "",
            escape(chapter.lead),
            "",
        ]
    for part in chapter.parts:
        lines += _part(part, 3)
    return [*lines, "</details>", ""] if chapter.folded else lines


def _part(part: Part, level: int) -> list[str]:
    lines = [f"{'#' * level} {escape(part.heading)}", ""]
    for block in part.blocks:
        lines += _block(block)
    return lines


def _block(block: Block) -> list[str]:
    if isinstance(block, Words):
        if block.kind == "hint":
            return []
        text = _with_code(block.text)
        return [f"⚑ {text}" if block.kind == "flag" else f"_{text}_" if block.kind == "missing" else text, ""]
    if isinstance(block, Table):
        return (
            _folded(block.caption, _table(block)) if block.folded else [f"{escape(block.caption)}:", "", *_table(block)]
        )
    if isinstance(block, Drawing):
        return _fenced(block.plain, "text") if block.plain else [escape(block.summary), ""]
    if isinstance(block, Curves):
        return [escape(block.summary), ""]
    return _code(block)


def _code(block: Code) -> list[str]:
    caption = [f"{code(block.caption)}:", ""] if block.caption else []
    return [*caption, *_fenced(block.text, block.language)]


def _fenced(text: str, language: str) -> list[str]:
    fence = _fence(text, 3)
    return [f"{fence}{language}", text, fence, ""]


def _folded(caption: str, lines: list[str]) -> list[str]:
    return [f"<details><summary>{_html(caption)}</summary>", "", *lines, "</details>", ""]


def _html(text: str) -> str:
    import html

    return html.escape(" ".join(text.split()))


def _table(table: Table) -> list[str]:
    marks = ["---:" if place in table.numeric else "---" for place in range(len(table.head))]
    rows = [
        [code(cell) if place in table.named else escape(cell) for place, cell in enumerate(row)] for row in table.rows
    ]
    lines = [[escape(cell) for cell in table.head], marks, *rows]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]
