"""Where in the user's code something happened: see guard/frames.py."""

from floatline.guard.frames import NOWHERE, Spot, find_caller, find_raiser, is_users

__all__ = ["NOWHERE", "Spot", "find_caller", "find_raiser", "is_users"]
