"""MLflowLogger: rows as metrics of an MLflow run, events as tags."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from floatline.integrations.loggers.logger import Logger, Row, load_package, plan_of

_MOST_METRICS = 1000  # of one call, MLflow's own limit
_LONGEST_TAG = 5000  # MLflow's limit; 250 is that of a name


class MLflowLogger(Logger):
    """Metrics `floatline/…` by step, sent in batches; the plan and the events as tags `floatline.…`.

    Args:
        run_id: The run to log to; None takes the one that is active, or begins one.
        tracking_uri: Where it is, such as 'sqlite:///mlflow.db'; None: as MLflow is set up.
        experiment: Of a run that it begins; made where it is missing. None: the one that is set, or MLflow's default.
        every: Steps between two rows; see `Logger`.

    Raises:
        GuardError: mlflow is not installed.
    """

    def __init__(
        self,
        run_id: str | None = None,
        *,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        every: int = 10,
    ) -> None:
        super().__init__(every=every)
        mlflow = load_package("mlflow", package="mlflow", user="MLflowLogger")
        self._metric = load_package("mlflow.entities", package="mlflow", user="MLflowLogger").Metric
        # The client says which run is meant at each call: `mlflow.log_metric` means that of the calling thread.
        self._client = mlflow.MlflowClient(tracking_uri=tracking_uri)
        active = mlflow.active_run() if run_id is None else None
        self.run_id: str = run_id or (active.info.run_id if active is not None else "")
        self._own = not self.run_id
        if self._own:
            place = self._experiment(mlflow, experiment)
            self.run_id = self._client.create_run(place, run_name="floatline").info.run_id
        self._num_events = 0

    def _experiment(self, mlflow: Any, name: str | None) -> str:
        if name is None:
            # What set_experiment or the environment says; the public calls would begin a run to tell it.
            return getattr(mlflow.tracking.fluent, "_get_experiment_id", lambda: None)() or "0"
        found = self._client.get_experiment_by_name(name)
        return self._client.create_experiment(name) if found is None else found.experiment_id

    def _send(self, rows: Sequence[Row]) -> None:
        now = int(time.time() * 1000)
        metrics = [
            self._metric(clean_name(name), value, now, row.step) for row in rows for name, value in row.values.items()
        ]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + _MOST_METRICS])
        for row in rows:
            if row.text:
                self._num_events += 1
                key = f"floatline.event.{self._num_events:04d}"
                self._client.set_tag(self.run_id, key, f"step {row.step}: {row.text}"[:_LONGEST_TAG])

    def _describe(self, metadata: Mapping[str, Any]) -> None:
        plan = plan_of(metadata)
        if isinstance(line := metadata.get("manifest"), str):
            self._client.set_tag(self.run_id, "floatline.manifest", line[:_LONGEST_TAG])
        for name in ("name", "compute", "weights"):
            if name in plan:
                key = "floatline.plans" if name == "name" else f"floatline.{name}"
                self._client.set_tag(self.run_id, key, str(plan[name])[:_LONGEST_TAG])

    def _finish(self) -> None:
        if self._own:
            self._client.set_terminated(self.run_id)


def clean_name(name: str) -> str:
    """A name that MLflow takes: letters, digits and _ - . space : /, no part that is a path's own, 250 at most."""
    name = re.sub(r"[^\w\-. :/]", "_", name)
    parts = [part if part not in ("", ".", "..") else "_" for part in name.split("/")]
    return "/".join(parts)[:250]
