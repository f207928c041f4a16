"""diagnose_forward_script: a script that trains nothing runs as it is, and its forward passes are looked into."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from floatline.diagnosis.forward.result import ForwardDiagnosis, OutputRow
from floatline.diagnosis.islands.island import Island
from floatline.errors import TargetError
from floatline.findings import Finding
from floatline.probe.steps.outputs import OutputMatch
from floatline.running.command import parse_command, pass_on_ending, run_to_end

_MAIN = "floatline.diagnosis.forward.script_main"


def diagnose_forward_script(
    words: Sequence[str],
    *,
    searches: bool = True,
    keep_stdout: bool = False,
    as_device: Literal["cuda"] | None = None,
) -> ForwardDiagnosis:
    """Run a command, and say whether the forward passes in it may run in 16 bits.

    Some calls of each model that it calls are kept with their inputs, and run again on copies in FP16, BF16 and FP32
    when they have returned; the script's own numbers are not touched. What it computes in 16 bits outside of modules is
    recorded as well.

    Args:
        words: The command: 'python', 'generate.py' and so on.
        searches: Whether the smallest FP32 island is looked for.
        keep_stdout: Whether what the script prints goes to stderr.
        as_device: 'cuda' runs a script that is written for a GPU on the CPU, as a GPU would, where there is none.

    Raises:
        TargetError: The command runs no Python code.
    """
    command, text, began = parse_command(list(words)), " ".join(words), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="floatline-") as folder:
        report = Path(folder) / "report.json"
        start = command.inside(_MAIN, str(report), as_device or "", "searches" if searches else "")
        code = run_to_end(start, keep_stdout=keep_stdout)
        seen: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    if "missing" in seen:
        raise TargetError(
            f"{command.python} cannot import {seen['missing']}, which floatline needs there. Install it, or give the "
            f"interpreter that has it by its path; floatline itself runs in {sys.executable}."
        )
    seconds = time.perf_counter() - began
    if not seen:
        pass_on_ending(code)
        ended = f"the script ended with exit code {code} before floatline could sum it up"
        return ForwardDiagnosis(text, "", (), seconds, no_verdict=ended, exit_code=code)
    return replace(read_forward(text, seen), seconds=seconds, exit_code=code)


def read_forward(text: str, seen: Mapping[str, Any]) -> ForwardDiagnosis:
    """A diagnosis from the JSON that it was written as."""
    return ForwardDiagnosis(
        text,
        seen["precision"],
        tuple(Finding.read(entry) for entry in seen["findings"]),
        seen["seconds"],
        tried=tuple(seen["tried"]),
        notes=tuple(seen["notes"]),
        unexplained=seen["unexplained"],
        fails_in_fp32=seen["fails_in_fp32"],
        no_verdict=seen.get("no_verdict", ""),
        outputs=tuple(
            OutputRow(row["arm"], tuple(OutputMatch(**match) for match in row["matches"]), row["failure"])
            for row in seen["outputs"]
        ),
        island=None if seen["island"] is None else Island.from_json(seen["island"]),
    )
