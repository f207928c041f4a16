"""Rewrites: operations replaced, while they run, by the same function in a form that 16 bits hold."""

from floatline.precision.rewrites.mode import Rewriting

__all__ = ["Rewriting"]
