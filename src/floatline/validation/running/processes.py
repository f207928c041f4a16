"""Jobs in processes of their own, side by side on this machine, one GPU each where there are several."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from floatline.errors import ComparisonError
from floatline.validation.running.jobs import Job, failed_run, job_from_json
from floatline.validation.verdict.pairs import ArmRun

_POLL_SECONDS = 0.02
_SECONDS_TO_END = 3.0
_LONG_CALL = 60.0


def always(_: Job) -> bool:
    """Every job is wanted."""
    return True


class Runner(Protocol):
    """Runs jobs somewhere: here in processes, or on a cluster."""

    @property
    def num_at_once(self) -> int:
        """Jobs that run side by side."""
        ...

    def run(self, jobs: Sequence[Job], *, wanted: Callable[[Job], bool] = always) -> Generator[ArmRun]:
        """Run all of them, and give each one's run as it comes. Closing the generator ends what is under way.

        Args:
            jobs: In the order in which they are begun.
            wanted: Asked before each: one that has become useless on the way is left out.
        """
        ...


class ProcessRunner:
    """Runs jobs in other Python processes; those that are functions run in this one, one at a time.

    A process is used again after a job of less than a minute, where starting it would take as long. One that
    crashes, or takes longer than allowed, gives a run with `error`. All processes end with this one, however it dies,
    and with Ctrl-C.

    Args:
        jobs: Processes side by side. None: one for each GPU, or one for every two cores without a GPU.
        timeout: Seconds that a job may take; None: as long as it wants.
    """

    def __init__(self, *, jobs: int | None = None, timeout: float | None = None) -> None:
        if jobs is not None and jobs < 1:
            raise ComparisonError(f"jobs is {jobs}. Give 1 or more.")
        self._gpus = visible_gpus()
        self.num_at_once = jobs or len(self._gpus) or max(1, num_cores() // 2)
        self._timeout = timeout

    def run(self, jobs: Sequence[Job], *, wanted: Callable[[Job], bool] = always) -> Generator[ArmRun]:
        """Run all jobs that are still wanted when their turn comes, and give each one's run."""
        waiting = deque(job for job in jobs if job.function is None)
        own = deque(job for job in jobs if job.function is not None)
        workers: dict[int, Worker] = {}
        busy: dict[int, Job] = {}
        try:
            while waiting or own or busy:
                waiting = deque(job for job in waiting if wanted(job))
                own = deque(job for job in own if wanted(job))
                for slot in range(self.num_at_once):
                    if slot not in busy and waiting:
                        busy[slot] = waiting.popleft()
                        if slot not in workers:
                            workers[slot] = Worker(self._env(slot))
                        workers[slot].start(f"{__name__}:run_in_child", busy[slot].as_json(), timeout=self._timeout)
                if own:
                    yield own.popleft().run()
                for slot in [slot for slot in busy if workers[slot].poll()]:
                    run = _read_run(busy.pop(slot), workers[slot])
                    if not workers[slot].reusable:
                        workers.pop(slot).end()
                    yield run
                time.sleep(_POLL_SECONDS if busy else 0)
        finally:
            for worker in workers.values():
                worker.end()

    def _env(self, slot: int) -> dict[str, str]:
        """Threads in proportion, so that the processes do not get in each other's way; and a GPU."""
        threads = max(1, num_cores() // self.num_at_once)
        env = {"OMP_NUM_THREADS": str(threads), **os.environ}
        return env | ({"CUDA_VISIBLE_DEVICES": self._gpus[slot % len(self._gpus)]} if self._gpus else {})


def run_in_child(settings: dict[str, Any]) -> dict[str, Any]:
    """What the child process calls for a job."""
    return job_from_json(settings).run().as_json()


def call_in_child(call: str, settings: dict[str, Any], *, timeout: float | None = None) -> Any:
    """Call a function in a fresh process, and give back its value.

    Args:
        call: 'module:function'.
        settings: What it is called with, as JSON can hold it.
        timeout: Seconds that it may take.

    Raises:
        ComparisonError: It raised, crashed, or took too long; the message is its own.
    """
    gpus = visible_gpus()
    env = {**os.environ, **({"CUDA_VISIBLE_DEVICES": gpus[0]} if gpus else {})}
    worker = Worker(env)
    try:
        worker.start(call, settings, timeout=timeout)
        while not worker.poll():
            time.sleep(_POLL_SECONDS)
    finally:
        worker.end()
    if "error" in worker.answer:
        raise ComparisonError(worker.answer["error"])
    return worker.answer["value"]


def visible_gpus() -> tuple[str, ...]:
    """GPUs as CUDA_VISIBLE_DEVICES names them; starts no CUDA context."""
    import torch

    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    num = torch.cuda.device_count()
    if asked is None:
        return tuple(map(str, range(num)))
    return tuple(name.strip() for name in asked.split(",") if name.strip())[:num]


def num_cores() -> int:
    """Cores that this process may use."""
    with contextlib.suppress(AttributeError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Worker:
    """A process that makes function calls, one at a time.

    Args:
        env: Its environment.

    Attributes:
        answer: What the last call gave, once `poll` has said that it is done: {"value": …}, or {"error": …}.
    """

    def __init__(self, env: dict[str, str]) -> None:
        self.answer: dict[str, Any] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="floatline-")
        self._log = (Path(self._folder.name) / "log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "floatline.validation.running.child"],
            env=env,
            stdin=subprocess.PIPE,  # it ends when this pipe does, also where this process is killed
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C is for the parent, which ends its workers itself
        )
        self._began, self._timeout = 0.0, None

    def start(self, call: str, settings: dict[str, Any], *, timeout: float | None = None) -> None:
        """Begin a call.

        Args:
            call: 'module:function'.
            settings: What it is called with.
            timeout: Seconds that it may take; None: as long as it wants.
        """
        self.answer, self._began, self._timeout = {}, time.monotonic(), timeout
        file = Path(self._folder.name) / "call.json"
        file.with_name("answer").unlink(missing_ok=True)
        file.write_text(json.dumps({"call": call, "settings": settings}), encoding="utf-8")
        with contextlib.suppress(BrokenPipeError):  # `poll` says how it ended
            pipe = self._pipe
            pipe.write(f"{file}\n".encode())
            pipe.flush()

    @property
    def reusable(self) -> bool:
        """Whether it may make another call: what took long, or failed, leaves its traces with its process."""
        return "value" in self.answer and time.monotonic() - self._began < _LONG_CALL

    def poll(self) -> bool:
        """Whether the call is done; reads its answer then."""
        if not self.answer:
            code = self._process.poll()  # before the answer is looked for: it may have written one and died
            self.answer = self._read(code)
        return bool(self.answer)

    def _read(self, code: int | None) -> dict[str, Any]:
        with contextlib.suppress(OSError):
            return json.loads((Path(self._folder.name) / "answer").read_text(encoding="utf-8"))
        if code is not None:
            log = (Path(self._folder.name) / "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return {"error": f"its process {how}" + (f": {log[-1]}" if log else "")}
        if self._timeout is not None and time.monotonic() - self._began > self._timeout:
            return {"error": f"took longer than the {self._timeout:g} s that it was given"}
        return {}

    @property
    def _pipe(self) -> IO[bytes]:
        if self._process.stdin is None:
            raise AssertionError  # it was opened as a pipe
        return self._process.stdin

    def end(self) -> None:
        """End it and everything that it has started, and clean up."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        _end_group(self._process)
        self._log.close()
        self._folder.cleanup()


def _end_group(process: subprocess.Popen[bytes]) -> None:
    if sys.platform == "win32":
        process.kill()
        process.wait()
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_SECONDS_TO_END)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_run(job: Job, worker: Worker) -> ArmRun:
    if "error" in worker.answer:
        return failed_run(job, worker.answer["error"])
    return ArmRun.from_json(worker.answer["value"])
