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

from floatline.running.command import LIMIT, Command, kill_group, run_quietly, say_late

_READY = b"ready"
_CORES = 4


class QuietRuns:
    """Runs a script again and again, each time in a process of its own, see `run_quietly`.

    To load torch takes seconds. So a process loads it once, and does nothing but fork: each run is a fork. Where that
    cannot be done, each run loads torch itself: beside a GPU, which a process must not have asked for before it forks;
    on several ranks; and where there is no fork.

    Args:
        command: The script.
        modules: What is loaded, each with a `main` as `Command.inside` calls it.
    """

    def __init__(self, command: Command, modules: Sequence[str]) -> None:
        self._command, self._modules = command, tuple(modules)
        self._loaded: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._forks = sys.platform == "linux" and not command.launcher and not _has_gpu()

    def __enter__(self) -> QuietRuns:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def load_ahead(self) -> None:
        """Begin to load now, where there are cores enough for a script beside it."""
        if (os.cpu_count() or 1) >= _CORES:
            self._load()

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
            start, self._is_ready = self._command.inside(__name__, "", json.dumps(self._modules)), False
            self._loaded = subprocess.Popen(
                start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
            )

    def _fork(self, job: str) -> int | None:
        """The number of the run's process; None where nothing forks."""
        self._load()
        if self._loaded is None or self._loaded.stdin is None:
            return None
        self._is_ready = self._is_ready or self._read(LIMIT) == _READY
        with contextlib.suppress(BrokenPipeError):
            self._loaded.stdin.write(f"{job}\n".encode())
            self._loaded.stdin.flush()
        answer = self._read(LIMIT) if self._is_ready else None
        if answer:
            return int(answer)
        self._forks = False
        self._end()
        return None

    def _read(self, seconds: float) -> bytes | None:
        """A line of what the process says; None where it says none in this time, b'' where it has ended."""
        pipe = None if self._loaded is None else self._loaded.stdout
        if pipe is None:
            return b""
        line, until = b"", time.monotonic() + seconds
        while not line.endswith(b"\n"):  # a line is short: it is read byte by byte, so that none is left in a buffer
            if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            if not (byte := os.read(pipe.fileno(), 1)):
                return b""
            line += byte
        return line.strip()

    def _end(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.kill()
            loaded.communicate()


def main(_report: str, modules: str, words: list[str]) -> None:
    """Load modules, say so, and run one of them in a fork for each line of JSON that is read."""
    answers = os.dup(1)
    _be_quiet()
    for module in json.loads(modules):
        importlib.import_module(module)
    os.write(answers, _READY + b"\n")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.close(answers)
            _run_in_fork(json.loads(line), words)
        os.write(answers, b"%d\n" % child)
        os.write(answers, b"%d\n" % os.waitpid(child, 0)[1])


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
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def _has_gpu() -> bool:
    """Whether the machine has a GPU of NVIDIA's or AMD's, without torch."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))
