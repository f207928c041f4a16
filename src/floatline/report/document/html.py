"""A document as one page that opens anywhere: no network, light and dark, any width; and how pages are put in place."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from floatline.base.files import write_whole
from floatline.report.document.document import Curves, Document, Drawing, Table, Tone, Words

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


_UPLOT = "vendor/uplot"


def page_of(document: Document, *, script: str = "validation.js", tones: Mapping[str, Tone]) -> str:
    """The page: every text escaped, its one script and its one style named by their hash.

    Args:
        document: What it says.
        script: The template that draws its curves.
        tones: What each verdict is to a reader.
    """
    style = "\n".join(
        _packed(name) for name in (f"{_UPLOT}/uPlot.min.css", "templates/look.css", "templates/validation.css")
    )
    licence = read_text(f"{_UPLOT}/LICENSE").strip()
    parts = (
        f"/*! uPlot\n{licence}\n*/",
        read_text(f"{_UPLOT}/uPlot.iife.min.js"),
        _packed("templates/charts.js"),
        _packed(f"templates/{script}"),
    )
    code = "\n".join(parts)
    template = _environment().from_string(read_text("templates/validation.html.j2"))
    policy = security_policy(styles=style, script=code)
    marked = frozenset({*tones, "passed", "not passed", "not checked"})  # words that carry the tone of their row
    return template.render(doc=document, style=style, script=code, policy=policy, tones=tones, marked=marked)


def embedded(data: Any) -> str:
    """JSON for a script element: no text in it can end the element or start a comment in it."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def tied(text: str) -> str:
    """With a space that does not break between a number and its unit."""
    return re.sub(r"(?<=\d) (?=(?:%|bits|[mµ]?s|[KMGT]?B)(?!\w))", "\u00a0", text)


def parted(name: str) -> Markup:
    """A dotted name or a path that may break behind its dots and slashes; escaped."""
    from markupsafe import Markup, escape

    return Markup("<wbr>").join(Markup(escape(piece)) for piece in re.split(r"(?<=[./])(?=.)", name))  # noqa: S704


def coded(text: str) -> Markup:
    """Escaped text; what stands between two backticks is code, so is an option, and a number stays with its unit."""
    from markupsafe import Markup, escape

    pieces = re.split(r"`([^`\n]+)`", text)
    shown = [f"<code>{escape(piece)}</code>" if at % 2 else _with_options(piece) for at, piece in enumerate(pieces)]
    return Markup("").join(map(Markup, shown))


def _with_options(text: str) -> str:
    """Escaped text, its options of the command line (`--rare 0.1`) as code that does not break."""
    from markupsafe import escape

    pieces = re.split(r"(?<![\w-])(--[a-z][a-z-]*(?: [\d.]*\d)?)(?![\w-])", text)
    return "".join(
        f'<code class="option">{escape(piece)}</code>' if at % 2 else _breakable(escape(tied(piece)))
        for at, piece in enumerate(pieces)
    )


def _breakable(escaped: str) -> str:
    """A long path may break behind its slashes, so that no word in it is broken."""
    return re.sub(r"(?<![\w;])(?:[\w.-]*/){3,}", lambda path: path[0].replace("/", "/<wbr>"), escaped)


def weighed(value: str) -> Markup:
    """The value of a tile: the number large, the word behind it small."""
    from markupsafe import Markup, escape

    number, space, word = value.rpartition(" ")
    if word not in ("worse", "better"):
        return Markup(escape(tied(value)))  # noqa: S704
    return Markup("{}{}<small>{}</small>").format(tied(number), space, word)


def diff_lines(text: str) -> Markup:
    """The lines of a diff, each marked as what it is; escaped."""
    from markupsafe import Markup, escape

    kinds = {"+": "ins", "-": "del", "@": "hunk"}
    lines = [(kinds.get(line[:1], "") if line[:3] not in ("+++", "---") else "hunk", line) for line in text.split("\n")]
    return Markup("\n").join(Markup(f'<span class="{kind}">{escape(line)}</span>') for kind, line in lines)  # noqa: S704


def _environment() -> Environment:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {
        "embedded": embedded,
        "tied": tied,
        "parted": parted,
        "coded": coded,
        "weighed": weighed,
        "diff": diff_lines,
    }
    for name, kind in (("words", Words), ("table_block", Table), ("drawing", Drawing), ("curves", Curves)):
        environment.tests[name] = _is(kind)
    return environment


def _is(kind: type) -> Any:
    def check(block: object) -> bool:
        return isinstance(block, kind)

    return check


def _packed(name: str) -> str:
    """A style or a script without its indents and the lines that are comments: a quarter of what a page weighs."""
    lines = (line.strip() for line in read_text(name).splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))


def read_text(name: str) -> str:
    """The text of one file of the room, such as 'templates/look.css'."""
    return resources.files(__name__.partition(".document.")[0]).joinpath(*name.split("/")).read_text(encoding="utf-8")


def security_policy(*, styles: str, script: str = "") -> str:
    """A Content-Security-Policy for a page with this one style element and at most this one script.

    Both are named by their hash, so that nothing a name or a note smuggles in is run or fetched.
    """
    allowed = f"; script-src {_hash(script)}" if script else ""
    return f"default-src 'none'{allowed}; style-src {_hash(styles)}; img-src data:; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def put_in_place(path: Path, text: str) -> None:
    """Write a file in one step: a reader never sees half of it.

    A link is replaced, not followed: the folder of a run may be anyone's. What UTF-8 cannot hold becomes '?'.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        path.unlink()
    write_whole(path, text.encode("utf-8", errors="replace").decode("utf-8"))
