"""A wrong kernel as a script of at most 30 lines, with the inputs of the call beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from floatline.base.files import write_whole
from floatline.errors import TraceError
from floatline.probe.trace.trace import Trace

INPUTS, SCRIPT = "inputs.safetensors", "reproduce.py"
_SCRIPT = '''"""{name} in 16 bits is not what it is in FP32 on the same inputs: exit code 1. Made by floatline."""
from math import inf, nan
from pathlib import Path
import runpy
import torch
from safetensors.torch import load_file
{definition}
device, tensors = torch.device, load_file(Path(__file__).with_name("{inputs}"), device="{place}")
args, kwargs = {args}, {kwargs}
def wide(value):
    if isinstance(value, (list, tuple)):
        return [wide(item) for item in value]
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value.clone()
    return torch.float32 if value in (torch.float16, torch.bfloat16) else value
def run(values, named):
    given = torch.ops.{name}(*values, **named)
    given = [given] if isinstance(given, torch.Tensor) else given or [{written}]
    return given[{output}][{element}].item()
with torch.no_grad():
    expected = run(wide(args), {{name: wide(value) for name, value in kwargs.items()}})
    result = run(args, kwargs)
print(f"in 16 bits {{result:.6g}}, in FP32 {{expected:.6g}}, allowed {allowed:.3g}")
raise SystemExit(int(not abs(result - expected) <= {allowed!r}))
'''


def write_kernel_reproducer(trace: Trace, folder: Path, *, defined_in: str = "") -> Path | None:
    """Write a script that calls the first wrong kernel of a trace again, and its inputs; a folder is made.

    Args:
        trace: The recorded step.
        folder: Where to.
        defined_in: The file that makes the kernel known to torch, where it is none of torch's own.

    Returns:
        The script; None where no kernel is wrong, or its inputs were too large to be kept.

    Raises:
        TraceError: It cannot be written there.
    """
    offences: list[dict[str, Any]] = trace.meta.get("kernels", [])
    offence = next((one for one in offences if one["op"] in trace.arguments), None)
    if offence is None:
        return None
    name, args, kwargs = cast("tuple[str, list[Any], dict[str, Any]]", trace.arguments[offence["op"]])
    tensors: dict[str, Tensor] = {}
    shown = _spell([*args], tensors), _spell(kwargs, tensors)
    first = next(iter(tensors.values()))
    text = _SCRIPT.format(
        name=name,
        inputs=INPUTS,
        definition="" if name.startswith("aten.") or not defined_in else f"runpy.run_path({defined_in!r})",
        place=first.device.type,
        args=shown[0],
        kwargs=shown[1],
        written="*[v for v in (*values, *named.values()) if isinstance(v, torch.Tensor)][-1:]",
        output=offence["output"],
        element=", ".join(map(str, offence["place"])) or "...",
        allowed=offence["allowed"],
    )
    text = "\n".join(line for line in text.splitlines() if line.strip()) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({key: value.cpu().contiguous() for key, value in tensors.items()}, folder / INPUTS)
        write_whole(folder / SCRIPT, text)
    except OSError as error:
        raise TraceError(f"The script cannot be written to '{folder}': {error.strerror}. Name another.") from None
    return folder / SCRIPT


def _spell(value: Any, tensors: dict[str, Tensor]) -> str:
    """A value as an expression; a tensor by its name in the file."""
    if isinstance(value, Tensor):
        name = f"t{len(tensors)}"
        tensors[name] = value.detach()
        return f'tensors["{name}"]'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_spell(item, tensors)}" for key, item in value.items()) + "}"  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_spell(item, tensors) for item in value) + "]"  # pyright: ignore[reportUnknownVariableType]
    return repr(value)
