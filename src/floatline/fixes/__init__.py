"""Fixes: changes to the user's source, as diffs that `git apply` and `patch -p1` take. Never imports torch."""

from floatline.fixes.code_fix import CodeFix, join_patches
from floatline.fixes.finding import fix_finding, fix_line

__all__ = ["CodeFix", "fix_finding", "fix_line", "join_patches"]
