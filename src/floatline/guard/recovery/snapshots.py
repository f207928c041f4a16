"""Snapshots: the last good states of a run, in host memory, to go back to."""
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from floatline.errors import GuardError
from floatline.guard.policy import Policy
from floatline.guard.recovery.host_copies import Layout, Pieces
from floatline.ledger.lines import LateValues
from floatline.numerics import foreach
from floatline.numerics.moving import send
from floatline.optim.mesh import local_part, num_processes


class Snapshot:
    """The state behind one attempt.

    Reading `finite`, `canary` or `tensors` waits for the device.

    Args:
        attempt: The last step it holds.
        extra: What is not a tensor: learning rates, schedulers; JSON.
        layout: How the tensors lie in host memory.
        pieces: Their host memory.
        late: 'bad', and 'canary' where there is one; read behind the copies.
    """

    def __init__(
        self, attempt: int, extra: dict[str, Any], *, layout: Layout, pieces: Pieces, late: LateValues
    ) -> None:
        self.attempt = attempt
        self.extra = extra
        self.nbytes = layout.nbytes
        self._layout = layout
        self._pieces = pieces
        self._late = late
        self._values: dict[str, float] | None = None

    @property
    def finite(self) -> bool:
        """Whether none of the numbers that are looked at is inf or NaN, on any process."""
        return self._read()["bad"] == 0

    @property
    def canary(self) -> float | None:
        """Loss of the canary with these weights, averaged over the processes; None where there is no canary."""
        return self._read().get("canary")

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The host copies by name; those that lie in two blocks are put together, which takes memory."""
        self._read()
        return {name: self._layout.gather(name, self._pieces) for name in self._pieces}

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each tensor."""
        return {name: place.shape for name, place in self._layout.places.items()}

    def _read(self) -> dict[str, float]:
        if self._values is None:
            self._values = self._late.read()
        return self._values


class SnapshotRing:
    """Keeps the newest snapshots that fit into the budget.

    A CUDA tensor is copied into pinned memory in the order of its current stream: the host waits for nothing, and
    what is launched next waits for the transfer. It has to, because optimizers change weights in place; a side stream
    that the next step waits for would take as long. At 50 GB/s a model with 6 GB of weights and states stalls the GPU
    for about 0.12 s, every 20 steps or more. The memory of a snapshot is allocated once and used again.

    The interval grows with the square root of the run. What is lost is the sum of the time that snapshots take and
    of the work that a rollback undoes; it is least at sqrt(2 * cost * distance between faults) (Young 1974,
    doi:10.1145/361147.361115). The distance is taken to be the length of the run so far, and the cost half a step:
    after 10,000 steps there is one every 100, after a million one every 1,000.

    Args:
        policy: Budget, number and interval.
        process_group: Processes that train together, and must choose the same snapshot; None is the default group.

    Attributes:
        reason: Why there are no snapshots; '' where there can be.
        num_slots: How many snapshots fit; None before the first is taken.
    """

    def __init__(self, *, policy: Policy, process_group: dist.ProcessGroup | None = None) -> None:
        self.reason = "" if policy.snapshot_gib else "snapshot_gib is 0"
        self.num_slots: int | None = None if policy.snapshot_gib else 0
        self._policy = policy
        self._group = process_group
        self._layout: Layout | None = None
        self._snapshots: list[Snapshot] = []
        self._free: list[Pieces] = []
        self._last = 0

    def interval(self, attempt: int) -> int:
        """Steps between two snapshots at this point of the run: a multiple of `snapshot_every`."""
        every = self._policy.snapshot_every
        return max(every, math.isqrt(attempt) // every * every)

    def due(self, attempt: int) -> bool:
        """Whether a snapshot should be taken behind this attempt; at once where there is none."""
        if self.num_slots == 0:
            return False
        return not self._snapshots or attempt - self._last >= self.interval(attempt)

    @torch.no_grad()
    def take(
        self,
        attempt: int,
        tensors: Mapping[str, Tensor],
        extra: dict[str, Any],
        canary: Tensor | None,
        *,
        unchecked: Collection[str] = (),
    ) -> None:
        """Copy the tensors as they are in the order of the current stream; no host sync once memory is there.

        Tensors of other names, shapes or dtypes than last time begin a new ring: what it held fits no longer.

        Numerics:
            Bit for bit. Finiteness is that of all floating-point and complex tensors on all processes, by their
            largest magnitude, which NaN and inf pass through. Integers, packed states among them, are not looked at.

        Args:
            attempt: The step that was made last.
            tensors: By name; of a DTensor this process's part.
            extra: What goes with them.
            canary: Loss of the canary with these weights.
            unchecked: Names of tensors that may hold inf or NaN in a sound state, such as masks and windows that
                are not full yet.
        """
        parts = {name: local_part(tensor.detach()) for name, tensor in tensors.items()}
        if self._layout is None or not self._layout.fits(parts):
            self._begin(Layout(parts))
        if self._layout is None or not self.num_slots:
            return
        pieces = self._take_slot(self._layout)
        self._layout.store(parts, pieces)
        # After the copies: once these values can be read, the copies are complete.
        bad = count_nonfinite([part for name, part in parts.items() if name not in unchecked], home=self._layout.home)
        late = self._agree(bad, canary)
        self._snapshots.append(Snapshot(attempt, copy.deepcopy(extra), layout=self._layout, pieces=pieces, late=late))
        self._last = attempt

    def newest_before(self, attempt: int) -> Snapshot | None:
        """The newest finite snapshot of that attempt or an earlier one; else the oldest finite one there is."""
        good = [snapshot for snapshot in self._snapshots if snapshot.finite]
        old = [snapshot for snapshot in good if snapshot.attempt <= attempt]
        return old[-1] if old else next(iter(good), None)

    def newest(self) -> Snapshot | None:
        """The newest finite snapshot."""
        return next((snapshot for snapshot in reversed(self._snapshots) if snapshot.finite), None)

    @torch.no_grad()
    def restore(self, snapshot: Snapshot, tensors: Mapping[str, Tensor]) -> None:
        """Copy a snapshot back into the live tensors, in place.

        Args:
            snapshot: One of this ring.
            tensors: By name; the same as when it was taken.
        """
        if snapshot not in self._snapshots:
            raise GuardError(f"The snapshot of step {snapshot.attempt:,} is no longer kept. Take one the ring gives.")
        if not snapshot.finite:
            raise GuardError(f"The snapshot of step {snapshot.attempt:,} is not finite. Take one the ring gives.")
        parts = {name: local_part(tensor.detach()) for name, tensor in tensors.items()}
        snapshot._layout.check(parts)
        snapshot._layout.load(parts, snapshot._pieces)

    def discard_after(self, attempt: int) -> None:
        """Drop the snapshots of later attempts: they hold what was undone."""
        for snapshot in [snapshot for snapshot in self._snapshots if snapshot.attempt > attempt]:
            self._drop(snapshot)

    def state_dict(self) -> dict[str, Any]:
        """What the ring holds, for JSON; the snapshots themselves live as long as the process."""
        attempts = [snapshot.attempt for snapshot in self._snapshots]
        return {"attempts": attempts, "interval": self.interval(self._last), "reason": self.reason}

    def _begin(self, layout: Layout) -> None:
        self._snapshots.clear()
        self._free.clear()
        self._layout = layout
        nbytes, have = layout.nbytes, self._policy.snapshot_gib
        if num_processes(self._group) > 1:
            # Parts may differ in size; the rings must not differ in length.
            largest = torch.tensor(nbytes, device=layout.home)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
            nbytes = int(largest)
        self.num_slots = int(min(self._policy.snapshots, have * 2**30 / max(1, nbytes)))
        short = f"one snapshot needs {nbytes / 2**30:.3g} GiB, snapshot_gib is {have:.3g}"
        self.reason = "" if self.num_slots else short

    def _take_slot(self, layout: Layout) -> Pieces:
        """Memory for one more snapshot: that of one which is dropped, or new."""
        if len(self._snapshots) == self.num_slots:
            # Broken ones go first: a ring full of them is worth nothing. All but the newest are from long ago, so
            # reading whether they are finite does not wait.
            broken = (snapshot for snapshot in self._snapshots[:-1] if not snapshot.finite)
            self._drop(next(broken, self._snapshots[0]))
        return self._free.pop() if self._free else layout.allocate()

    def _agree(self, bad: Tensor, canary: Tensor | None) -> LateValues:
        """The sum of 'bad' and the mean of 'canary' over the processes, to be read later."""
        loss = None if canary is None else canary.detach().to(torch.float32).reshape(())
        world = num_processes(self._group)
        if world > 1:
            both = torch.stack([bad, torch.zeros_like(bad) if loss is None else loss.to(bad.device)])
            dist.all_reduce(both, group=self._group)
            bad, loss = both[0], None if loss is None else both[1] / world
        return LateValues({"bad": bad, "canary": loss})

    def _drop(self, snapshot: Snapshot) -> None:
        self._snapshots.remove(snapshot)
        self._free.append(snapshot._pieces)


def count_nonfinite(parts: Iterable[Tensor], *, home: torch.device) -> Tensor:
    """How many tensors hold inf or NaN, on the home device and not read; integers hold none.

    Numerics:
        By the largest magnitude, which is exact in every dtype; sums or squares could overflow by themselves.

    Args:
        parts: Plain tensors.
        home: Where the number is wanted.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for part in parts:
        real = torch.view_as_real(part) if part.is_complex() else part
        if not real.is_floating_point() or not real.numel():
            continue
        wide = real.float() if real.element_size() == 1 else real  # FP8 has no norm of its own
        kinds.setdefault((wide.device, wide.dtype), []).append(wide)
    total = torch.zeros((), dtype=torch.float32, device=home)
    for (device, _), tensors in kinds.items():
        bad = torch.stack(foreach.norm(tensors, math.inf)).isfinite().logical_not().sum()
        total += float(bad) if device.type == "cpu" else send(bad, home)
    return total
