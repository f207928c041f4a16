"""What the processes of a run agree on before any of them takes a branch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def num_processes(group: dist.ProcessGroup | None) -> int:
    """How many processes take part; 1 where torch.distributed is absent, not started, or this process is outside."""
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return max(1, dist.get_world_size(group))


def agree_on_overflow(
    found: dict[torch.device, Tensor], *, home: torch.device, group: dist.ProcessGroup | None
) -> dict[torch.device, Tensor]:
    """Let every process find what any process has found, with one all-reduce of two numbers.

    Nothing is read on the host, except where this process has no gradient at all: it then has to know whether the
    others have some, to stay in step with them.

    Args:
        found: For each device, 1.0 if a gradient there holds inf or NaN, else 0.0; changed in place. Empty if this
            process has no gradients.
        home: Where the numbers are brought together.
        group: The processes; None is the default group.

    Returns:
        The same flags; still empty if no process has gradients.
    """
    if num_processes(group) == 1:
        return found
    both = torch.full((2,), float(bool(found)), device=home)
    overflow, some = both[0], both[1]
    overflow.zero_()
    for flag in found.values():
        torch.maximum(overflow, flag.to(home, non_blocking=True), out=overflow)
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    for flag in found.values():
        flag.copy_(overflow, non_blocking=True)
    if not found and some.item():
        found[home] = overflow.clone()
    return found
