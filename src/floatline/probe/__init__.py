"""What one step did: a loop watched, its operations recorded, its steps captured and run again."""

from typing import TYPE_CHECKING

from floatline.base.offered import offer

if TYPE_CHECKING:
    from floatline.probe.runs.target_points import capture_points
    from floatline.probe.steps.capture import capture_step
    from floatline.probe.steps.replayed import compare_steps

__all__ = ["capture_points", "capture_step", "compare_steps"]

__getattr__ = offer(
    __name__,
    {"capture_points": "runs.target_points", "capture_step": "steps.capture", "compare_steps": "steps.replayed"},
)
