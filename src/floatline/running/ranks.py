"""What a launcher tells a process of several, and where each of them keeps its files. Without torch."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

# What launchers call a process's number, and how many there are on this machine.
_NUMBERS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_COUNTS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_WAIT = 60.0  # seconds for other processes


def read_number(environment: Mapping[str, str] = os.environ) -> int:
    """Number of this process, as its launcher has it; 0 without one."""
    return next((int(environment[name]) for name in _NUMBERS if environment.get(name, "").isdigit()), 0)


def count_beside(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes the launcher has started on this machine; 1 without one."""
    return next((int(environment[name]) for name in _COUNTS if environment.get(name, "").isdigit()), 1)


def path_of(path: Path, rank: int) -> Path:
    """Where a process keeps a file that every process has: rank 0 where it is, each other one in a folder beside it."""
    return path if not rank else path.parent / f"rank_{rank}" / path.name


def own_path(path: Path) -> Path:
    """The same for this process; the folder is there then."""
    own = path_of(path, read_number())
    own.parent.mkdir(exist_ok=True)
    return own


def find_ranks(path: Path) -> dict[int, Path]:
    """The files that processes have left, by rank."""
    others = {int(found.parent.name.removeprefix("rank_")): found for found in path.parent.glob(f"rank_*/{path.name}")}
    return ({0: path} if path.exists() else {}) | dict(sorted(others.items()))


def wait_for_others(path: Path) -> None:
    """Wait until each process on this machine has left its file, so that what this one still sends reaches them.

    Args:
        path: Of rank 0's.
    """
    until = time.monotonic() + _WAIT
    while len(find_ranks(path)) < count_beside() and time.monotonic() < until:
        time.sleep(0.02)
