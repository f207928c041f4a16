"""Checkpoints of several processes: a folder for each of them, written and read by all of them together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from floatline.base.plain_values import DAMAGE
from floatline.errors import GuardError
from floatline.guard.checkpoints import guard_state, layouts, run_files
from floatline.guard.run import Run
from floatline.optim import mesh
from floatline.optim.mesh import agree_that_all_can, num_processes


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
        own += [name for name in tensors if name.startswith(("rng.", "samples."))]
        tensors = {name: tensors[name] for name in tensors if name in own}
    failure = None
    try:
        run_files.save_checkpoint(_of_rank(folder, rank), run.attempts, tensors, state)
    except GuardError as error:
        failure = error
    # Whoever reads a checkpoint next must find those of all processes.
    agree_that_all_can("write its part of the checkpoint", failure, home=run.device, group=group)
    return folder


def load(run: Run, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint for this process, whatever processes wrote it.

    Args:
        run: Says which processes there are.
        path: A checkpoint of one process, or the folder of several checkpoints: the newest is taken that all the
            processes have that wrote it.

    Raises:
        GuardError: It cannot be read, by this process or another one, or not be cut for these processes.
    """
    group = run.judge.group
    world = num_processes(group)
    rank, failure, found, number = (dist.get_rank(group) if world > 1 else 0), None, None, -1
    try:
        number = _newest(path)
    except GuardError as error:
        failure = error
    if world > 1:
        agree_that_all_can("find its part of the checkpoint", failure, home=run.device, group=group)
        agreed = torch.tensor(number, device=run.device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)  # one may see a file later than another
        number = int(agreed)
    try:
        found = _read(run, path, rank, number)
    except GuardError as error:
        failure = failure or error
    except DAMAGE as error:
        failure = GuardError(f"{path} cannot be taken over ({error}). Give a checkpoint that save() wrote.")
    agree_that_all_can("read its part of the checkpoint", failure, home=run.device, group=group)
    if found is None:
        raise AssertionError  # it was read, or there was a failure
    return found


def _read(run: Run, path: Path, rank: int, number: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    world = num_processes(run.judge.group)
    parts = _parts(path, number)
    if not parts and world > 1:
        raise GuardError(f"{path} holds no checkpoint. Give the folder that save() was given, on every process.")
    if not parts:
        return run_files.load_checkpoint(path)  # says what is wrong with it
    if len(parts) == world:
        tensors, state = _load(parts[rank], world)
        if not any(name.startswith("judge.") for name in tensors):
            tensors = {**_load(parts[0], world)[0], **tensors}
        if layouts.fits(run, tensors):
            return tensors, state
    return layouts.fit(run, [_load(part, len(parts)) for part in parts], rank)


def _load(part: Path, processes: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """One part of a checkpoint of so many processes; one that an older run left has another number."""
    tensors, state = run_files.load_checkpoint(part)
    if state.get("processes", 1) != processes:
        raise GuardError(
            f"{part} is a part of a checkpoint of {state.get('processes', 1)!r:.20} processes, not of {processes:,}. "
            "Give the folder that save() was given; if this is it, delete what an older run has left there."
        )
    return tensors, state


def _newest(path: Path) -> int:
    """Number of the newest checkpoint that is there whole; -1 where there is none."""
    folder = _of_rank(path, 0)
    numbers = {_number(found) for found in [*run_files.list_checkpoints(path), *run_files.list_checkpoints(folder)]}
    return next((number for number in sorted(numbers, reverse=True) if _parts(path, number)), -1)


def _parts(path: Path, number: int) -> list[Path]:
    """The checkpoint of that number, part by part in the order of ranks; none where one is missing."""
    if (path / "state.json").is_file():
        return [path]
    whole, first = _find(path, number), _find(_of_rank(path, 0), number)
    if whole != path:
        return [whole]
    if first == _of_rank(path, 0):
        return []
    processes = run_files.load_state(first).get("processes")
    if not isinstance(processes, int) or processes < 1:
        raise GuardError(f"{first} does not say how many processes wrote it. Give a checkpoint that save() wrote.")
    parts: list[Path] = []
    for rank in range(processes):
        part = _find(_of_rank(path, rank), number)
        if part == _of_rank(path, rank):
            return []
        parts.append(part)
    return parts


def _of_rank(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}"


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def _find(folder: Path, number: int) -> Path:
    """The checkpoint of that number; the folder itself, which is none, where it is missing."""
    found = [path for path in run_files.list_checkpoints(folder) if _number(path) == number]
    return found[-1] if found else folder
