"""A wrong part of a compiled module as a script of at most 30 lines, with its inputs beside it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from floatline.agreement.compiled.backends import Compiler
from floatline.agreement.compiled.graphs import GraphPart
from floatline.base.files import write_whole
from floatline.errors import ParityError

INPUTS, SCRIPT = "inputs.safetensors", "reproduce.py"
_SCRIPT = '''"""torch.compile gives other numbers than eager code and FP64 here: exit code 1. Made by floatline."""
{numbers}
from pathlib import Path
import torch
from safetensors.torch import load_file
{import_backend}
{part}
def run(function, dtype=None, factor=1.0):
    values = [(v * factor + 0.5 * (1 - factor)).to(dtype) if v.is_floating_point() else v for v in inputs]
    leaves = [v.requires_grad_() for v, tracked in zip(values, {tracked}) if tracked]
    with torch.autocast({autocast}):
        outputs = [out for out in function(*values) if out.is_floating_point()]
    loss = sum(out.sin().sum() for out in outputs if out.requires_grad)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True) if isinstance(loss, torch.Tensor) else []
    return [t.detach().double() for t in (*outputs, *values, *gradients) if t is not None and t.is_floating_point()]

device, tensors = torch.device, load_file(Path(__file__).with_name("{inputs}"))
inputs, compiled = [tensors[name] for name in {names}], {compiled}
run(compiled, factor=0.5)  # other numbers first: it must not keep them
wrong = False
for t, e, c in zip(run(part, torch.float64), run(part), run(compiled)):
    print(f"eager to FP64 {{(e - t).norm() / t.norm():.2e}}, compiled to FP64 {{(c - t).norm() / t.norm():.2e}}")
    wrong |= not (c - t).norm() <= 4 * (e - t).norm() + 1e-6 * t.norm()
raise SystemExit(int(wrong))
'''
MOST_LINES = 30


def write_reproducer(part: GraphPart, compiler: Compiler, folder: Path) -> Path:
    """Write the script and its inputs; a folder that is not there is made.

    Args:
        part: What is wrong.
        compiler: With which backend.
        folder: Where to.

    Raises:
        ParityError: It cannot be written in 30 lines, or not to that place.
    """
    import_backend, backend = _spell(compiler)
    options = f", options={dict(compiler.options)!r}" if compiler.options else ""
    names = [node.name for node in part.graph.graph.nodes if node.op == "placeholder"]
    if not all(isinstance(value, Tensor) for value in part.values):
        raise ParityError("The smallest part that is wrong takes numbers that are no tensors: no script is written.")
    function = _function_of(part)
    text = _SCRIPT.format(
        import_backend=import_backend,
        part=function,
        numbers="from math import inf, nan" if re.search(r"\b(inf|nan)\b", function) else "",
        names=names,
        tracked=[int(isinstance(value, Tensor) and value.requires_grad) for value in part.values],
        autocast=_spell_autocast(part),
        inputs=INPUTS,
        compiled=f"torch.compile(part, backend={backend}{options})",
    )
    text = re.sub(r"\n{2,}", "\n", text)
    if len(text.splitlines()) > MOST_LINES:
        raise ParityError(
            f"The smallest part that is wrong has {len(part.nodes)} operations, too many for a script of {MOST_LINES} "
            "lines. Compile a smaller module."
        )
    tensors = {name: _plain(value) for name, value in zip(names, part.values, strict=True) if isinstance(value, Tensor)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / INPUTS)
        write_whole(folder / SCRIPT, text)
    except OSError as error:
        raise ParityError(f"The reproducer cannot be written to '{folder}': {error.strerror}. Name another.") from None
    return folder / SCRIPT


def _spell_autocast(part: GraphPart) -> str:
    """Arguments of torch.autocast, as it was around the part."""
    states = part.autocast.devices
    device = next((kind for kind, (enabled, _) in states.items() if enabled), next(iter(states)))
    enabled, dtype = states[device]
    return f"{device!r}, {dtype}, {enabled}"


def _plain(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().clone()


def _function_of(part: GraphPart) -> str:
    """The nodes as a function of their inputs."""
    body = part.graph.code.strip().splitlines()
    body[0] = re.sub(r"def forward\(self, ?", "def part(", re.sub(r" : [\w.]+(?=[,)])", "", body[0]))
    body[0] = re.sub(r" -> .*:", ":", body[0])
    return "\n".join(re.sub(r";  .*= None.*", "", line) for line in body if line.strip())


def _spell(compiler: Compiler) -> tuple[str, str]:
    """The line that imports a backend, and what it is called."""
    backend: Any = compiler.backend
    if isinstance(backend, str):
        return "", repr(backend)
    home, name = _home_of(backend)
    return f"from {home} import {name}", name


def _home_of(backend: Callable[..., Any]) -> tuple[str, str]:
    home, name = getattr(backend, "__module__", ""), getattr(backend, "__qualname__", "")
    if not home or home == "__main__" or not name.isidentifier():
        raise ParityError(
            f"Backend {backend!r:.60} cannot be imported by its name, so that no script can use it. "
            "Define it at the top of a module."
        )
    return home, name
