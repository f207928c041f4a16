"""Accelerate with a guard: `prepare_accelerator(accelerator, plan)` before `accelerator.prepare`."""

from floatline.integrations.accelerate.accelerator import prepare_accelerator
from floatline.integrations.accelerate.guarding import Guarding
from floatline.integrations.accelerate.scaler import GuardScaler

__all__ = ["GuardScaler", "Guarding", "prepare_accelerator"]
