"""Plan: what precision a run trains in, and why. No torch."""

from floatline.plans.plan import Clip, KeptFunction, KeptModule, Plan, Rewrite, Scaling
from floatline.plans.presets import resolve_plan

__all__ = ["Clip", "KeptFunction", "KeptModule", "Plan", "Rewrite", "Scaling", "resolve_plan"]
