"""Processes that are forked from one that has computed nothing, and how long they may take."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_FORK = multiprocessing.get_context("fork")
PATIENCE = 180.0
"""Seconds without a sign of life after which a run counts as hanging."""


class Group:
    """Processes that work together.

    Args:
        work: Called in each of them with its rank, then the arguments.
        world: How many.
        folder: Where they meet, and where what they print goes.
        args: More arguments.
        timeout: Seconds after which a collective gives up.
        alone: They train apart: no process group.
    """

    def __init__(
        self,
        work: Callable[..., None],
        world: int,
        folder: Path,
        args: Sequence[Any] = (),
        *,
        timeout: float = 600.0,
        alone: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        meeting = None if alone or world == 1 else folder / f"meeting-{uuid.uuid4().hex}"
        self._children = [
            _FORK.Process(target=_enter, args=(work, rank, world, folder, meeting, timeout, args), daemon=True)
            for rank in range(world)
        ]
        for child in self._children:
            child.start()

    def wait(self, *, patience: float = PATIENCE, sign: Callable[[], Any] | None = None) -> list[int | None]:
        """Wait for all of them; those that show no sign of life are killed.

        Args:
            patience: How long to wait, for the end or for the next sign.
            sign: Gives something that changes while work goes on.

        Returns:
            The exit code of each, negative for a signal; None for one that was killed here.
        """
        deadline, last = time.monotonic() + patience, None
        while any(child.is_alive() for child in self._children) and time.monotonic() < deadline:
            next((child for child in self._children if child.is_alive()), self._children[0]).join(0.02)
            if sign is not None and (now := sign()) != last:
                deadline, last = time.monotonic() + patience, now
        return [self._end(child) for child in self._children]

    def wait_for_one(self, *, patience: float = PATIENCE) -> None:
        """Wait until some process has ended."""
        deadline = time.monotonic() + patience
        while all(child.is_alive() for child in self._children) and time.monotonic() < deadline:
            time.sleep(0.01)

    def end(self, rank: int) -> None:
        """What a launcher does to a process that is of no use any more."""
        self._children[rank].kill()

    def _end(self, child: Any) -> int | None:
        if not child.is_alive():
            child.join()
            return child.exitcode
        child.kill()
        child.join()
        return None


def _enter(
    work: Callable[..., None],
    rank: int,
    world: int,
    folder: Path,
    meeting: Path | None,
    timeout: float,
    args: Sequence[Any],
) -> None:
    """The first thing in a forked process."""
    out = os.open(folder / f"printed-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if meeting is not None:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
        )
    try:
        work(rank, *args)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)  # at once, as after an uncaught error: no goodbye to the others
    os._exit(0)
