"""The report of a validation: report.html, report.md and report.json, from one document, so that they agree."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from floatline.report.document.document import Curves, Document, Drawing
from floatline.report.document.html import page_of
from floatline.report.document.markdown import markdown_of
from floatline.report.document.package_files import put_in_place
from floatline.report.validation.facts import document_of
from floatline.report.validation.texts import TONES

if TYPE_CHECKING:
    from floatline.validation.result import Validation


def write_report(validation: Validation, folder: Path) -> Path:
    """Write report.json, report.md and report.html into a folder, each in one step.

    Args:
        validation: What was found out.
        folder: Made where it is not there.

    Returns:
        The path of report.html.
    """
    document = document_of(validation)
    put_in_place(folder / "report.json", json_of(validation, document))
    put_in_place(folder / "report.md", markdown_of(document))
    page = folder / "report.html"
    put_in_place(page, page_of(document, tones=TONES))
    return page


def json_of(validation: Validation, document: Document) -> str:
    """The contract's fields, under 'shown' every text of the page, under 'validation' every number in full."""
    data = {**validation.contract("report.html"), "shown": _shown(document), "validation": validation.as_json()}
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _shown(value: Any) -> Any:
    """The document's texts, without pictures."""
    if isinstance(value, Drawing | Curves):
        return {"summary": value.summary}
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: _shown(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, tuple):
        return [_shown(entry) for entry in cast("tuple[Any, ...]", value)]
    return value
