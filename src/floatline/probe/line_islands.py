"""Lines of the user's code computed in FP32: see guard/line_islands.py."""

from floatline.guard.line_islands import Line, LineIslands

__all__ = ["Line", "LineIslands"]
