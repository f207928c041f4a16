"""Names that a room offers, loaded on first use so that importing it needs no torch; and names of floatline 0.1."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def offer(room: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a room's module.

    Args:
        room: Dotted name of the room.
        homes: The file of each name, as a dotted path below the room.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        try:
            home = importlib.import_module(f"{room}.{homes[name]}")
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(f"{room}.{name} needs torch. Install it with: pip install 'floatline[torch]'.") from None
        value = home if homes[name] == name else getattr(home, name)
        setattr(sys.modules[room], name, value)
        return value

    return load


# Names that `floatline` itself offered, and the room that offers them now.
NAMES = {
    "CAUSES": "causes",
    "Cause": "causes",
    "Diagnoser": "diagnosis",
    "FORMATS": "formats",
    "Finding": "findings",
    "Format": "formats",
    "Ranges": "numerics",
    "Workload": "workload",
    "choose_plan": "checkup",
    "compare": "validation",
    "cuda_autocast_lists": "numerics",
    "describe_plan": "precision",
    "draw_ranges": "report",
    "find_cause": "causes",
    "find_format": "formats",
    "join_master": "numerics",
    "lint_paths": "lint",
    "match_message": "causes",
    "measure_ranges": "numerics",
    "round_nearest": "numerics",
    "round_stochastic": "numerics",
    "split_master": "numerics",
}
# Modules that the documentation named.
MODULES = {
    "choose": "checkup.choose",
    "diagnosis.island_cost": "diagnosis.islands.cost",
    "diagnosis.search": "diagnosis.islands.search",
    "diagnosis.would_fit": "diagnosis.headroom.would_fit",
    "guard.applied_plan": "precision.applied_plan",
    "guard.failed_steps": "guard.failures",
    "guard.islands": "precision.islands",
    "guard.nonfinite": "precision.nonfinite",
    "guard.run_files": "guard.checkpoints.run_files",
    "optim.adamw": "optim.algorithms",
    "plan": "plans",
    "presets": "plans.presets",
    "probe.replay": "probe.steps.capture",
    "probe.target_points": "probe.runs.target_points",
    "report.run_folders": "report.run.folders",
    "report.validation_terminal": "report.validation.terminal",
    "rewrites": "precision.rewrites",
    "validate.pairs": "validation.verdict.pairs",
    "validate.power": "validation.verdict.power",
    "validate.result": "validation.result",
    "validate.statistics": "validation.verdict.statistics",
    "validate.terms": "validation.verdict.terms",
    "validate.unpaired": "validation.verdict.unpaired",
    "validate.verdict": "validation.verdict.verdict",
    "workloads": "systems",
    "workloads.audio_lora": "systems.audio_lora",
    "workloads.conditioned": "systems.conditioned",
    "workloads.dbnet": "systems.dbnet",
    "workloads.distill": "systems.distill",
    "workloads.distill.alignment": "systems.distill.alignment",
    "workloads.mmgcn": "systems.mmgcn",
}
_FOLDERS = ("validate",)  # a function now; old modules lay below it


def load_old_name(name: str) -> Any:
    """What `floatline.NAME` was, with a warning at the line that uses it."""
    if name not in NAMES:
        raise AttributeError(f"module 'floatline' has no attribute {name!r}")
    home = f"floatline.{NAMES[name]}"
    warnings.warn(f"floatline.{name} is {home}.{name} now.", DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(home), name)


class _OldModules(MetaPathFinder, Loader):
    """Finds modules by the names that they had."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002
        name, _, main = fullname.removeprefix("floatline.").partition(".__main__")
        if not fullname.startswith("floatline.") or name not in MODULES:
            return None
        now = f"floatline.{MODULES[name]}"
        warnings.warn(f"floatline.{name} is {now} now.", DeprecationWarning, stacklevel=2)
        if fullname.endswith(".__main__") and not main:
            spec = importlib.util.find_spec(f"{now}.__main__")
            return spec and importlib.util.spec_from_file_location(fullname, spec.origin)
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:  # noqa: ARG002
        return None

    def exec_module(self, module: ModuleType) -> None:
        now = importlib.import_module(f"floatline.{MODULES[module.__name__.removeprefix('floatline.')]}")
        own = {"__name__", "__spec__", "__loader__", "__package__", "__path__", "__file__", "__cached__"}
        module.__dict__.update({name: value for name, value in vars(now).items() if name not in own})


def redirect_old_modules() -> None:
    """Let imports of old modules find the new ones."""
    if not any(isinstance(finder, _OldModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OldModules())  # before a folder that an older version left behind
    for folder in _FOLDERS:
        module = sys.modules.setdefault(f"floatline.{folder}", ModuleType(f"floatline.{folder}"))
        module.__path__ = []
