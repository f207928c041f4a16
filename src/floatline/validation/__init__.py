"""Paired validation against FP32: studies, verdicts, costs and sign-off."""

from typing import TYPE_CHECKING

from floatline.base.offered import offer

if TYPE_CHECKING:
    from floatline.validation.finished import compare
    from floatline.validation.result import Validation
    from floatline.validation.target_study import validate
    from floatline.validation.verdict.pairs import ArmRun
    from floatline.validation.verdict.power import USUAL_SPREADS, describe_plans, plan_seeds
    from floatline.validation.verdict.statistics import critical_factors
    from floatline.validation.verdict.terms import Terms
    from floatline.validation.verdict.unpaired import decide_unpaired
    from floatline.validation.verdict.verdict import decide, next_look

__all__ = [
    "USUAL_SPREADS",
    "ArmRun",
    "Terms",
    "Validation",
    "compare",
    "critical_factors",
    "decide",
    "decide_unpaired",
    "describe_plans",
    "next_look",
    "plan_seeds",
    "validate",
]

__getattr__ = offer(
    __name__,
    {
        "ArmRun": "verdict.pairs",
        "Terms": "verdict.terms",
        "USUAL_SPREADS": "verdict.power",
        "Validation": "result",
        "compare": "finished",
        "critical_factors": "verdict.statistics",
        "decide": "verdict.verdict",
        "decide_unpaired": "verdict.unpaired",
        "describe_plans": "verdict.power",
        "next_look": "verdict.verdict",
        "plan_seeds": "verdict.power",
        "validate": "target_study",
    },
)
