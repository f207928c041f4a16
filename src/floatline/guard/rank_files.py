"""Checkpoints of several processes: a folder for each of them, written and read by all of them together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from floatline.errors import GuardError
from floatline.guard import guard_state, run_files
from floatline.guard.agreement import agree_that_all_can, num_processes
from floatline.guard.run import Run
from floatline.optim import mesh


def save(run: Run, folder: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> Path:
    """Write a checkpoint; with several processes, each into a folder of its own under this one.

    Process 0 writes everything; the others write their shards if they have any, and else what differs between
    replicas: random numbers and buffers.

    Args:
        run: What is saved.
        folder: Where checkpoints lie; one that all processes see.
        tensors: What `guard_state.collect` gave.
        state: The same.

    Returns:
        What `load` takes: the checkpoint, or the folder where there are several processes.

    Raises:
        GuardError: It cannot be written, by this process or another one.
    """
    group = run.judge.group
    world = num_processes(group)
    state = {**state, "processes": world}
    if world == 1:
        return run_files.save_checkpoint(folder, run.attempts, tensors, state)
    rank = dist.get_rank(group)
    if rank and not any(map(mesh.is_distributed, run.model.parameters())):
        own = guard_state.buffer_names(run)
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("rng.") or name in own}
    failure = None
    try:
        run_files.save_checkpoint(_of_rank(folder, rank), run.attempts, tensors, state)
    except GuardError as error:
        failure = error
    # Whoever reads a checkpoint next must find those of all processes.
    agree_that_all_can("write its part of the checkpoint", failure, home=run.device, group=group)
    return folder


def load(run: Run, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint for this process.

    Args:
        run: Says which processes there are.
        path: A checkpoint, or the folder of several. With several processes always the folder: the newest checkpoint
            is taken that all of them have.

    Raises:
        GuardError: It cannot be read, by this process or another one, or is of another number of processes.
    """
    group = run.judge.group
    world = num_processes(group)
    if world == 1:
        newest = run_files.newest_checkpoint(path)
        _check_number(path, 1)
        return run_files.load_checkpoint(path if newest is None else newest)
    rank, failure, found = dist.get_rank(group), None, None
    try:
        _check_number(path, world)
    except GuardError as error:
        failure = error
    agree_that_all_can("find its part of the checkpoint", failure, home=run.device, group=group)
    newest = run_files.newest_checkpoint(_of_rank(path, rank))
    number = torch.tensor(-1 if newest is None else _number(newest), device=run.device)
    # A process that ended while others were still writing has one less.
    dist.all_reduce(number, op=dist.ReduceOp.MIN, group=group)
    try:
        found = _read(path, rank, int(number), world)
    except GuardError as error:
        failure = error
    agree_that_all_can("read its part of the checkpoint", failure, home=run.device, group=group)
    if found is None:
        raise AssertionError  # it was read, or there was a failure
    return found


def _read(path: Path, rank: int, number: int, world: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, state = run_files.load_checkpoint(_find(_of_rank(path, rank), number))
    if state.get("processes") != world:
        raise _wrong_number(path, state.get("processes", 1), world)
    if not any(name.startswith("judge.") for name in tensors):
        shared, _ = run_files.load_checkpoint(_find(_of_rank(path, 0), number))
        tensors = {**shared, **tensors}
    return tensors, state


def _check_number(path: Path, world: int) -> None:
    """Refuse what cannot be a checkpoint of so many processes; more folders may be left from another run."""
    have = len(list(path.glob("rank-*"))) if path.is_dir() else 0
    if (path / "state.json").is_file() or run_files.newest_checkpoint(path) is not None:
        have = 1
    if (world == 1 and have > 1) or 0 < have < world:
        raise _wrong_number(path, have, world)
    if not have and world > 1:
        raise GuardError(f"{path} holds no checkpoint. Give the folder that save() was given, on every process.")


def _wrong_number(path: Path, have: int, world: int) -> GuardError:
    """Random numbers and shards are those of so many processes, and fit no other number."""
    return GuardError(
        f"{path} is the checkpoint of {_processes(have)}, and this run has {_processes(world)}. "
        f"Resume it with {_processes(have)}; or load its weights by themselves, and begin a new run."
    )


def _processes(num: int) -> str:
    return "one process" if num == 1 else f"{num:,} processes"


def _of_rank(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}"


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def _find(folder: Path, number: int) -> Path:
    """The checkpoint of that number; the folder itself, which is none, where it is missing."""
    found = [path for path in run_files.list_checkpoints(folder) if _number(path) == number]
    return found[-1] if found else folder
