"""A forward pass for people: the finding as of any diagnosis, then its outputs beside FP32's, and the island."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from floatline.base.texts import printable
from floatline.diagnosis.forward.result import say_percent
from floatline.report.diagnosis import print_diagnosis

if TYPE_CHECKING:
    from rich.console import Console

    from floatline.diagnosis.forward.result import ForwardDiagnosis, OutputRow
    from floatline.probe.steps.outputs import OutputMatch

_ARMS = {"floor": "FP32, weights moved by half a unit"}
_MOST_OUTPUTS = 4


def print_forward(diagnosis: ForwardDiagnosis, console: Console) -> None:
    """Print a diagnosis of a forward pass."""
    print_diagnosis(diagnosis, console)
    if any(row.matches or row.failure for row in diagnosis.outputs):
        console.print(_draw_outputs(diagnosis.outputs))
    island = diagnosis.island
    if island is None or not island.needed:
        return
    console.print(Text("\nThe smallest part that must compute in FP32", style="bold"))
    for line in str(island).splitlines():
        console.print(Text(f"  {printable(line)}"), soft_wrap=True)
    if diagnosis.layers:
        console.print(Text("The same as names for other tools (names only, nothing was exported)", style="bold"))
        nodes: list[str] = diagnosis.layers["onnx_node_prefixes"]
        console.print(Text(f"  modules   {printable(', '.join(diagnosis.layers['modules']))}"), soft_wrap=True)
        console.print(Text(f"  ONNX      nodes below {printable(', '.join(nodes))}"), soft_wrap=True)
        scopes: list[str] = diagnosis.layers["coreml_scopes"]
        console.print(Text(f"  CoreML    operations in scopes {printable(', '.join(scopes))}"), soft_wrap=True)
        console.print(Text(f"  TensorRT  {printable(diagnosis.layers['tensorrt'])}"), soft_wrap=True)


def _draw_outputs(rows: tuple[OutputRow, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for title in ("\noutput beside FP32", "\noff by", "\ncosine", "\nKL", "\ntop-1"):
        table.add_column(title)
    for row in rows:
        arm = _ARMS.get(row.arm, row.arm.upper())
        if row.failure:
            table.add_row(printable(f"{arm}: {row.failure}"))
        for match in row.matches[:_MOST_OUTPUTS]:
            table.add_row(printable(f"{arm}, {match.name}"), *_describe(match))
    return table


def _describe(match: OutputMatch) -> tuple[str, str, str, str]:
    off = say_percent(match.error)
    if match.kind == "choices":
        return f"{off} others", "", "", ""
    cosine = "" if match.cosine != match.cosine else f"{match.cosine:.6f}"
    kl = "" if match.kl is None else f"{match.kl:.2g}"
    return off, cosine, kl, "" if match.top1 is None else f"{100 * match.top1:.4g} %"
