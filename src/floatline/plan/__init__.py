"""Plan: what precision a run trains in, and why. No torch."""

from floatline.plan.fields import Clip, KeptFunction, KeptModule, Rewrite, Scaling
from floatline.plan.plan import Plan

__all__ = ["Clip", "KeptFunction", "KeptModule", "Plan", "Rewrite", "Scaling"]
