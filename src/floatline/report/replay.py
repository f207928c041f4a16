"""A replayed bundle for people: one line for each replay of the step. Renders, computes nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from floatline.base.texts import percent, printable

if TYPE_CHECKING:
    from rich.console import Console

    from floatline.probe.bundles.bundle_replay import ReplayReport, ReplayRow


def print_replay(report: ReplayReport, console: Console) -> None:
    """Print what the replays gave."""
    origin = report.bundle.origin
    plan = "" if report.bundle.plan is None else f" in {report.bundle.plan.name}"
    console.print(_text(f"{report.target}, step {origin.step}, seed {origin.seed}{plan}", "bold"), soft_wrap=True)
    for finding in report.bundle.findings[:1]:
        place = finding.get("module") or finding.get("file") or "the model"
        console.print(_text(f"found: {finding.get('cause')} in {place}"), soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("replay", "loss", "finite", "scale", "gradient norm", "against FP32"):
        table.add_column(name, overflow="fold")
    for row in report.rows:
        finite = Text("yes", "green") if row.finite else Text("no", "bold red")
        scale = "" if row.scale is None else f"{row.scale:g}"
        table.add_row(
            _text(row.what), _number(row.loss), finite, scale, _number(row.gradient_norm), _text(_agreement(row))
        )
    console.print(table)
    for note in report.notes:
        console.print(_text(f"note: {note}", "dim"), soft_wrap=True)


def _agreement(row: ReplayRow) -> str:
    if row.error:
        return row.error
    own = row.agreement
    if own is None:
        return ""
    if math.isnan(own.cosine):
        return f"not {'comparable' if row.finite else 'finite'} in {row.worst}"
    lost = f", {percent(own.lost_share, 1)} lost to zero" if own.lost else ""
    return f"cosine {own.cosine:.6f}, norm × {own.norm_ratio:.4f}{lost}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _text(words: str, style: str = "") -> Text:
    """One line; never read as markup, and nothing in it moves the cursor."""
    return Text(printable(words), style)
