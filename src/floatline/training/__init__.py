"""Training a workload under guard, from the first step to the last checkpoint."""

from typing import TYPE_CHECKING

from floatline.base.offered import offer

if TYPE_CHECKING:
    from floatline.training.trainer import Trainer

__all__ = ["Trainer"]

__getattr__ = offer(__name__, {"Trainer": "trainer"})
