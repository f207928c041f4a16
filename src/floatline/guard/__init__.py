"""Guard: a training step that cannot damage the weights; what it decides, remembers, saves and says."""

from typing import TYPE_CHECKING

from floatline.base.offered import offer

if TYPE_CHECKING:
    from floatline.guard.checkpoints.run_files import load_checkpoint, save_checkpoint
    from floatline.guard.failures import FailedStep
    from floatline.guard.guard import Guard
    from floatline.guard.policy import POLICIES, Policy
    from floatline.guard.remedies import use_remedy
    from floatline.guard.scaler import LossScaler

__all__ = [
    "POLICIES",
    "FailedStep",
    "Guard",
    "LossScaler",
    "Policy",
    "load_checkpoint",
    "save_checkpoint",
    "use_remedy",
]

__getattr__ = offer(
    __name__,
    {
        "FailedStep": "failures",
        "Guard": "guard",
        "LossScaler": "scaler",
        "POLICIES": "policy",
        "Policy": "policy",
        "load_checkpoint": "checkpoints.run_files",
        "save_checkpoint": "checkpoints.run_files",
        "use_remedy": "remedies",
    },
)
