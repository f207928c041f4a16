"""Several processes: parts of sharded tensors, sums over those who share one, and what all of them agree on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from floatline.errors import GuardError
from floatline.numerics.moving import send
from floatline.optim.survey import BLOCK, Survey


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; asks for its interface, so that torch.distributed need not be there."""
    return hasattr(tensor, "device_mesh")


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds; the tensor itself where it is not distributed."""
    return cast(Any, tensor).to_local() if is_distributed(tensor) else tensor


def num_parts(tensor: Tensor) -> int:
    """How many parts a tensor is cut into; 1 where every process holds all of it."""
    if not is_distributed(tensor):
        return 1
    own = cast(Any, tensor)
    return math.prod(own.device_mesh.size(i) for i, placement in enumerate(own.placements) if placement.is_shard())


def groups_of(tensor: Tensor) -> tuple[Any, ...]:
    """The groups of processes over which a tensor is cut, one for each mesh dimension that cuts it."""
    if not is_distributed(tensor):
        return ()
    own = cast(Any, tensor)
    cuts = [dim for dim, placement in enumerate(own.placements) if placement.is_shard()]
    return tuple(own.device_mesh.get_group(dim) for dim in cuts)


def local_grad(param: Tensor, grad: Tensor) -> Tensor:
    """The part of a gradient that belongs to the parameter's part on this process."""
    if not is_distributed(grad):
        return grad
    sharded, own = cast(Any, grad), cast(Any, param)
    if sharded.placements != own.placements:
        sharded = sharded.redistribute(placements=own.placements)
    return sharded.to_local()


def like_param(param: Tensor, name: str, local: Tensor) -> Tensor:
    """A state of this process as a DTensor laid out like its parameter, so that distributed checkpoints see it whole.

    The scales of 8-bit blocks belong to the parts, not to the whole: they are laid out one part after the other,
    each with room for the largest, and fit the same number of processes only. The step counter stays as it is.

    Args:
        param: The parameter.
        name: The state's name.
        local: The state.
    """
    if not is_distributed(param) or name == "step":
        return local
    own = cast(Any, param)
    if not name.endswith("_scale"):
        return _wrap(own, local, own.placements, param.shape, param.stride())
    from torch.distributed.tensor import Replicate, Shard

    room, parts = list(param.shape), 1
    for dim, placement in enumerate(own.placements):
        if placement.is_shard():
            room[placement.dim] = -(-room[placement.dim] // own.device_mesh.size(dim))
            parts *= own.device_mesh.size(dim)
    local = torch.nn.functional.pad(local, (0, -(-math.prod(room) // BLOCK) - local.numel()))
    placements = [Shard(0) if placement.is_shard() else Replicate() for placement in own.placements]
    return _wrap(own, local, placements, torch.Size([parts * local.numel()]), (1,))


def portable(tensor: Tensor) -> Tensor:
    """A DTensor that collectives can carry: NCCL and gloo have no int16, so its bits travel as bfloat16."""
    if tensor.dtype != torch.int16 or not is_distributed(tensor):
        return tensor
    own = cast(Any, tensor)
    return _wrap(own, own.to_local().view(torch.bfloat16), own.placements, tensor.shape, tensor.stride())


def _wrap(like: Any, local: Tensor, placements: Any, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    from_local = cast("Callable[..., Tensor]", type(like).from_local)
    return from_local(local, like.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def offsets_of(param: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of the local part, and where it begins in each dimension of the whole tensor."""
    from torch.distributed import tensor

    own = cast(Any, param)
    find = getattr(getattr(tensor, "_utils", None), "compute_local_shape_and_global_offset", _find_offsets)
    shape, offset = find(param.shape, own.device_mesh, own.placements)
    return tuple(shape), tuple(offset)


def _find_offsets(shape: torch.Size, device_mesh: Any, placements: Any) -> tuple[list[int], list[int]]:
    """The same from what is public: parts are cut as torch.chunk does, by one mesh dimension after the other."""
    sizes, starts = list(shape), [0] * len(shape)
    for number, placement in enumerate(placements):
        if placement.is_shard():
            dim, place = int(placement.dim), int(device_mesh.get_local_rank(number))
            room = -(-sizes[dim] // int(device_mesh.size(number)))
            first = min(room * place, sizes[dim])
            starts[dim] += first
            sizes[dim] = min(room, sizes[dim] - first)
    return sizes, starts


def part_of(param: Tensor, whole: Tensor) -> Tensor:
    """This process's part of a whole tensor, cut as the parameter is."""
    shape, offset = offsets_of(param)
    for dim, (first, size) in enumerate(zip(offset, shape, strict=True)):
        whole = whole.narrow(dim, first if size else 0, size)
    return whole


def start_of(param: Tensor) -> int:
    """Index of the local part's first element in the whole tensor.

    A part of the first dimension is a range of the whole tensor, so its random choices are those of one process.
    Other parts get a range of their own: still different on every process, but not the same as on one.
    """
    if not is_distributed(param):
        return 0
    shape, offset = offsets_of(param)
    if shape[1:] == tuple(param.shape[1:]):
        return offset[0] * math.prod(shape[1:]) if shape else 0
    strides = [math.prod(param.shape[i + 1 :]) for i in range(len(shape))]
    first = sum(o * s for o, s in zip(offset, strides, strict=True))
    return param.numel() * (1 + first)


def row_group(param: Tensor) -> Any:
    """The processes that hold rows of a matrix, in the rows' order; None where it is cut in another way, or not."""
    from torch.distributed.tensor import Shard

    own = cast(Any, param)
    cuts = [dim for dim, placement in enumerate(own.placements) if placement.is_shard()]
    if len(cuts) != 1 or type(own.placements[cuts[0]]) is not Shard or own.placements[cuts[0]].dim != 0:
        return None
    # Groups number their processes upwards, whatever their order in the mesh.
    upwards = bool((own.device_mesh.mesh.diff(dim=cuts[0]) > 0).all())
    return own.device_mesh.get_group(cuts[0]) if upwards else None


def row_shapes(param: Tensor, size: int) -> list[tuple[int, int]]:
    """Rows and columns that each of so many processes holds of a matrix: cut as torch.chunk does."""
    rows, columns = param.shape
    room = -(-rows // size)
    return [(max(0, min(room, rows - room * place)), columns) for place in range(size)]


def own_share(survey: Survey, params: list[Tensor]) -> Survey:
    """The survey of this process with what it takes to add up all; the survey itself where nothing is sharded.

    Args:
        survey: What this process found, in the parameters' order.
        params: The parameters.
    """
    if not any(map(is_distributed, params)):
        return survey
    parts = torch.tensor([float(num_parts(param)) for param in params], device=survey.sums.device)
    return replace(survey, parts=parts, sum_up=lambda: agree(survey, params))


def agree(survey: Survey, params: list[Tensor]) -> Survey:
    """Add up what the processes found in their parts of sharded gradients.

    One all-reduce for each mesh dimension that shards something, whatever the number of tensors. Replicated and
    plain tensors are left alone: every process has found the same.

    Args:
        survey: What this process found, in the parameters' order.
        params: The parameters.
    """
    by_group: dict[Any, list[int]] = {}
    for i, param in enumerate(params):
        for group in groups_of(param):
            by_group.setdefault(group, []).append(i)
    if not by_group:
        return survey
    # float64 holds the counts exactly, and sums that float32 would round once per process.
    both = torch.stack([survey.sums.to(torch.float64), survey.nonfinite.to(torch.float64)])
    for group, members in by_group.items():
        index = torch.tensor(members, device=both.device)
        part = both[:, index].contiguous()
        torch.distributed.all_reduce(part, group=group)
        both[:, index] = part
    return Survey(both[0].to(torch.float32), both[1].to(torch.int32))


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
