"""A checkup for people: tables and sentences. Renders, computes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from floatline.base.texts import format_bytes
from floatline.checkup import Checkup
from floatline.checkup.scale import SCALE_HOW, Scale
from floatline.hardware import Device, Hardware, Machine
from floatline.report.manifest import print_holdings

if TYPE_CHECKING:
    from floatline.checkup.memory import Memory

_FORMATS = ("fp16", "bf16", "tf32", "fp8")
_COLOURS = {"native": "green", "emulated": "yellow", "slow": "yellow", "none": "dim"}
_PARTS = ("weights", "master", "gradients", "states", "copies", "activations", "total")
_TOPICS = {"setup": "Set-up", "precision": "Precision", "memory": "Memory", "speed": "Speed"}


def print_checkup(checkup: Checkup, console: Console) -> None:
    """Print a checkup."""
    if checkup.machine:
        _print_machine(checkup.machine, console)
    else:
        _print_hardware(checkup.hardware, console)
    _print_heading("Use", console)
    _print_indented(f"{checkup.choice.value.name}: {checkup.choice.reason}", console)
    if checkup.target:
        _print_heading(f"Target {checkup.target}" + (f" in {checkup.plan.name}" if checkup.plan else ""), console)
        _print_findings(checkup, console)
    if checkup.holdings:
        _print_heading("Held as it is built", console)
        print_holdings(checkup.holdings, console)
        _print_indented("After a step: floatline manifest -- python train.py", console, style="dim")
    if checkup.memory:
        _print_memory(checkup.memory, console)
    if checkup.scale:
        _print_scale(checkup.scale, console)
    for topic, title in _TOPICS.items():
        texts = [note.text for note in checkup.notes if note.topic == topic]
        if not texts:
            continue
        _print_heading(title, console)
        for text in texts:
            _print_indented(text, console)


def _print_machine(machine: Machine, console: Console) -> None:
    torch = f"torch {machine.torch} ({machine.backend})" if machine.torch else "torch is not installed"
    driver = f", driver {machine.driver}" if machine.driver else ""
    line = f"floatline {machine.floatline}, Python {machine.python}, {machine.system}, {torch}{driver}"
    console.print(Text(line))
    table = _format_table("device", "memory")
    for device in machine.devices:
        table.add_row(_name_device(device), _gib(device.memory), *_levels(device.hardware))
    console.print()
    console.print(table)
    _print_details(machine.best.hardware, console)


def _print_hardware(hardware: Hardware, console: Console) -> None:
    table = _format_table("device")
    table.add_row(f"{hardware.id}  {hardware.title}", *_levels(hardware))
    console.print(table)
    _print_details(hardware, console)


def _format_table(*first: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in (*first, *_FORMATS):
        table.add_column(name, overflow="fold")
    return table


def _levels(hardware: Hardware) -> list[Text]:
    levels = [hardware.supports(name).level for name in _FORMATS]
    return [Text(level, style=_COLOURS[level]) for level in levels]


def _print_details(hardware: Hardware, console: Console) -> None:
    for name in _FORMATS:
        note = hardware.supports(name).note
        if note:
            _print_indented(f"{name}: {note}", console)
    if hardware.note:
        _print_indented(hardware.note, console)


def _name_device(device: Device) -> str:
    return f"{device.where}  {device.name}"


def _gib(memory: int | None) -> str:
    return f"{memory / 2**30:.1f} GiB" if memory else "?"


def _print_findings(checkup: Checkup, console: Console) -> None:
    if checkup.memory is None:
        return
    if not checkup.findings:
        _print_indented("No finding. Checked: stored weights, optimizer, one forward pass.", console)
    for finding in checkup.findings:
        for line in str(finding).splitlines():
            _print_indented(line.lstrip(), console, by=2 + len(line) - len(line.lstrip()))


def _print_memory(memory: Memory, console: Console) -> None:
    _print_heading("Expected memory of one step", console)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("part", overflow="fold")
    for name in memory.parts:
        table.add_column(name, justify="right", overflow="fold")
    for part in _PARTS:
        style = "bold" if part == "total" else ""
        sizes = [Text(format_bytes(getattr(parts, part)), style=style) for parts in memory.parts.values()]
        table.add_row(Text(part, style=style), *sizes)
    console.print(Padding(table, (0, 0, 0, 2), expand=False))
    for part, how in memory.how.items():
        _print_indented(f"{part}: {how}", console, style="dim")


def _print_scale(scale: Scale, console: Console) -> None:
    model = scale.model
    _print_heading(f"{model.name} in {scale.plan} under FSDP2, one of {scale.world} processes", console)
    _print_indented(
        f"{model.num_parameters:,} parameters, {len(model.blocks)} blocks, {model.tokens:,} tokens a process", console
    )
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for part, size in [*scale.parts.items(), ("total", scale.total)]:
        table.add_row(part, Text(format_bytes(size), justify="right"), Text(SCALE_HOW.get(part, ""), style="dim"))
    console.print(Padding(table, (0, 0, 0, 2), expand=False))
    _print_heading("Received in a step, and sent as much", console)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name, size in scale.traffic.items():
        table.add_row(name, Text(format_bytes(size), justify="right"))
    console.print(Padding(table, (0, 0, 0, 2), expand=False))
    _print_heading("Time of a step, at least", console)
    if scale.rates is None or scale.least_seconds is None:
        _print_indented("Not told: no rates are known for this device. Ask with --on A100, H100 or H200.", console)
        return
    listed = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in scale.seconds.items())
    _print_indented(f"{scale.least_seconds:.3g} s: {listed}", console)
    _print_indented(
        f"At the rates of the data sheet ({scale.rates.source}), of which a run reaches a part; communication "
        "hidden behind computing. Worked out on paper: no run on several GPUs was made.",
        console,
        style="dim",
    )


def _print_heading(text: str, console: Console) -> None:
    console.print()
    console.print(Text(text, style="bold"))


def _print_indented(text: str, console: Console, *, by: int = 2, style: str = "") -> None:
    console.print(Padding(Text(text, style=style), (0, 0, 0, by), expand=False))
