"""floatline takes PyTorch training from FP32 to 16 bits and keeps FP32's results."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from floatline import optim
    from floatline.causes import CAUSES, Cause, find_cause, match_message
    from floatline.choose import choose_plan
    from floatline.diagnosis.in_place import Diagnoser
    from floatline.errors import FloatlineError
    from floatline.findings import Finding, GuardStop
    from floatline.formats import FORMATS, Format, find_format
    from floatline.guard.guard import Guard
    from floatline.guard.placements import describe_plan
    from floatline.guard.policy import Policy
    from floatline.guard.scaler import LossScaler
    from floatline.ledger.ledger import Ledger
    from floatline.lint import lint_paths
    from floatline.numerics.cuda_autocast import cuda_autocast_lists
    from floatline.numerics.half_on_cpu import HalfOnCPU
    from floatline.numerics.ranges import Ranges, measure_ranges
    from floatline.numerics.rounding import round_nearest, round_stochastic
    from floatline.numerics.split import join_master, split_master
    from floatline.plan import Plan
    from floatline.report.chart import draw_ranges
    from floatline.salvage.rescue import rescue
    from floatline.validate.finished import compare
    from floatline.validate.target_study import validate
    from floatline.workload import Workload

__version__ = "0.1.0"

# Loaded on first use, so that `import floatline` and the command line's help need no torch.
_HOMES = {
    "CAUSES": "causes",
    "Cause": "causes",
    "Diagnoser": "diagnosis.in_place",
    "FORMATS": "formats",
    "Finding": "findings",
    "FloatlineError": "errors",
    "Format": "formats",
    "Guard": "guard.guard",
    "GuardStop": "findings",
    "LossScaler": "guard.scaler",
    "Ledger": "ledger.ledger",
    "Plan": "plan",
    "Policy": "guard.policy",
    "Ranges": "numerics.ranges",
    "Workload": "workload",
    "choose_plan": "choose",
    "compare": "validate.finished",
    "cuda_autocast_lists": "numerics.cuda_autocast",
    "describe_plan": "guard.placements",
    "draw_ranges": "report.chart",
    "find_cause": "causes",
    "find_format": "formats",
    "HalfOnCPU": "numerics.half_on_cpu",
    "join_master": "numerics.split",
    "lint_paths": "lint",
    "match_message": "causes",
    "measure_ranges": "numerics.ranges",
    "optim": "optim",
    "rescue": "salvage.rescue",
    "round_nearest": "numerics.rounding",
    "round_stochastic": "numerics.rounding",
    "split_master": "numerics.split",
    "validate": "validate",
}

__all__ = [
    "CAUSES",
    "FORMATS",
    "Cause",
    "Diagnoser",
    "Finding",
    "FloatlineError",
    "Format",
    "Guard",
    "GuardStop",
    "HalfOnCPU",
    "Ledger",
    "LossScaler",
    "Plan",
    "Policy",
    "Ranges",
    "Workload",
    "__version__",
    "choose_plan",
    "compare",
    "cuda_autocast_lists",
    "describe_plan",
    "draw_ranges",
    "find_cause",
    "find_format",
    "join_master",
    "lint_paths",
    "match_message",
    "measure_ranges",
    "optim",
    "rescue",
    "round_nearest",
    "round_stochastic",
    "split_master",
    "validate",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its home."""
    if name not in _HOMES:
        raise AttributeError(f"module 'floatline' has no attribute {name!r}")
    try:
        home = importlib.import_module(f"floatline.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"floatline.{name} needs torch. Install it with: pip install 'floatline[torch]'.") from None
    value = home if name == _HOMES[name] else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names, loaded or not."""
    return sorted(__all__)
