"""Writes docs/hardware.md from the hardware facts: python tools/hardware_page.py."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from typer.testing import CliRunner

from floatline.checkup.choose import choose_plan
from floatline.cli.main import app
from floatline.hardware import HARDWARE, Hardware
from floatline.hardware.facts import SOURCES

PAGE = Path(__file__).parent.parent / "docs" / "hardware.md"

INTRO = """\
<!-- Made by tools/hardware_page.py from src/floatline/hardware/. Do not edit by hand. -->

# What devices compute natively

`floatline doctor` looks at this machine; `--on` answers for another one:

```console
$ floatline doctor --on T4
{output}
```

| level | meaning |
|---|---|
| **native** | hardware multiplies matrices in it, at FP32's speed or faster; with a \\* on matrix units |
| emulated | software widens to FP32 and rounds back: it saves memory, not time |
| slow | it runs, far slower than FP32 |
| none | it does not run |

**The BF16 trap.** On a T4, V100, P100 or TITAN RTX `torch.cuda.is_bf16_supported()` is True: it counts emulation.
`torch.cuda.is_bf16_supported(including_emulation=False)` tells the truth.

```python
from floatline.checkup import choose_plan
from floatline.hardware import find_hardware

print(find_hardware("titan rtx").bf16)  # emulated (in FP32; ...)
print(choose_plan("titan rtx").reason)
```
"""


def page(devices: Iterable[Hardware] = HARDWARE.values()) -> str:
    """The whole page as Markdown."""
    devices = list(devices)
    used = [key for key in SOURCES if any(key in device.sources for device in devices)]
    numbers = {key: number for number, key in enumerate(used, start=1)}
    lines = ["| device | fp16 | bf16 | tf32 | fp8 | start with | sources |", "|---|---|---|---|---|---|---|"]
    lines += [_row(device, numbers) for device in devices]
    notes = [f"- `{device.id}`: {device.note}" for device in devices if device.note]
    sources = [f"{number}. {SOURCES[key]}" for key, number in numbers.items()]
    printed = CliRunner().invoke(app, ["doctor", "--on", "T4"]).stdout
    intro = INTRO.format(output="\n".join(line.rstrip() for line in printed.splitlines()))
    return "\n".join([intro, "## The table", "", *lines, "", *notes, "", "## Sources", "", *sources, ""])


def _row(device: Hardware, numbers: dict[str, int]) -> str:
    cells = [f"`{device.id}` {device.title}: {', '.join(device.names)}"]
    for name in ("fp16", "bf16", "tf32", "fp8"):
        support = device.supports(name)
        level = (
            f"**native{chr(92) + '*' if support.matrix_units else ''}**" if support.level == "native" else support.level
        )
        note = "" if support.matrix_units and support.note == "tensor cores" else support.note
        cells.append(f"{level}: {note}" if note else level)
    cells.append(f"`{choose_plan(device).value.name}`")
    cells.append(", ".join(str(numbers[key]) for key in device.sources))
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
