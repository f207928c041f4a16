"""TensorBoardLogger: rows as scalars of an event file, events as texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from floatline.base.json_values import plain_json
from floatline.errors import GuardError
from floatline.integrations.loggers.logger import Logger, Row, load_package


class TensorBoardLogger(Logger):
    """Scalars `floatline/…` by step, texts `floatline/events` and `floatline/plan`.

    Numerics:
        TensorBoard keeps float32: a value is rounded to it once. NaN and infinity stay.

    Args:
        folder: Where the event file goes: `tensorboard --logdir FOLDER`.
        writer: A SummaryWriter of your own instead of a folder; it is not closed.
        every: Steps between two rows; see `Logger`.

    Raises:
        GuardError: tensorboard is not installed, or both places were given.
    """

    def __init__(self, folder: str | Path | None = None, *, writer: Any = None, every: int = 10) -> None:
        if (folder is None) == (writer is None):
            raise GuardError("TensorBoardLogger takes a folder or a writer. Give one of them.")
        super().__init__(every=every)
        self._own = writer is None
        if writer is None:
            load_package("tensorboard", package="tensorboard", user="TensorBoardLogger")
            tensorboard = load_package("torch.utils.tensorboard", package="torch", user="TensorBoardLogger")
            writer = tensorboard.SummaryWriter(str(folder))
        self._writer = writer

    def _send(self, rows: Sequence[Row]) -> None:
        for row in rows:
            for name, value in row.values.items():
                self._writer.add_scalar(name, value, row.step)
            if row.text:
                self._writer.add_text("floatline/events", row.text, row.step)
        self._writer.flush()

    def _describe(self, metadata: Mapping[str, Any]) -> None:
        # Four spaces make it code in Markdown, which is what texts are shown as.
        text = json.dumps(plain_json(metadata), indent=2, default=str, allow_nan=False)
        self._writer.add_text("floatline/plan", "\n".join(f"    {line}" for line in text.splitlines()))

    def _finish(self) -> None:
        if self._own:
            self._writer.close()
