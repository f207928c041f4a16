"""Diagnoses every case as a target and as a script, under CPU's autocast lists and under CUDA's.

python -m tests.cases.both_ways [PREFIX ...] [--lists cpu|cuda] prints what each way says, and where they differ.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

import torch
from tests.cases.harness import Case, all_cases

from floatline.diagnosis.scripts.main import explain
from floatline.diagnosis.scripts.script_report import read_report
from floatline.diagnosis.target_diagnosis import diagnose
from floatline.errors import FloatlineError
from floatline.numerics.cuda_autocast import cpu_autocast_lists, cuda_autocast_lists
from floatline.numerics.half_on_cpu import HalfOnCPU
from floatline.probe.scripts.run import ScriptWatch

Lists = Literal["cpu", "cuda"]
LISTS: tuple[Lists, ...] = ("cpu", "cuda")

# What a user writes for the case, in the order in which floatline's plain loop does it. It stands below the case's own
# lines, so that these stay where they are.
LOOP = """

def _run_as_script(device="{device}"):
    torch.manual_seed(0)
    model, batches, loss_fn, precision, make_optimizer = {name}()
    whole = {{"fp16-true": torch.float16, "bf16-true": torch.bfloat16}}.get(precision)
    mixed = {{"fp16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}}.get(precision)

    def prepare(value):
        if isinstance(value, (tuple, list)):
            return type(value)(map(prepare, value))
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device, whole if value.is_floating_point() else None)

    if device != "cpu":
        model.to(device)
        torch.set_default_device(device)
    if whole:
        model.to(whole)
    optimizer = make_optimizer(model)
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16-mixed")
    model.train()
    for step in range(40):
        inputs, targets = prepare(batches[step % len(batches)])
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=mixed or torch.float16, enabled=mixed is not None):
            loss = loss_fn(model(*inputs), *targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


if __name__ == "__main__":
    _run_as_script()
"""
CALL = """

if __name__ == "__main__":
    {name}()
"""


@dataclass(frozen=True)
class Said:
    """What a diagnosis says first.

    Args:
        verdict: Of the diagnosis.
        cause: Of the first finding; '' where there is none.
        line: Its file's name and its line; '' where it names none.
        module: Its module.
        text: What was seen, or why there is no verdict.
    """

    verdict: str
    cause: str = ""
    line: str = ""
    module: str = ""
    text: str = ""

    def __str__(self) -> str:
        """In one line."""
        return " ".join(part for part in (self.verdict, self.cause, self.line, self.module) if part)


def read_answer(answer: dict[str, Any]) -> Said:
    """What --format json prints, in short."""
    if not answer["findings"]:
        return Said(answer["verdict"], text=answer.get("unexplained", "") or answer.get("no_verdict", ""))
    first = answer["findings"][0]
    line = f"{PurePath(first['file']).name}:{first['line']}" if first["file"] else ""
    return Said(answer["verdict"], first["cause"], line, first["module"], first["seen"])


def write_script(case: Case, folder: Path, *, name: str = "", device: str = "cpu") -> Path:
    """The case as a script: its own lines, and below them the loop, or the call of train()."""
    end = LOOP if case.kind == "build" else CALL
    text = case.path.read_text(encoding="utf-8")
    if device != "cpu":
        text = text.replace('"cpu"', f'"{device}"')
    path = folder / case.path.name
    path.write_text(text + end.format(name=name or case.kind, device=device), encoding="utf-8")
    return path


def diagnose_target(text: str) -> Said:
    """A target, in this process."""
    with _as_it_was(), _quietly():
        try:
            return read_answer(diagnose(text).as_json())
        except FloatlineError as error:
            return Said("error", text=str(error))


def diagnose_as_script(script: Path) -> Said:
    """A script, in this process."""
    with _as_it_was(), _quietly():
        watched = ScriptWatch([str(script)])
        watched.run()
        seen = explain(watched.sum_up(), "")
        try:
            return read_answer(read_report(script.name, seen, watched.exit_code, 0.0).as_json())
        except FloatlineError as error:
            return Said("error", text=str(error))


@contextlib.contextmanager
def under(lists: Lists) -> Generator[None]:
    """CPU's autocast lists as they are, or CUDA's and a GPU's 16-bit products."""
    with HalfOnCPU(), cpu_autocast_lists() if lists == "cpu" else cuda_autocast_lists():
        yield


def ask(case: Case, lists: Lists, *, name: str = "") -> tuple[Said, Said]:
    """What is said of the case as a target, and as a script."""
    with tempfile.TemporaryDirectory() as folder, under(lists):
        target = diagnose_target(f"{case.path}:{name}" if name else str(case.path))
        return target, diagnose_as_script(write_script(case, Path(folder), name=name))


def agree(case: Case, target: Said, script: Said) -> bool:
    """Whether verdict and cause are the same, and the place.

    Two places are the same where the line is, or the module, or where both are right by the case. What lies in the
    loop has a line in the script alone: a target has floatline's loop.
    """
    if (target.verdict, target.cause) != (script.verdict, script.cause):
        return False
    if not target.cause or (target.line and target.line == script.line):
        return True
    if target.module and target.module == script.module:
        return True
    return is_right(case, target) and (is_right(case, script) or _is_in_loop(case, script))


def is_right(case: Case, said: Said) -> bool:
    """Whether it is a place that the case names."""
    return said.line in case.places or (said.module != "" and said.module in case.places)


def _is_in_loop(case: Case, said: Said) -> bool:
    file, _, line = said.line.rpartition(":")
    return file == case.path.name and int(line) > len(case.path.read_text(encoding="utf-8").splitlines())


@contextlib.contextmanager
def _as_it_was() -> Generator[None]:
    """The arguments, the search path, the threads and the seed of this process, put back afterwards."""
    argv, path, threads, state = list(sys.argv), list(sys.path), torch.get_num_threads(), torch.get_rng_state()
    device = torch.get_default_device()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch.get_default_device() != device:
            torch.set_default_device(None)
        sys.argv[:], sys.path[:] = argv, path
        torch.set_num_threads(threads)
        torch.set_rng_state(state)


@contextlib.contextmanager
def _quietly() -> Generator[None]:
    with (
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def main() -> None:
    """Ask about each case, both ways, and print what is said."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prefixes", nargs="*", metavar="PREFIX")
    parser.add_argument("--lists", choices=LISTS)
    parser.add_argument("--fixed", action="store_true", help="the fixed twins")
    asked = parser.parse_args()
    same: dict[Lists, int] = dict.fromkeys(LISTS, 0)
    cases = [case for case in all_cases() if case.name.startswith(tuple(asked.prefixes) or ("",))]
    for case in cases:
        for lists in [asked.lists] if asked.lists else LISTS:
            began = time.perf_counter()
            target, script = ask(case, lists, name="fixed" if asked.fixed else "")
            same[lists] += agree(case, target, script)
            mark = "     " if agree(case, target, script) else "DIFF "
            wrong = "" if target.cause == case.expect["cause"] or asked.fixed else f" [expects {case.expect['cause']}]"
            print(f"{mark}{case.name} {lists}: {target}{wrong} ({time.perf_counter() - began:.1f} s)", flush=True)
            if mark.strip():
                print(f"        script: {script}: {script.text[:160]}\n        target: {target.text[:160]}", flush=True)
    print(f"of {len(cases)} cases agree: {same}")


if __name__ == "__main__":
    main()
