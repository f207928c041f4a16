"""A manifest for people: the verdict, the table of what is held, and what was measured. Renders, computes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from floatline.manifests.difference import ManifestDifference
from floatline.manifests.judge import describe_ranks
from floatline.manifests.manifest import Manifest
from floatline.precision.holding import KINDS, Holding

_ROOMY = 76  # characters that the whole table needs


def print_manifest(
    found: Manifest, console: Console, *, differences: Sequence[str] = (), expected: str | None = None
) -> None:
    """Print a manifest, the verdict first.

    Args:
        found: The manifest.
        console: Where to.
        differences: What is not as expected.
        expected: What was; None where nothing was.
    """
    ranks = describe_ranks(found)
    if ranks:
        _print(ranks, console, style="bold")
    _print(found.summary, console, style="bold")
    for line in found.lines:
        _print("", console)
        for number, text in enumerate(str(line).splitlines()):
            _print(text, console, style="red" if not number else "")
    if expected is not None:
        _print("", console)
        _print(f"expected {expected}: {'as believed' if not differences else 'not so'}", console, style="bold")
        for text in differences:
            _print(f"  {text}", console)
    _print("", console)
    print_holdings(found.holdings, console)
    _print_measures(found, console)
    for note in found.notes:
        _print(f"note: {note}", console, style="dim")


def print_holdings(holdings: Sequence[Holding], console: Console) -> None:
    """The table of what is held, by kind and layer group; doctor and manifest share it."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    names = ["kind", "layers", "format", "elements"]
    if console.width >= _ROOMY:  # a name in a column of three letters is no name
        names[3:] = ["tensors", "elements", "such as"]
    for name in names:
        right = name in ("tensors", "elements")
        table.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=name != "such as")
    for row in sorted(holdings, key=lambda row: (KINDS.index(row.kind), row.name)):
        kind = f"{row.kind} {row.name}".strip()
        cells = {
            "kind": kind,
            "layers": row.group,
            "format": row.format,
            "tensors": f"{row.num_tensors:,}",
            "elements": f"{row.num_elements:,}",
            "such as": row.example,
        }
        table.add_row(*(Text(cells[name]) for name in names))
    console.print(table)


def _print_measures(found: Manifest, console: Console) -> None:
    if found.step is None:
        return
    _print("", console)
    _print(f"Measured in step {found.step} of {', '.join(found.optimizers)}", console, style="bold")
    total = sum(row.flops for row in found.work) or 1
    for row in found.work:
        region = "" if row.phase == "backward" else f", autocast {row.region}"
        where = f", most in {row.example}" if row.example else ""
        share = f"{100 * row.flops / total:.3g} %"
        _print(f"  {row.phase}: {share} of FLOPs in {row.format.upper()}{region}{where}", console)
    for row in found.ran:
        _print(f"  {row.kind}: {row.name} in {row.format.upper()}, {row.num}×", console)
    for row in found.updates:
        lost = f"{row.num_lost:,} of {row.num_updates:,} updates round away"
        decay = f", {row.num_decays_lost:,} of {row.num_decays:,} decays" if row.num_decays else ""
        _print(f"  {row.group} in {row.format.upper()}: {lost}{decay}", console)
    for row in found.states:
        stuck = f"{row.num_stuck:,} of {row.num:,} values cannot decay by {row.decay:g}"
        _print(f"  {row.name} in {row.format.upper()}: {stuck}", console)
    for row in found.sums:
        lost = f"{100 * row.share:.2g} % lost over {row.num_passes} passes"
        _print(f"  accumulated gradients in {row.format.upper()}: {lost}", console)
    for row in found.peaks:
        _print(f"  largest {row.format.upper()} activation: {row.largest:.4g} of {row.end:.4g}", console)
    for row in found.exchanges:
        _print(f"  {row.who}: {row.formats}", console)
    switches = found.switches
    convolutions = _say_switch(switches.tf32_convolutions)
    _print(f"  FP32 products on a GPU: {switches.matmul}; TF32 convolutions: {convolutions}", console)
    sums = f"FP16 {_say_switch(switches.fp16_reductions)}, BF16 {_say_switch(switches.bf16_reductions)}"
    _print(f"  16-bit sums in cuBLAS: {sums}", console)


def _say_switch(value: bool | None) -> str:
    return "not told" if value is None else "on" if value else "off"


def print_differences(rows: Sequence[ManifestDifference], a: str, b: str, console: Console) -> None:
    """Print what is different between two manifests."""
    if not rows:
        _print(f"{a} and {b} compute in the same.", console)
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("", a, b):
        table.add_column(Text(name), overflow="fold")
    for row in rows:
        table.add_row(Text(row.what), Text(row.a), Text(row.b))
    console.print(table)


def _print(text: str, console: Console, *, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)
