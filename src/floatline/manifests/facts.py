"""ManifestFacts: what was found out about one process of a run, as plain data. No torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from floatline.manifests.rows import (
    ExchangeRow,
    PeakRow,
    Phase,
    RankRow,
    RanRow,
    StateRow,
    SumRow,
    Switches,
    TiedRow,
    UpdateRow,
    WorkRow,
)
from floatline.precision.holding import Holding


@dataclass(frozen=True)
class ManifestFacts:
    """What a run computes in, from its live objects; with the measures of one real step, where one was made.

    Args:
        holdings: What weights, gradients, states, master copies and buffers are held in.
        optimizers: Names of the optimizers' classes.
        devices: Kinds of the devices that the weights are on.
        switches: Switches of torch.
        exchanges: What processes exchange gradients in.
        tied: Weights that were tied and are not any more.
        step: Number of the applied step that was measured, from 1; None where none was, and what follows is empty.
        regions: Formats of the autocast regions that were entered, also of those in which nothing was multiplied.
        refused: Devices that autocast was asked for and that torch switched it off for, as they are not there.
        work: Products and convolutions by format.
        ran: Softmax, norms, losses and attention kernels by format.
        scaled: Whether the loss was scaled.
        updates: What became of the updates.
        states: States that decay.
        sums: Gradients that were added up.
        peaks: Largest activations.
        notes: What could not be measured, and why.
        rank: Number of this process.
        num_ranks: How many processes train together.
        seed: The seed that torch began with in this process; None where no step was measured.
        digest: Of samples of the weights that every process holds whole, after the step, behind one of their names.
        bad_loss: The first step whose loss was not finite in this process, from 0; None where all were.
        loss: The loss of the last backward pass; None where none was seen, or it is not finite.
        num_collectives: How often this process exchanged numbers with others in the step.
        alone: Whether other processes made the same step of the same loss, and exchanged nothing.
        apart: What other processes do not have as this one does.
    """

    holdings: tuple[Holding, ...]
    optimizers: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu",)
    switches: Switches = field(default_factory=Switches)
    exchanges: tuple[ExchangeRow, ...] = ()
    tied: tuple[TiedRow, ...] = ()
    step: int | None = None
    regions: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    work: tuple[WorkRow, ...] = ()
    ran: tuple[RanRow, ...] = ()
    scaled: bool = False
    updates: tuple[UpdateRow, ...] = ()
    states: tuple[StateRow, ...] = ()
    sums: tuple[SumRow, ...] = ()
    peaks: tuple[PeakRow, ...] = ()
    notes: tuple[str, ...] = ()
    rank: int = 0
    num_ranks: int = 1
    seed: int | None = None
    digest: str = ""
    bad_loss: int | None = None
    loss: float | None = None
    num_collectives: int = 0
    alone: bool = False
    apart: tuple[RankRow, ...] = ()

    def flops(self, phase: Phase | None = None) -> Counter[str]:
        """FLOPs by format, the most first."""
        found: Counter[str] = Counter()
        for row in self.work:
            if phase in (None, row.phase):
                found[row.format] += row.flops
        return Counter(dict(found.most_common()))
