"""A target's step, compiled: captured from a build() target, or seen while a train() function runs."""

from __future__ import annotations

from pathlib import Path

from floatline.agreement.compiled.backends import Compiler
from floatline.agreement.compiled.script_graphs import STEPS, ScriptGraphs, hearing_compilers
from floatline.agreement.compiled.step_result import CompiledStep
from floatline.agreement.compiled.steps import compare_compiled_step, compare_graphs
from floatline.errors import FloatlineError, ReplayError
from floatline.precision.random_state import seed_all
from floatline.probe.runs.runs import choose_arguments
from floatline.probe.runs.target_steps import capture_target
from floatline.probe.steps.captured_step import CapturedStep
from floatline.running.loss_log import EnoughSteps
from floatline.workload import Target


def compare_build(target: Target, *, seed: int, backend: str | None, folder: str | Path | None) -> CompiledStep:
    """The third step of a build() target, or its first where it does not get that far: its loss, compiled.

    Args:
        target: The target.
        seed: Of the run.
        backend: What to compile with; None: what the target compiles with, or Inductor.
        folder: Where a reproducer goes; None writes none.
    """
    with hearing_compilers() as heard:
        step = _capture(target, seed)
    used = heard[-1] if heard else Compiler()
    if backend is not None:
        used = Compiler(backend)
    return compare_compiled_step(step, backend=used.backend, options=used.options, folder=folder)


def _capture(target: Target, seed: int) -> CapturedStep:
    try:
        return capture_target(target, step=STEPS - 1, seed=seed)
    except ReplayError:
        return capture_target(target, step=0, seed=seed)


def compare_train(target: Target, *, seed: int, backend: str | None, folder: str | Path | None) -> CompiledStep:
    """The third step of a train() function, or its last before: what it compiles, or else its model.

    Args:
        target: The target.
        seed: Of the run.
        backend: What to compile with; None: what the function compiles with, or Inductor.
        folder: Where a reproducer goes; None writes none.
    """
    seen, problem = ScriptGraphs(), ""
    trainer = target.trainer
    if trainer is None:
        raise FloatlineError(f"Target '{target.text}' has neither build() nor train(). Write one of both.")
    with seen.seeing():
        seed_all(seed)
        try:
            trainer(**choose_arguments(trainer, target.text, steps=STEPS, seed=seed))
        except EnoughSteps:
            pass
        except Exception as error:
            problem = f"it ended with {type(error).__name__} after {seen.num_steps} steps"
    if problem and not seen.graphs:
        return CompiledStep(backend or Compiler().name, problem=problem)
    return compare_graphs(seen.graphs, backend=backend, folder=folder)
