"""Command: a command line that runs Python code, taken apart, and how a process of floatline's runs it. No torch."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import floatline
from floatline.errors import TargetError

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?(\.exe)?")
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
# Of torchrun: options that take no value, and those whose value may stand in the same word.
_TORCHRUN_FLAGS = ("--standalone", "--virtual-local-rank", "--no-python")
_TORCHRUN_SHORT = ("-r", "-t")
_MPI = ("mpirun", "mpiexec", "srun")
# The first entry of sys.path is what -c put there: the script's own takes its place. floatline comes last, so that it
# hides nothing of the script's.
_START = """
import sys
if not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):
    del sys.path[0]
module, report, home, num, *rest = sys.argv[1:]
if home not in sys.path:
    sys.path.append(home)
try:
    import importlib
    main = importlib.import_module(module).main
except ImportError as error:
    missing = error.name or "floatline"
    if report:
        open(report, "w").write('{"missing": "%s"}' % missing)
    else:
        said = "floatline: %s cannot import %s, which floatline needs there. Install it there.\\n"
        sys.stderr.write(said % (sys.executable, missing))
    sys.exit(2)
except KeyboardInterrupt:
    sys.exit(130)
main(report, *rest[: int(num)], rest[int(num) :])
"""
# Names what the interpreter has not, of what is given after floatline's home.
_CHECK = """
import sys
from importlib.util import find_spec
sys.path.append(sys.argv[1])
sys.stdout.write(next((name for name in sys.argv[2:] if find_spec(name) is None), ""))
"""
_NEEDED = ("torch", "numpy", "pydantic", "yaml")
LIMIT = 300.0  # seconds of a run whose output nobody sees
_PATIENCE = 20.0  # seconds for a launcher to end its processes
_HELP = "Give 'python train.py ...', 'python -m package.module ...' or 'train.py ...'."


@dataclass(frozen=True)
class Command:
    """A command that runs Python code.

    Args:
        python: Path of the interpreter.
        options: Options of the interpreter, such as '-u'.
        words: The script's file, or '-m' and a module, and its arguments.
        launcher: What starts it several times, such as 'torchrun' and its options; empty where nothing does.
    """

    python: str
    options: tuple[str, ...]
    words: tuple[str, ...]
    launcher: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What runs, for people: 'train.py' or 'package.module'."""
        word = self.words[1] if self.words[0] == "-m" else self.words[0]
        return Path(word).name or word

    def check_interpreter(self) -> None:
        """Refuse an interpreter without torch now: before a word is said of a run that cannot be.

        Of what a launcher starts, perhaps on another machine, each process tells it itself.

        Raises:
            TargetError: It lacks what floatline needs there.
        """
        if self.launcher:
            return
        start = [self.python, *self.options, "-c", _CHECK, _find_home(), *_NEEDED]
        try:
            done = subprocess.run(start, capture_output=True, text=True, timeout=_PATIENCE, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired):
            return  # the run itself will tell
        if done.returncode == 0 and done.stdout in _NEEDED:
            raise self.lacks(done.stdout)

    def lacks(self, missing: str) -> TargetError:
        """That the interpreter has no such module, and what to do."""
        return TargetError(
            f"{self.python} cannot import {missing}, which floatline needs there. Install it, or give the interpreter "
            f"that has it by its path; floatline itself runs in {sys.executable}."
        )

    def inside(self, module: str, report: str, *settings: str) -> list[str]:
        """The command line that runs the script by `main` of one of floatline's modules.

        Args:
            module: Its `main` is called with the report, the settings and the words.
            report: Where JSON goes; it names the module that is missing, where one is.
            settings: Texts that `main` takes.
        """
        given = [module, report, _find_home(), str(len(settings)), *settings]
        return [*self.launcher, self.python, *self.options, "-c", _START, *given, *self.words]


def _find_home() -> str:
    """The folder that floatline is imported from."""
    return str(Path(floatline.__file__).parents[1])


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


def parse_launched(words: list[str]) -> Command:
    """The same for a command that torchrun, accelerate or an MPI may start several times.

    Raises:
        TargetError: It is empty, runs no Python code, or names something that is not there.
    """
    first = Path(words[0]).name if words else ""
    if first == "accelerate" and words[1:2] == ["launch"]:
        return _parse_accelerate(words)
    if first in _MPI:
        return _parse_mpi(words)
    if first == "torchrun":
        launcher, rest = [words[0]], words[1:]
    elif _PYTHON.fullmatch(first) and words[1:3] == ["-m", "torch.distributed.run"]:
        launcher, rest = words[:3], words[3:]
    else:
        return parse_command(words)
    program = _find_program(words[0])
    is_module = False
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name = word.replace("_", "-")
        if name in ("-m", "--module"):
            is_module = True
            continue
        if name == "--run-path":  # how torchrun would run the script itself
            continue
        launcher.append(word)
        attached = "=" in word or (word[:2] in _TORCHRUN_SHORT and len(word) > 2)
        if not attached and name not in _TORCHRUN_FLAGS and rest:
            launcher.append(rest.pop(0))
    if not rest or "--no-python" in launcher or "--no_python" in launcher:
        raise TargetError(f"'{shlex.join(words)}' names no Python script. Give 'torchrun ... train.py ...'.")
    script = ("-m", *rest) if is_module else (_check_script(rest[0]), *rest[1:])
    beside = Path(program) if first != "torchrun" else Path(program).with_name("python")
    python = str(beside) if beside.exists() else sys.executable
    return Command(python, ("-u",), script, (*launcher, "--no-python"))  # torchrun runs scripts with -u


def _find_program(name: str) -> str:
    program = shutil.which(name)
    if program is None:
        raise TargetError(f"There is no program '{name}'. Check the spelling, or give its full path.")
    return program


def _parse_accelerate(words: list[str]) -> Command:
    """Taken apart by accelerate's own parser, which knows which of its many options take a value."""
    program = Path(_find_program(words[0]))
    try:
        own: Any = importlib.import_module("accelerate.commands.launch")
    except ImportError:
        raise TargetError("'accelerate launch' needs accelerate, which is not installed beside floatline.") from None
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            given: Any = own.launch_command_parser().parse_args(words[2:])
    except SystemExit:
        raise TargetError(f"accelerate does not know '{shlex.join(words)}'. See accelerate launch --help.") from None
    num = len(given.training_script_args) + 1
    script = words[-num:]
    options = [word for word in words[2:-num] if word not in ("-m", "--module", "--no_python")]
    if given.no_python:
        raise TargetError(f"'{shlex.join(words)}' names no Python script. Give 'accelerate launch ... train.py ...'.")
    beside = program.with_name("python")
    python = str(beside) if beside.exists() else sys.executable
    launcher = (*words[:2], *options, "--no_python")
    return Command(python, (), ("-m", *script) if given.module else (_check_script(script[0]), *script[1:]), launcher)


def _parse_mpi(words: list[str]) -> Command:
    """What stands before Python is the launcher's own."""
    _find_program(words[0])
    place = next((i for i, word in enumerate(words) if i and _PYTHON.fullmatch(Path(word).name)), None)
    if place is None:
        raise TargetError(f"'{shlex.join(words)}' names no Python. Give '{words[0]} ... python train.py ...'.")
    return replace(parse_command(words[place:]), launcher=tuple(words[:place]))


def _check_script(file: str) -> str:
    path = Path(file)
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise TargetError(f"Script '{file}' is a folder without __main__.py. Name the file to run.")
    if not path.exists():
        raise TargetError(f"There is no script '{file}'. Check the path, which is taken from the current folder.")
    return file


def run_to_end(
    start: list[str], *, keep_stdout: bool, env: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()
) -> int:
    """Run a process to its end; gives the exit code as a shell would.

    Args:
        start: Its command line.
        keep_stdout: Whether what it prints goes to stderr.
        env: Its environment; None: this process's.
        pass_fds: File descriptors that it has as well.
    """
    stdout = sys.stderr if keep_stdout else None
    process = subprocess.Popen(start, stdout=stdout, env=None if env is None else dict(env), pass_fds=tuple(pass_fds))
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


ENDED_BY = {128 + number: number.name for number in (signal.SIGINT, signal.SIGTERM)}
"""Exit codes of what was ended by whoever started it."""


def pass_on_ending(code: int) -> None:
    """What Ctrl-C or SIGTERM ended was ended here as well: who hears that says how to go on."""
    if code in ENDED_BY and callable(signal.getsignal(code - 128)):
        signal.raise_signal(code - 128)


def run_quietly(words: Sequence[str], *, env: Mapping[str, str] | None = None) -> str:
    """Run a process and whatever it starts, without its output; gives why it came to no end, '' where it did."""
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*words], **quiet, start_new_session=True, env=None if env is None else dict(env))
    try:
        process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        ask_to_end(process)
        return say_late()
    finally:
        kill_group(process.pid)
        process.wait()
    return ""


def ask_to_end(process: subprocess.Popen[Any]) -> None:
    """Let a launcher end what it has started, which is in sessions of its own, before it is killed itself."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        process.send_signal(signal.SIGTERM)
        process.wait(_PATIENCE)


def kill_group(process: int) -> None:
    """End a process and what it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def say_late() -> str:
    """Why a run that took too long has no result."""
    return f"it took longer than {LIMIT:g} s"


@contextlib.contextmanager
def trial_environment(writes: Path) -> Generator[dict[str, str]]:
    """The environment of a process that only tries something: services that keep runs elsewhere are not told of it.

    Compilers look for temporary files where they were written, and sockets need short paths: these go to a hidden
    folder, which is not kept apart once more, and is removed at the end.

    Args:
        writes: Folder that the process's writes go to.
    """
    elsewhere = {"WANDB_MODE": "disabled", "MLFLOW_TRACKING_URI": writes.absolute().as_uri(), "COMET_MODE": "disabled"}
    with tempfile.TemporaryDirectory(prefix=".floatline-", ignore_cleanup_errors=True) as temporary:
        yield {**os.environ, **elsewhere, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), temporary)}
