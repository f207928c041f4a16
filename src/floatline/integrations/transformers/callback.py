"""FloatlineCallback: what the Trainer's events mean to a guarded run, and what the run says to the Trainer's log."""
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import math
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from floatline.errors import GuardError
from floatline.guard.guard import Guard
from floatline.integrations.accelerate.guarding import Guarding


class FloatlineCallback(TrainerCallback):
    """Counts epochs, records evaluations, and answers for the run. `prepare_trainer` makes it and adds it.

    Args:
        guarding: What `prepare_trainer` put in place.
    """

    def __init__(self, guarding: Guarding | None = None) -> None:
        self._guarding = guarding

    @property
    def guard(self) -> Guard:
        """The guard of the run; there is one from the start of `trainer.train()` on."""
        if self._guarding is None:
            raise GuardError("FloatlineCallback was added by hand. Call prepare_trainer(trainer), which adds it.")
        if not self._guarding.guards:
            raise GuardError("The run has no guard before trainer.train(). Ask after it has begun.")
        return self._guarding.guards[0]

    def summary(self) -> str:
        """What happened, in five lines; waits for the device."""
        return self.guard.summary()

    def metrics(self) -> dict[str, float]:
        """Numbers of the run for the Trainer's log; waits for the device.

        `floatline/scale` and `floatline/grad_norm` are those of the last step, `floatline/skipped` counts all skipped
        steps of the run.
        """
        self.guard.drain()
        account = self.guard.accounts.run
        found = {"floatline/skipped": float(account.num_skipped)}
        last = self._guarding.scaler.outcome_of(self.guard.optimizer) if self._guarding is not None else None
        if last is not None:
            found |= {"floatline/scale": last.scale, "floatline/grad_norm": last.grad_norm}
        if self.guard.lost is not None:
            found["floatline/lost_share"] = self.guard.lost.share
        return found

    def on_train_begin(
        self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_kwargs: Any
    ) -> None:
        """Note in the ledger where a resumed run goes on; refuse a Trainer that no guard can see into."""
        if self._guarding is not None and not self._guarding.guards:
            raise GuardError(
                "The Trainer did not prepare model and optimizer together, as with DataParallel on several GPUs. "
                "Use torchrun, or show it one GPU with CUDA_VISIBLE_DEVICES."
            )
        guard = self.guard
        if state.global_step:
            guard.note(f"resumed at step {state.global_step:,} of {state.max_steps:,}")

    def on_epoch_begin(
        self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_kwargs: Any
    ) -> None:
        """Count batches of this epoch; a resumed one goes on counting."""
        epoch = math.floor(state.epoch or 0)
        if self.guard.epoch != epoch:
            self.guard.begin_epoch(epoch)

    def on_evaluate(
        self,
        _args: TrainingArguments,
        _state: TrainerState,
        _control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **_kwargs: Any,
    ) -> None:
        """Write the metrics of an evaluation to the ledger."""
        if self._guarding is None or not self._guarding.open or not metrics:
            return
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        self.guard.drain()
        self.guard.note_evaluation("", **numbers)

    def on_save(self, _args: TrainingArguments, _state: TrainerState, _control: TrainerControl, **_kwargs: Any) -> None:
        """Have the ledger on the disk with every checkpoint."""
        self.guard.flush()
