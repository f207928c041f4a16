"""WandbLogger: rows in a Weights & Biases run, online or offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from floatline.integrations.loggers.logger import Logger, Row, load_package


class WandbLogger(Logger):
    """Metrics `floatline/…` over their own axis `floatline/step`, so that rows may come late and between your own.

    W&B numbers the calls of `run.log` by itself. In a run that this logger shares, log your own numbers without
    `step=`, or W&B drops those whose step has passed.

    Args:
        run: The run to log to; None takes the one that is active, or begins one.
        project: Of a run that it begins.
        name: Of a run that it begins; None: W&B finds one.
        mode: Of a run that it begins; None: as W&B is set up. 'offline' needs no account and no network.
        every: Steps between two rows; see `Logger`.

    Raises:
        GuardError: wandb is not installed.
    """

    def __init__(
        self,
        run: Any = None,
        *,
        project: str = "floatline",
        name: str | None = None,
        mode: Literal["online", "offline"] | None = None,
        every: int = 10,
    ) -> None:
        super().__init__(every=every)
        wandb = load_package("wandb", package="wandb", user="WandbLogger")
        active = wandb.run if run is None else run
        self._own = active is None
        self.run = wandb.init(project=project, name=name, mode=mode) if active is None else active
        self.run.define_metric("floatline/step", hidden=True)
        self.run.define_metric("floatline/*", step_metric="floatline/step")

    def _send(self, rows: Sequence[Row]) -> None:
        for row in rows:
            text = {"floatline/event": row.text} if row.text else {}
            self.run.log({"floatline/step": row.step, **row.values, **text})

    def _describe(self, metadata: Mapping[str, Any]) -> None:
        self.run.config.update({"floatline": dict(metadata)}, allow_val_change=True)

    def _finish(self) -> None:
        if self._own:
            self.run.finish()
