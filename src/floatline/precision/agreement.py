"""What the processes of a run agree on before any of them takes a branch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from floatline.errors import GuardError
from floatline.numerics.moving import send


def num_processes(group: dist.ProcessGroup | None) -> int:
    """How many processes take part; 1 where torch.distributed is absent, not started, or this process is outside."""
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return max(1, dist.get_world_size(group))


def agree_on_mean(value: float | Tensor, *, home: torch.device, group: dist.ProcessGroup | None) -> float | Tensor:
    """The mean of a number over the processes; the number itself where there is one process.

    Args:
        value: This process's.
        home: Where it is brought to.
        group: The processes; None is the default group.
    """
    world = num_processes(group)
    if world == 1:
        return value
    mean = torch.zeros((), dtype=torch.float32, device=home)
    mean += value
    dist.all_reduce(mean, group=group)
    return mean / world


def agree_that_all_can(
    what: str, failure: Exception | None, *, home: torch.device, group: dist.ProcessGroup | None
) -> None:
    """Let every process fail where one has, instead of waiting for it; they meet here in any case.

    Args:
        what: What they were doing, for those that could.
        failure: Why this process could not.
        home: Where numbers of this process are.
        group: The processes; None is the default group.

    Raises:
        GuardError: Some other process could not.
    """
    world = num_processes(group)
    failed = torch.zeros(world, dtype=torch.float32, device=home)
    if world > 1:
        failed[dist.get_rank(group)] = failure is not None
        dist.all_reduce(failed, group=group)
    if failure is not None:
        raise failure
    others = [str(rank) for rank in range(world) if bool(failed[rank])]
    if others:
        names = ", ".join(others)
        raise GuardError(f"Process {names} could not {what}. Its own message says why; look at its output.")


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
    both = torch.full((2,), float(bool(found)), dtype=torch.float32, device=home)
    overflow, some = both[0], both[1]
    overflow.zero_()
    for flag in found.values():
        torch.maximum(overflow, send(flag, home), out=overflow)
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    for flag in found.values():
        flag.copy_(overflow, non_blocking=flag.device.type != "cpu")
    if not found and some.item():
        found[home] = overflow.clone()
    return found
