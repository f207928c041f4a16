"""A memory budget honoured: batches cut so that the estimate of a step fits, and accumulated to the same update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from floatline.checkup.memory import estimate_memory
from floatline.errors import TargetError
from floatline.plans.presets import resolve_plan
from floatline.systems.distill.text import Windows
from floatline.workload import Workload

_GIB = 2**30


def split_windows(windows: Windows, size: int) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Batches of that many windows."""
    rows = range(0, len(windows.ids), size)
    cut = [Windows(*(tensor[i : i + size] for tensor in windows)) for i in rows]
    return [(tuple(batch), (batch.ids[:, 1:],)) for batch in cut]


def fit_budget(workload: Workload, windows: Windows, *, batch_size: int, gib: float) -> Workload:
    """The same updates in fewer bytes: the largest batch whose step fits, and as many of them as make an update.

    Numerics:
        The mean over a batch becomes the mean of the means of its parts: the distillation term counts each part
        alike, however many of its positions are aligned.

    Args:
        workload: With batches of `batch_size` windows.
        windows: What they were cut from.
        batch_size: Windows of an update.
        gib: What weights, gradients, optimizer states and activations may take on a GPU, by `estimate_memory`.

    Raises:
        TargetError: One window does not fit, or the parts of a step cannot be estimated.
    """
    plan = resolve_plan(workload.precision)
    smallest = None
    for size in (size for size in range(batch_size, 0, -1) if batch_size % size == 0):
        made = replace(workload, batches=split_windows(windows, size))
        optimizer = workload.make_optimizer(workload.model)
        memory = estimate_memory(made, [plan], optimizer=optimizer, like_cuda=True)
        smallest = memory.parts[plan.name].total
        if smallest is None:
            reason = memory.problems.get(plan.name, "the optimizer's states are not known")
            raise TargetError(f"memory_budget_gib: a step cannot be estimated ({reason}). Leave the budget out.")
        if smallest <= gib * _GIB:
            parts = batch_size // size
            return replace(made, precision=plan.model_copy(update={"accumulate": plan.accumulate * parts}))
    raise TargetError(
        f"memory_budget_gib {gib:g} does not hold a step of one window: it takes {(smallest or 0) / _GIB:.3g} GiB. "
        "Give a larger budget, a shorter length or a smaller student."
    )
