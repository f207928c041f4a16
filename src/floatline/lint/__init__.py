"""Lint: source files and configurations to findings, before anything runs. Never imports torch."""

from floatline.lint.engine import lint_text
from floatline.lint.paths import LintResult, lint_paths
from floatline.lint.rule import LintFinding
from floatline.lint.rules import RULES, find_rule

__all__ = ["RULES", "LintFinding", "LintResult", "find_rule", "lint_paths", "lint_text"]
