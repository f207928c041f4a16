"""RayRunner: the jobs of a validation on a Ray cluster."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from floatline.errors import ComparisonError
from floatline.validate.jobs import Job, failed_run
from floatline.validate.pairs import ArmRun
from floatline.validate.processes import always, run_in_child

_HALF_A_SECOND = 0.5


class RayRunner:
    """Runs each job as a Ray task, with a GPU where the cluster has any; functions run in this process.

    The cluster is the one that Ray finds: `RAY_ADDRESS`, a running one on this machine, or one that it starts. The
    target must be importable on every node, at the same path or as a module. A task that fails gives a run with
    `error`; tasks are not tried again, because a crash is a result here.

    Args:
        jobs: Tasks side by side. None: one for each GPU of the cluster, or one for every two cores.
        timeout: Seconds that a job may take, waiting for its place not counted; None: as long as it wants.

    Raises:
        ComparisonError: Ray is not installed.
    """

    def __init__(self, *, jobs: int | None = None, timeout: float | None = None) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ComparisonError("--ray needs Ray. Install it with: pip install 'floatline[ray]'.")
        self._ray: Any = importlib.import_module("ray")
        if not self._ray.is_initialized():
            self._ray.init(log_to_driver=False)
        have: dict[str, float] = self._ray.cluster_resources()
        self._num_gpus = 1 if have.get("GPU", 0) >= 1 else 0
        num = int(have.get("GPU", 0)) or max(1, int(have.get("CPU", 1)) // 2)
        self.num_at_once = jobs or num
        self._timeout = timeout

    def run(self, jobs: Sequence[Job], *, wanted: Callable[[Job], bool] = always) -> Generator[ArmRun]:
        """Run all jobs that are still wanted when their turn comes, and give each one's run."""
        task: Any = self._ray.remote(num_cpus=1, num_gpus=self._num_gpus, max_retries=0)(run_in_child)
        waiting = [job for job in jobs if job.function is None]
        own = [job for job in jobs if job.function is not None]
        busy: dict[Any, tuple[Job, float]] = {}
        try:
            while waiting or own or busy:
                waiting = [job for job in waiting if wanted(job)]
                own = [job for job in own if wanted(job)]
                while waiting and len(busy) < self.num_at_once:
                    job = waiting.pop(0)
                    busy[task.remote(job.as_json())] = job, time.monotonic()
                if own:
                    yield own.pop(0).run()
                if not busy:
                    continue
                done, _ = self._ray.wait(list(busy), num_returns=1, timeout=_HALF_A_SECOND)
                for reference in done:
                    job, _ = busy.pop(reference)
                    yield self._read(job, reference)
                for reference, (job, began) in list(busy.items()):
                    if self._timeout is not None and time.monotonic() - began > self._timeout:
                        del busy[reference]
                        self._ray.cancel(reference, force=True)
                        yield failed_run(job, f"took longer than the {self._timeout:g} s that it was given")
        finally:
            for reference in busy:
                self._ray.cancel(reference, force=True)

    def _read(self, job: Job, reference: Any) -> ArmRun:
        try:
            return ArmRun.from_json(self._ray.get(reference))
        except self._ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines()
            return failed_run(job, f"its Ray task failed: {lines[-1] if lines else type(error).__name__}")
