"""TextDetector: the same model, loss, data and score as a LightningModule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning
import torch
from torch import Tensor

from floatline.systems import dbnet
from floatline.systems.dbnet.boxes import Matches, find_words, match_words
from floatline.systems.dbnet.scenes import Scene
from floatline.workload import Workload

# A Trainer without an end says that its steps are infinite.
_MOST_STEPS = 1_000_000


class TextDetector(lightning.LightningModule):
    """DBNet under Lightning's Trainer.

    Args:
        config: Settings of the workload; what a Trainer does itself (precision, clipping, accumulation) is not read.
        workload: Model, batches and loss of that config.
        scenes: Held-out pictures.
    """

    def __init__(self, config: dbnet.Config, workload: Workload, scenes: Sequence[Scene]) -> None:
        super().__init__()
        self.model, self.loss_fn = workload.model, workload.loss_fn
        self._config, self._scenes = config, scenes
        self._found = Matches()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # noqa: ARG002
        """The loss of a batch."""
        inputs, targets = batch
        loss = self.loss_fn(self.model(*inputs), *targets)
        self.log("train/loss", loss.detach().float(), on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Count the words that are found; in FP32, as `floatline train` does."""
        with torch.autocast(self.device.type, enabled=False):
            maps = self.model.float()(batch.float()).probability.cpu().numpy()
        first = batch_idx * dbnet.num_at_once(self._config)
        for scene, probability in zip(self._scenes[first : first + len(maps)], maps, strict=True):
            self._found += match_words(find_words(probability), scene.polygons, scene.ignored)

    def on_validation_epoch_end(self) -> None:
        """Log H-mean, precision and recall of all held-out pictures."""
        found, self._found = self._found, Matches()
        values = {"hmean": found.hmean, "precision": found.precision, "recall": found.recall}
        self.log_dict({f"val/{name}": value for name, value in values.items()})

    def configure_optimizers(self) -> Any:
        """AdamW, whose rate follows the Trainer's steps by a scheduler: it waits where a step is skipped."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self._config.learning_rate)
        steps = max(int(min(self.trainer.estimated_stepping_batches, _MOST_STEPS)), 1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: dbnet.share_of_rate(step, steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
