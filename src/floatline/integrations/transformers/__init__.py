"""transformers' Trainer, and TRL's, with a guard: `prepare_trainer(trainer)` before `trainer.train()`."""

from floatline.integrations.transformers.callback import FloatlineCallback
from floatline.integrations.transformers.rollouts import RolloutDrift, watch_rollouts
from floatline.integrations.transformers.trainer import prepare_trainer

__all__ = ["FloatlineCallback", "RolloutDrift", "prepare_trainer", "watch_rollouts"]
