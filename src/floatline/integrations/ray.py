"""RayRunner: the jobs of a validation on a Ray cluster."""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any

from floatline.errors import ComparisonError
from floatline.validation.running.jobs import Job, failed_run, job_from_json
from floatline.validation.running.processes import Worker, always
from floatline.validation.verdict.pairs import ArmRun

_HALF_A_SECOND, _TENTH_OF_A_SECOND = 0.5, 0.1
_MOST_LOSSES = 3


class RayRunner:
    """Runs each job on a Ray worker, with a GPU where the cluster has any; functions run in this process.

    The cluster is the one that Ray finds: `RAY_ADDRESS`, a running one on this machine, or one that it starts. The
    target must be importable on every node, at the same path or as a module. A worker starts a process for the
    training: one that crashes or raises gives a run with `error`, because that is a result here. A worker or a node
    that is lost is no result: its job is run again elsewhere, up to three times.

    Args:
        jobs: Runs side by side. None: one for each GPU of the cluster, or one for every two cores.
        timeout: Seconds that a job may take, waiting for its place not counted; None: as long as it wants.

    Raises:
        ComparisonError: Ray is not installed.
    """

    def __init__(self, *, jobs: int | None = None, timeout: float | None = None) -> None:
        self._ray, self._num_gpus, num = start_ray()
        self.num_at_once = jobs or num
        self._timeout = timeout

    def run(self, jobs: Sequence[Job], *, wanted: Callable[[Job], bool] = always) -> Generator[ArmRun]:
        """Run all jobs that are still wanted when their turn comes, and give each one's run."""
        actor: Any = self._ray.remote(num_cpus=1, num_gpus=self._num_gpus, max_restarts=0)(_Bench)
        waiting = [job for job in jobs if job.function is None]
        own = [job for job in jobs if job.function is not None]
        busy: dict[Any, tuple[Job, Any, float]] = {}
        idle: list[Any] = []
        losses: Counter[tuple[str, int]] = Counter()
        try:
            while waiting or own or busy:
                waiting = [job for job in waiting if wanted(job)]
                own = [job for job in own if wanted(job)]
                while waiting and len(busy) < self.num_at_once:
                    job, bench = waiting.pop(0), idle.pop() if idle else actor.remote()
                    busy[bench.run.remote(job.as_json())] = job, bench, time.monotonic()
                if own:
                    yield own.pop(0).run()
                if not busy:
                    continue
                done, _ = self._ray.wait(list(busy), num_returns=1, timeout=_HALF_A_SECOND)
                for reference in done:
                    job, bench, _ = busy.pop(reference)
                    run = self._read(job, reference)
                    if run is not None:
                        idle.append(bench)
                        yield run
                        continue
                    losses[job.arm, job.seed] += 1
                    if losses[job.arm, job.seed] < _MOST_LOSSES:
                        waiting.insert(0, job)
                    else:
                        yield failed_run(job, f"the Ray workers that ran it were lost, {_MOST_LOSSES} times")
                for reference, (job, bench, began) in list(busy.items()):
                    if self._timeout is not None and time.monotonic() - began > self._timeout:
                        del busy[reference]
                        self._ray.kill(bench)
                        yield failed_run(job, f"took longer than the {self._timeout:g} s that it was given")
        finally:
            for bench in (*idle, *(bench for _, bench, _ in busy.values())):
                self._ray.kill(bench)

    def _read(self, job: Job, reference: Any) -> ArmRun | None:
        """The run of a job that is over; None where its worker was lost."""
        try:
            return ArmRun.from_json(self._ray.get(reference))
        except self._ray.exceptions.RayTaskError as error:  # the code there raised: trying again would not help
            lines = str(error).strip().splitlines()
            return failed_run(job, f"its Ray task failed: {lines[-1] if lines else type(error).__name__}")
        except self._ray.exceptions.RayError:
            return None


def start_ray() -> tuple[Any, int, int]:
    """Ray, connected to its cluster; the GPUs that a worker takes; and how many workers there is room for.

    Raises:
        ComparisonError: Ray is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise ComparisonError("The engine 'ray' needs Ray. Install it with: pip install 'floatline[ray]'.")
    ray: Any = importlib.import_module("ray")
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    have: dict[str, float] = ray.cluster_resources()
    num = int(have.get("GPU", 0)) or max(1, int(have.get("CPU", 1)) // 2)
    return ray, 1 if have.get("GPU", 0) >= 1 else 0, num


class _Bench:
    """On a Ray worker, with a process beside it that trains: a crash there is a result, and not the worker's end."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def run(self, settings: dict[str, Any]) -> dict[str, Any]:
        worker = self._worker or Worker(dict(os.environ))
        worker.start("floatline.validation.running.processes:run_in_child", settings)
        while not worker.poll():
            time.sleep(_TENTH_OF_A_SECOND)
        self._worker = worker
        if not worker.reusable:
            worker.end()
            self._worker = None
        if "error" in worker.answer:
            return failed_run(job_from_json(settings), worker.answer["error"]).as_json()
        return worker.answer["value"]
