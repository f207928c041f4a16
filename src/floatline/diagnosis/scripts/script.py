"""diagnose_script: a whole script runs as it is, in a process of its own, and is explained. Without torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import floatline
from floatline.causes import Family
from floatline.diagnosis.fix_trials import read_finding, run_quietly, try_fixes
from floatline.diagnosis.result import Diagnosis
from floatline.errors import TargetError

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?(\.exe)?")
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_HELP = "Give 'python train.py ...', 'python -m package.module ...' or 'train.py ...'."


@dataclass(frozen=True)
class Command:
    """A command that runs Python code.

    Args:
        python: Path of the interpreter.
        options: Options of the interpreter, such as '-u'.
        words: The script's file, or '-m' and a module, and its arguments.
    """

    python: str
    options: tuple[str, ...]
    words: tuple[str, ...]


def parse_command(words: list[str]) -> Command:
    """Take a command apart.

    Raises:
        TargetError: It is empty, runs no Python code, or names an interpreter or a script that is not there.
    """
    if not words:
        raise TargetError(f"No command was given after '--'. {_HELP}")
    first, *rest = words
    if not _PYTHON.fullmatch(Path(first).name):
        if not first.endswith(".py"):
            raise TargetError(f"Command '{first}' is not Python. {_HELP}")
        return Command(sys.executable, (), (_check_script(first), *rest))
    python = shutil.which(first)
    if python is None:
        raise TargetError(f"There is no interpreter '{first}'. {_HELP}")
    options: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "-m" and rest:
            return Command(python, tuple(options), ("-m", *rest))
        if word in ("-c", "-m", "-i") or word.startswith(("-c", "--help", "--version")):
            raise TargetError(f"Option '{word}' of {first} leaves no script to observe. {_HELP}")
        options.append(word)
        if word in _WITH_VALUE and rest:
            options.append(rest.pop(0))
    if not rest or rest[0] == "-":
        raise TargetError(f"'{first}' alone runs no script. {_HELP}")
    return Command(python, tuple(options), (_check_script(rest[0]), *rest[1:]))


def _check_script(file: str) -> str:
    path = Path(file)
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise TargetError(f"Script '{file}' is a folder without __main__.py. Name the file to run.")
    if not path.exists():
        raise TargetError(f"There is no script '{file}'. Check the path, which is taken from the current folder.")
    return file


# The first entry of sys.path is what -c put there: the script's own takes its place. floatline comes last, so that it
# hides nothing of the script's.
_START = """
import sys
if not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):
    del sys.path[0]
report, trace, home, device, trial, *words = sys.argv[1:]
if home not in sys.path:
    sys.path.append(home)
try:
    from floatline.diagnosis.scripts.main import main
except ImportError as error:
    open(report, "w").write('{"missing": "%s"}' % (error.name or "floatline"))
    sys.exit(2)
main(report, trace, words, device, trial)
"""


@dataclass(frozen=True, kw_only=True)
class ScriptDiagnosis(Diagnosis):
    """What a script's training suffers from.

    Args:
        exit_code: The script's own.
    """

    exit_code: int = 0

    @property
    def status(self) -> int:
        """The exit code of the command: 2 without a verdict; else the script's own, or 1 where something is wrong."""
        return 2 if self.verdict == "no-verdict" else self.exit_code or super().status

    def as_json(self) -> dict[str, Any]:
        """The fields of the command-line contract, and what only a script has."""
        own = {"exit_code": self.exit_code, "unexplained": self.unexplained, "notes": list(self.notes)}
        return super().as_json() | own


def diagnose_script(
    words: Sequence[str],
    *,
    trace_path: str | None = None,
    keep_stdout: bool = False,
    as_device: Literal["cuda"] | None = None,
    tries_fixes: bool = False,
    on_progress: Callable[[str], None] | None = None,
) -> ScriptDiagnosis:
    """Run a command and name what its training suffers from.

    The script runs once, as it is, in its own process. Its input and output are its own.

    Args:
        words: The command: 'python', 'train.py' and so on.
        trace_path: Where to keep the trace of the step that was looked into.
        keep_stdout: Whether what the script prints goes to stderr.
        as_device: 'cuda' runs a script that is written for a GPU on the CPU, as a GPU would, where there is none.
        tries_fixes: Whether changes of its source are tried: the script then runs again for some steps, its output is
            not shown, and what it writes is kept apart.
        on_progress: Told what is tried.

    Raises:
        TargetError: The command runs no Python code.
    """
    command = parse_command(list(words))
    text = " ".join(words)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="floatline-") as folder:
        report = Path(folder) / "report.json"
        home = str(Path(floatline.__file__).parents[1])
        trace = str(Path(trace_path).absolute()) if trace_path else ""
        given = [str(report), trace, home, as_device or ""]
        start = [command.python, *command.options, "-c", _START, *given]
        code = _run([*start, "", *command.words], keep_stdout=keep_stdout)
        seen: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    seconds = time.perf_counter() - began
    if "missing" in seen:
        raise TargetError(
            f"{command.python} cannot import {seen['missing']}, which floatline needs there. Install it, or give the "
            f"interpreter that has it by its path; floatline itself runs in {sys.executable}."
        )
    found = read_report(text, seen, code, seconds)
    if not tries_fixes or found.primary is None:
        return found
    steps = _count_steps(found.primary.cause.family, seen)

    def run_changed(sources: Mapping[str, str]) -> Diagnosis | str:
        return _run_changed(command, as_device or "", sources, steps)

    def say(what: str) -> None:
        if on_progress is not None:
            on_progress(f"{what}: the script runs again for up to {steps} steps, its output is not shown")

    tried = try_fixes(found, run_changed, root=Path.cwd(), say=say)
    return replace(found, findings=tried.findings, fixes=tried.fixes, seconds=time.perf_counter() - began)


_AT_LEAST, _MORE = 40, 20  # steps of a trial


def _count_steps(family: Family, seen: Mapping[str, Any]) -> int:
    """Steps of a trial: as many as it took to see what is wrong, and some more.

    What is wrong with numbers is seen in a step that was recorded. What is wrong with the loop or the data may happen
    once, in any step of the run.
    """
    known = max(_AT_LEAST, (seen["first_bad_step"] or 0) + _MORE, seen["last_recorded"] + _MORE)
    return max(known, seen["num_steps"]) if family in ("loop", "not-precision") else known


def _run_changed(command: Command, device: str, sources: Mapping[str, str], steps: int) -> Diagnosis | str:
    """Diagnose the script again, in a changed form and for some steps; what it writes is kept apart."""
    with tempfile.TemporaryDirectory(prefix="floatline-") as folder:
        report, trial, writes, temporary = (
            Path(folder, name) for name in ("report.json", "trial.json", "writes", ".tmp")
        )
        writes.mkdir()
        temporary.mkdir()
        job = {"sources": dict(sources), "steps": steps, "folder": str(writes)}
        trial.write_text(json.dumps(job), encoding="utf-8")
        home = str(Path(floatline.__file__).parents[1])
        start = [command.python, *command.options, "-c", _START, str(report), "", home, device, str(trial)]
        # Services that keep runs elsewhere are not told of a trial.
        elsewhere = {"WANDB_MODE": "disabled", "MLFLOW_TRACKING_URI": writes.as_uri(), "COMET_MODE": "disabled"}
        # Compilers look for temporary files where they were written: a hidden folder is not kept apart once more.
        elsewhere |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
        problem = run_quietly([*start, *command.words], env=os.environ | elsewhere)
        seen: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    if not seen or "missing" in seen:
        return problem or "the process that tried it ended without a word"
    if seen["refused"]:
        return f"the script cannot run beside its own files, {seen['refused'][0]}"
    found = read_report("the script", seen, seen["exit_code"], 0.0)
    num = seen["num_steps"]
    return replace(
        found, notes=(f"{num:,} steps without a finding, {seen['num_recorded']} of them compared with FP32",)
    )


_NOT_LOOKED_AT = (
    "training steps were looked at, and what is computed in 16 bits before the first of them; what runs without "
    "gradients between steps, such as evaluation, was not"
)


def read_report(text: str, seen: dict[str, Any], code: int, seconds: float) -> ScriptDiagnosis:
    """What the process of a script wrote down, as a diagnosis.

    Args:
        text: The command, as the user wrote it.
        seen: The report; {} where the process ended before it was written.
        code: The exit code of the process, as a shell would have it.
        seconds: How long it took.

    """
    if not seen:
        ended = f"the script {_say_end(code)} before floatline could sum it up"
        return ScriptDiagnosis(text, "", (), seconds, exit_code=code, no_verdict=ended)
    if not seen["num_backward"] and not seen["findings"] and not code:
        unseen = "no backward pass was seen: the command does not train, or takes its gradients by torch.func"
        return ScriptDiagnosis(text, seen["precision"], (), seconds, notes=tuple(seen["notes"]), no_verdict=unseen)
    found = ScriptDiagnosis(
        text,
        seen["precision"],
        tuple(read_finding(entry) for entry in seen["findings"]),
        seconds,
        notes=tuple(seen["notes"]),
        exit_code=code,
        unexplained=seen["unexplained"],
        fails_in_fp32=seen["fails_in_fp32"],
        no_verdict="" if seen["unexplained"] else _explain_end(seen, code) or seen["unseen"],
    )
    return replace(found, notes=(*found.notes, _NOT_LOOKED_AT)) if found.verdict == "healthy" else found


def _explain_end(seen: dict[str, Any], code: int) -> str:
    """Why a script that did not come to its end has no verdict, its own words first; '' for one that did."""
    if not code:
        return ""
    steps = seen["num_steps"]
    after = f"after {steps:,} step{'s' if steps > 1 else ''}" if steps else "before its first step"
    words = seen["exception"].strip().splitlines() or [seen["last_line"]]
    first = words[0].rstrip(" .:")
    said = f"{first}: " if first else ""
    return f"{said}the script {_say_end(code)} {after}"


def _say_end(code: int) -> str:
    """What a shell's exit code says of how a process ended."""
    names = {number.value: number.name for number in signal.Signals}
    return f"was ended by {names[code - 128]}" if code - 128 in names else f"ended with exit code {code}"


def _run(start: list[str], *, keep_stdout: bool) -> int:
    """Run a process to its end; gives the exit code as a shell would."""
    process = subprocess.Popen(start, stdout=sys.stderr if keep_stdout else None)
    with _passing_on(process):
        code = process.wait()
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Generator[None]:
    """Let the script have the signals: Ctrl-C reaches it by itself, SIGTERM is sent on."""

    def wait_on(*_: object) -> None:
        pass

    def send_on(number: int, *_: object) -> None:
        process.send_signal(number)

    old = {
        signal.SIGINT: signal.signal(signal.SIGINT, wait_on),
        signal.SIGTERM: signal.signal(signal.SIGTERM, send_on),
    }
    try:
        yield
    finally:
        for number, action in old.items():
            signal.signal(number, action)
