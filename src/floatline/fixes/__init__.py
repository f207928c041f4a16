"""Fixes: changes to the user's source, as diffs that `git apply` and `patch -p1` take. Never imports torch."""

from floatline.fixes.code_fix import CodeFix, join_patches
from floatline.fixes.finding import find_fixes, fix_finding, fix_line
from floatline.fixes.kinds import FixKind
from floatline.fixes.rewriting import NodePlace, rewrite_places

__all__ = ["CodeFix", "FixKind", "NodePlace", "find_fixes", "fix_finding", "fix_line", "join_patches", "rewrite_places"]
