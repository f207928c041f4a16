"""RaySearch: the replays of an island's search on a Ray cluster, each step of the search on a worker of its own."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any

from floatline.integrations.ray import start_ray

Question = tuple[int, Sequence[str], Sequence[tuple[str, int]]]


class RaySearch:
    """Answers questions of `find_island` on Ray workers, side by side.

    Every worker builds the target, trains it to the same points and captures the same steps; its answers carry the
    keys of its steps. An answer whose step differs, because another kind of machine rounds otherwise, has another key
    and is not used: the search then replays the step itself. So the island is the one that a search without workers
    finds. A worker that is lost is started again for the next question.

    Args:
        target: As `load_target` takes it; it must be importable on every node.
        steps: Steps of the run in which points are captured.
        seed: Of that run.
        workers: How many; None is one for each of four points, or as many as the cluster has GPUs or cores.

    Raises:
        ComparisonError: Ray is not installed.
    """

    def __init__(self, target: str, *, steps: int, seed: int = 0, workers: int | None = None) -> None:
        self._ray, num_gpus, num = start_ray()
        self._actor: Any = self._ray.remote(num_cpus=1, num_gpus=num_gpus, max_restarts=0)(_Replayer)
        self._settings = (target, steps, seed)
        self._workers: list[Any] = [None] * (workers or min(num, 4))

    def ask(self, questions: Sequence[Question]) -> Generator[tuple[str, Any]]:
        """Keys and answers for the log of the search; none from a worker that was lost."""
        asked: list[tuple[int, Any]] = []
        for question in questions:
            place = question[0] % len(self._workers)  # the same step on the same worker: what it knows helps
            if self._workers[place] is None:
                self._workers[place] = self._actor.remote(*self._settings)
            asked.append((place, self._workers[place].answer.remote(*question)))
        for place, reference in asked:
            yield from self._read(place, reference)

    def _read(self, place: int, reference: Any) -> list[tuple[str, Any]]:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError:
            return []  # its code raised: the search meets the same, and tells it
        except self._ray.exceptions.RayError:
            self._workers[place] = None
            return []

    def close(self) -> None:
        """Give the workers back."""
        for worker in self._workers:
            if worker is not None:
                self._ray.kill(worker)
        self._workers = [None] * len(self._workers)


class _Replayer:
    """On a Ray worker: the steps of the target, captured here, and a judge of them."""

    def __init__(self, target: str, steps: int, seed: int) -> None:
        from floatline.diagnosis.islands.errors import Tolerance
        from floatline.diagnosis.islands.judge import IslandJudge
        from floatline.diagnosis.islands.log import SearchLog
        from floatline.probe.runs.target_points import capture_points
        from floatline.workload import load_target

        self._log = _Listening(SearchLog(None))
        self._judge = IslandJudge(
            capture_points(load_target(target), steps=steps, seed=seed),
            tolerance=Tolerance(),
            log=self._log,  # pyright: ignore[reportArgumentType]
            budget=math.inf,
            on_replay=lambda: None,
        )

    def answer(self, i: int, modules: Sequence[str], lines: Sequence[tuple[str, int]]) -> list[tuple[str, Any]]:
        """All that was learnt with the outcome of one question."""
        self._judge.outcome(i, modules, lines)
        return self._log.take()


class _Listening:
    """A log that tells what was put into it since it was last asked."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._new: list[tuple[str, Any]] = []

    def get(self, key: str) -> Any | None:
        return self._log.get(key)

    def put(self, key: str, answer: Any) -> None:
        self._log.put(key, answer)
        self._new.append((key, answer))

    def take(self) -> list[tuple[str, Any]]:
        new, self._new = self._new, []
        return new
