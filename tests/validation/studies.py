"""Arm runs made of plain numbers."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from floatline.validation.verdict.pairs import ArmRun


def run(arm: str, seed: int, metric: float, **changes) -> ArmRun:
    """One healthy run that ends at `metric`."""
    losses = tuple(4.0 - 0.05 * step + 1e-4 * seed + (1e-6 if arm != "fp32" else 0.0) for step in range(20))
    plain = ArmRun(
        arm, seed, metric, start=4.0, first_losses=losses, steps=1000, applied=1000, skipped=0, weights_changed=True
    )
    return replace(plain, **changes)


def arms(excesses, *, base: float = 2.0, candidate: str = "fp16-mixed", **changes) -> list[ArmRun]:
    """FP32 and a candidate that is worse by these fractions, one seed for each; `changes` are the candidate's."""
    runs = []
    for seed, excess in enumerate(excesses):
        reference = base + 0.01 * seed
        runs += [run("fp32", seed, reference), run(candidate, seed, reference * (1 + excess), **changes)]
    return runs


def with_nudged(runs, excesses) -> list[ArmRun]:
    """The same runs and a nudged FP32 for each seed."""
    references = {r.seed: r for r in runs if r.arm == "fp32"}
    return [*runs, *(run("fp32-nudged", s, references[s].metric * (1 + e)) for s, e in enumerate(excesses))]


def load_benchmark() -> ModuleType:
    """benchmarks/validation_power.py, which draws the studies."""
    path = Path(__file__).parents[2] / "benchmarks/validation_power.py"
    spec = importlib.util.spec_from_file_location("validation_power", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
