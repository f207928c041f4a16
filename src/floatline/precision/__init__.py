"""A plan put into force on a model: what is kept in FP32, rewritten, wrapped or drawn at random while a step runs."""

from typing import TYPE_CHECKING

from floatline.base.offered import offer

if TYPE_CHECKING:
    from floatline.precision.applied_plan import AppliedPlan
    from floatline.precision.islands import Islands, cast_weights
    from floatline.precision.nonfinite import first_nonfinite
    from floatline.precision.placements import describe_plan
    from floatline.precision.rewrites import Rewriting

__all__ = ["AppliedPlan", "Islands", "Rewriting", "cast_weights", "describe_plan", "first_nonfinite"]

__getattr__ = offer(
    __name__,
    {
        "AppliedPlan": "applied_plan",
        "Islands": "islands",
        "Rewriting": "rewrites",
        "cast_weights": "islands",
        "describe_plan": "placements",
        "first_nonfinite": "nonfinite",
    },
)
