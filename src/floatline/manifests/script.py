"""measure_script: a script runs as it is until one of its steps is measured, and gives its manifest. Without torch."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from floatline.errors import ManifestError, TargetError
from floatline.manifests.manifest import Manifest, read_manifest
from floatline.running.command import parse_command, run_to_end

_MAIN = "floatline.manifests.script_main"


def measure_script(
    words: Sequence[str], *, steps: int = 1, keep_stdout: bool = False, as_device: Literal["cuda"] | None = None
) -> Manifest:
    """Run a command until one of its steps is measured, and end it there.

    Args:
        words: The command: 'python', 'train.py' and so on.
        steps: Number of the applied step that is measured. One in which every learning rate is 0 is passed over.
        keep_stdout: Whether what the script prints goes to stderr.
        as_device: 'cuda' runs a script that is written for a GPU on the CPU, as a GPU would, where there is none.

    Raises:
        TargetError: The command runs no Python code, or its interpreter lacks what floatline needs.
        ManifestError: The script ended before that step.
    """
    command = parse_command(list(words))
    job = json.dumps({"steps": steps, "device": as_device or ""}, allow_nan=False)
    with tempfile.TemporaryDirectory(prefix="floatline-") as folder:
        report = Path(folder) / "report.json"
        code = run_to_end(command.inside(_MAIN, str(report), job), keep_stdout=keep_stdout)
        seen: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    if "missing" in seen:
        raise TargetError(
            f"{command.python} cannot import {seen['missing']}, which floatline needs there. Install it, or give the "
            f"interpreter that has it by its path; floatline itself runs in {sys.executable}."
        )
    if seen.get("manifest") is None:
        raise ManifestError(_explain(seen, code, steps))
    return read_manifest(seen["manifest"])


def _explain(seen: dict[str, Any], code: int, steps: int) -> str:
    """Why there is no manifest, and what to do."""
    ended = f"The script ended with exit code {code}" if code else "The script came to its end"
    if not seen:
        return f"{ended} before floatline could sum it up. Run it without floatline first."
    if seen["notes"]:
        return f"{ended}, and its step could not be measured: {seen['notes'][0]}. Try another with --steps."
    num = seen["num_steps"]
    if not num:
        return f"{ended} before an optimizer of torch made a step. Check that it trains, and that it calls a module."
    return f"{ended} after {num} applied step{'s' * (num > 1)}, before step {steps} could be measured. Lower --steps."
