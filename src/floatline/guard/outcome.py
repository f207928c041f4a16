"""Outcome: what one step came to. Its numbers may still be on the device until they are read."""

from __future__ import annotations

from torch import Tensor

from floatline.guard.step.judge import NAMES
from floatline.ledger.lines import REASONS, LateValues


class Outcome:
    """What one step came to.

    Reading a number waits for the device, once; `attempt`, `due`, `epoch` and `batch` are known at once.

    Args:
        report: The judge's numbers, on the device.
        attempt: Number of the step, counted from 1.
        due: Whether this is a step to be reported: every `due_every`-th.
        epoch: Epoch, where the caller counts them.
        batch: Batch within the epoch.
        micro_batches: Batches that were summed.
        lr: Learning rate of the first group.
        votes: For each process, whether it is for skipping the step, on the device; None where there is only one.
    """

    def __init__(
        self,
        report: Tensor,
        *,
        attempt: int,
        due: bool = False,
        epoch: int | None = None,
        batch: int | None = None,
        micro_batches: int = 1,
        lr: float | None = None,
        layers: tuple[tuple[str, ...], Tensor] | None = None,
        retries: int = 0,
        votes: Tensor | None = None,
    ) -> None:
        self.attempt = attempt
        self.due = due
        self.epoch = epoch
        self.batch = batch
        self.micro_batches = micro_batches
        self.lr = lr
        self.retries = retries
        self.report = report  # the numbers of NAMES, on the device
        self._late = LateValues({}, [(NAMES, report)])
        self._layers = None if layers is None else LateValues({}, [layers])
        self._votes = None if votes is None else LateValues({}, [(tuple(map(str, range(len(votes)))), votes)])
        self._numbers: dict[str, float] | None = None

    @property
    def numbers(self) -> dict[str, float]:
        """Everything the judge reported, by name; waits for the device."""
        if self._numbers is None:
            self._numbers = self._late.read()
        return self._numbers

    @property
    def layer_norms(self) -> dict[str, float] | None:
        """Norm of the unscaled gradient by parameter, where this step recorded them; waits for the device."""
        return None if self._layers is None else self._layers.read()

    @property
    def reason(self) -> str | None:
        """Why the step was skipped; None if it was applied."""
        place = int(self.numbers["reason"])
        return None if place == 0 else REASONS[place - 1]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The processes for which the step was skipped; none where it was applied, or there is only one."""
        if self._votes is None or self.applied:
            return ()
        return tuple(int(rank) for rank, vote in self._votes.read().items() if vote)

    @property
    def applied(self) -> bool:
        """Whether the optimizer took the step."""
        return self.reason is None

    @property
    def loss(self) -> float:
        """The unscaled loss as it was: NaN stays NaN."""
        return self.numbers["loss"]

    @property
    def grad_norm(self) -> float:
        """Global norm of the unscaled gradients, before clipping."""
        return self.numbers["grad_norm"]

    @property
    def scale(self) -> float:
        """The loss scale this step used."""
        return self.numbers["scale"]

    def __str__(self) -> str:
        """One line for people; waits for the device."""
        what = "applied" if self.applied else f"skipped ({self.reason})"
        return f"loss {self.loss:.4g}  {what}  scale {self.scale:.6g}  norm {self.grad_norm:.4g}"
