"""QuietRuns: runs of one script without its output, forked from a process that has torch loaded. Without torch."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from floatline.running.command import LIMIT, Command, kill_group, run_quietly, run_to_end, say_late

_READY = b"ready"
# Where a process finds the two ends of pipes that the one that it forks off is to read and to write.
_PIPES = "FLOATLINE_PIPES"
# What torch loads when the first optimizer is made: half as long again as torch itself.
_LATE = "torch._dynamo"


class _Loaded:
    """A process that has torch loaded and forks.

    Args:
        jobs: Where jobs are written, a line each.
        answers: Where its answers are read.
        process: It itself; None where another process forked it off: it ends when nobody is left to write jobs.
    """

    def __init__(self, jobs: int, answers: int, process: subprocess.Popen[bytes] | None = None) -> None:
        self.jobs, self.answers, self._process = jobs, answers, process

    def end(self) -> None:
        os.close(self.jobs)
        os.close(self.answers)
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class QuietRuns:
    """Runs a script again and again, each time in a process of its own, see `run_quietly`.

    To load torch takes seconds. So a process loads it once, and does nothing but fork: each run is a fork. It asks for
    no GPU, which forks could not use any more. Where that cannot be done, each run loads torch itself: on ranks,
    where there is no fork, and beside GPUs of AMD, which it was not tried on.

    Args:
        command: The script.
        modules: What is loaded, each with a `main` as `Command.inside` calls it.
    """

    def __init__(self, command: Command, modules: Sequence[str]) -> None:
        self._command, self._modules = command, tuple(modules)
        self._loaded: _Loaded | None = None
        self._is_ready = False
        self._forks = sys.platform == "linux" and not command.launcher and not _has_untried_gpu()

    def __enter__(self) -> QuietRuns:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run_aloud(self, module: str, report: str, *settings: str, keep_stdout: bool) -> int:
        """Run the script with its own input and output; gives the exit code as a shell would.

        Its process calls `fork_off` when it has torch loaded: no later run loads it again.

        Args:
            module: As in `run`.
            report: As in `run`.
            settings: As in `run`.
            keep_stdout: Whether what it prints goes to stderr.
        """
        start = self._command.inside(module, report, *settings)
        if not self._forks:
            return run_to_end(start, keep_stdout=keep_stdout)
        (jobs, write), (read, answers) = os.pipe(), os.pipe()
        self._end()
        self._loaded, self._is_ready = _Loaded(write, read), False
        try:
            env = {**os.environ, _PIPES: json.dumps([jobs, answers, self._modules])}
            return run_to_end(start, keep_stdout=keep_stdout, env=env, pass_fds=(jobs, answers))
        finally:
            os.close(jobs)
            os.close(answers)

    def run(self, module: str, report: str, *settings: str, env: Mapping[str, str]) -> str:
        """Run the script by a module's `main`; gives why it came to no end, '' where it did.

        Args:
            module: One of those that were named.
            report: As `Command.inside` takes it, with the settings.
            settings: Texts that `main` takes.
            env: Environment of the run.
        """
        job, child = {"module": module, "given": [report, *settings], "env": dict(env)}, None
        try:
            child = self._fork(json.dumps(job))
            ended = None if child is None else self._read(LIMIT)
        except BaseException:
            self._end()  # what is still said is nobody's answer
            raise
        finally:
            if child is not None:
                kill_group(child)
        if child is None:
            return run_quietly(self._command.inside(module, report, *settings), env=env)
        if ended is None:
            self._read(LIMIT)  # that it has been killed
            return say_late()
        return ""

    def _load(self) -> None:
        if self._forks and self._loaded is None:
            (jobs, write), (read, answers) = os.pipe(), os.pipe()
            start, self._is_ready = (
                self._command.inside(__name__, "", json.dumps([jobs, answers, self._modules])),
                False,
            )
            process = subprocess.Popen(
                start, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True, pass_fds=(jobs, answers),
            )  # fmt: skip
            os.close(jobs)
            os.close(answers)
            self._loaded, self._is_ready = _Loaded(write, read, process), False

    def _fork(self, job: str) -> int | None:
        """The number of the run's process; None where nothing forks."""
        self._load()
        if self._loaded is None:
            return None
        self._is_ready = self._is_ready or self._read(LIMIT) == _READY
        with contextlib.suppress(BrokenPipeError):
            _write_all(self._loaded.jobs, f"{job}\n".encode())
        answer = self._read(LIMIT) if self._is_ready else None
        if answer:
            return int(answer)
        self._forks = False
        self._end()
        return None

    def _read(self, seconds: float) -> bytes | None:
        """A line of what the process says; None where it says none in this time, b'' where it has ended."""
        if self._loaded is None:
            return b""
        pipe = self._loaded.answers
        line, until = b"", time.monotonic() + seconds
        while not line.endswith(b"\n"):  # a line is short: it is read byte by byte, so that none is left in a buffer
            if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            if not (byte := os.read(pipe, 1)):
                return b""
            line += byte
        return line.strip()

    def _end(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.end()


def main(_report: str, pipes: str, words: list[str]) -> None:
    """Load modules, say so, and run one of them in a fork for each line of JSON that is read."""
    jobs, answers, modules = json.loads(pipes)
    _serve(jobs, answers, modules, words)


def fork_off(words: list[str]) -> None:
    """Fork off a process that later runs are forks of, if whoever started this one asks for it.

    It is nobody's child, has no terminal, and ends when nobody is left to write jobs.

    Args:
        words: The script's file, or `-m` and a module, and its arguments.
    """
    pipes = os.environ.pop(_PIPES, "")
    if not pipes:
        return
    jobs, answers, modules = json.loads(pipes)
    _load(modules)
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        _be_quiet()
        try:
            _serve(jobs, answers, modules, words)
        finally:
            os._exit(0)
    os.close(jobs)
    os.close(answers)
    os.waitpid(child, 0)


def _serve(jobs: int, answers: int, modules: Sequence[str], words: list[str]) -> None:
    _load(modules)
    os.write(answers, _READY + b"\n")
    with os.fdopen(jobs) as lines:
        for line in lines:
            child = os.fork()
            if child == 0:
                os.close(jobs)
                os.close(answers)
                _run_in_fork(json.loads(line), words)
            os.write(answers, b"%d\n" % child)
            os.write(answers, b"%d\n" % os.waitpid(child, 0)[1])


def _load(modules: Sequence[str]) -> None:
    """Load what every run needs, once for all of them."""
    for module in modules:
        importlib.import_module(module)
    if "torch" in sys.modules:
        importlib.import_module(_LATE)


def _write_all(pipe: int, text: bytes) -> None:
    while text:
        text = text[os.write(pipe, text) :]


def _run_in_fork(job: Mapping[str, Any], words: list[str]) -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for all of the run
    os.environ.clear()
    os.environ.update(job["env"])
    tempfile.tempdir = None  # it is read from the environment once
    try:
        importlib.import_module(job["module"]).main(*job["given"], words)
    finally:
        os._exit(1)  # a run that came to its end has ended the process itself


def _be_quiet() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.dup2(null, 2)


def _has_untried_gpu() -> bool:
    """Whether the machine has a GPU that forks were not tried on: AMD's, or any under WSL."""
    return any(Path(device).exists() for device in ("/dev/kfd", "/dev/dxg"))
