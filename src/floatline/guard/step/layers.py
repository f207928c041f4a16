"""What is recorded of single layers, on a schedule: gradient norms, and gradients lost to zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from floatline.guard.policy import Policy
from floatline.guard.step.underflow import SMALLEST_FP16, Lost, count_near_zero, report
from floatline.ledger.lines import LateValues
from floatline.optim import mesh
from floatline.optim.mesh import num_processes
from floatline.optim.survey import Survey
from floatline.plans import Plan


class Layers:
    """Names of the trained parameters, and what was counted for each.

    Args:
        model: Gives the names.
        optimizer: Gives the order.
        every: Steps between two records of the norms; 0 never.
        policy: Says how often lost gradients are counted.
        plan: Lost gradients are counted where FP16 computes them.
        group: Processes that train together; None is the default group.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int,
        policy: Policy,
        plan: Plan,
        count: Callable[..., Tensor] = count_near_zero,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        names = {id(param): name for name, param in model.named_parameters()}
        self._params = [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"]]
        self._every = every
        self._policy = policy
        self._count_every = policy.underflow_every if plan.compute == "fp16" else 0
        self._group = group
        self._count = count
        self._counts: dict[int, tuple[list[str], list[int], LateValues]] = {}

    def due(self, attempt: int) -> bool:
        """Whether the norms of this step are recorded."""
        return self._every > 0 and attempt % self._every == 0

    def record(self, survey: Survey, unit: Tensor) -> tuple[tuple[str, ...], Tensor]:
        """Names and unscaled norms of the parameters that have a gradient."""
        names = tuple(name for name, param in self._params if param.grad is not None)
        return names, survey.whole.norms / unit

    def count(self, attempt: int) -> None:
        """Count the smallest gradients of this step, if it is time; the numbers are read later."""
        if not self._count_every or attempt % self._count_every:
            return
        present = [(name, p) for name, p in self._params if p.grad is not None and not p.grad.is_sparse]
        if not present:
            return
        world = num_processes(self._group)
        grads = [mesh.local_part(cast(Tensor, p.grad)) for _, p in present]
        # Averaged over processes, the smallest gradient is a fraction of FP16's smallest number.
        counts = self._count(grads, smallest=SMALLEST_FP16 / world)
        sharded = world > 1 and any(mesh.is_distributed(p) for _, p in present)
        if sharded:
            # Processes that saw different parts must not come to different scales. Whole gradients are the same
            # everywhere.
            dist.all_reduce(counts, group=self._group)
        sizes = [p.numel() * world // mesh.num_parts(p) if sharded else p.numel() for _, p in present]
        late = LateValues({}, [([str(i) for i in range(counts.numel())], counts.reshape(-1).to(torch.float64))])
        self._counts[attempt] = ([name for name, _ in present], sizes, late)

    def lost(self, attempt: int) -> Lost | None:
        """What FP16 lost in this step; None where it was not counted."""
        found = self._counts.pop(attempt, None)
        if found is None:
            return None
        names, sizes, late = found
        counts = torch.tensor([int(value) for value in late.read().values()], device="cpu").reshape(-1, 3)
        return report(names, counts, sizes, policy=self._policy)
