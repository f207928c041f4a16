"""A document as one page that opens anywhere: no network, light and dark, any width."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from floatline.report.document.document import Curves, Document, Drawing, Table, Tone, Words
from floatline.report.document.package_files import read_text, security_policy

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
        read_text(name) for name in (f"{_UPLOT}/uPlot.min.css", "templates/look.css", "templates/validation.css")
    )
    licence = read_text(f"{_UPLOT}/LICENSE").strip()
    parts = (
        f"/*! uPlot\n{licence}\n*/",
        read_text(f"{_UPLOT}/uPlot.iife.min.js"),
        read_text("templates/charts.js"),
        read_text(f"templates/{script}"),
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


def _environment() -> Environment:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"embedded": embedded, "tied": tied, "parted": parted}
    for name, kind in (("words", Words), ("table_block", Table), ("drawing", Drawing), ("curves", Curves)):
        environment.tests[name] = _is(kind)
    return environment


def _is(kind: type) -> Any:
    def check(block: object) -> bool:
        return isinstance(block, kind)

    return check
