"""Faults within a step, after which the run goes on: bad numbers, bad batches, exceptions, a clock that jumps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from campaign.judge import BrokenError, Verdict, check_ledger, check_row, check_same, check_step
from campaign.plan import STEPS, Fault, Setting
from campaign.plants import Plant, make_plant
from campaign.trial import Trial, run_steps


class Ranks:
    """This process among those of its group."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def gather(self, value: Any) -> list[Any]:
        """Every process's value."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found


@dataclass(frozen=True)
class Reference:
    """A run without the fault.

    Args:
        weights: Digest after each step.
        digests: Of every tensor at the end.
        losses: Of each step, on this process.
        applied: Whether each step was.
    """

    weights: Sequence[str]
    digests: dict[str, str]
    losses: Sequence[float]
    applied: Sequence[bool]


class References:
    """Runs without a fault, each made once; all processes ask for the same ones in the same order."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._known: dict[tuple[Any, ...], Reference] = {}

    def clean(self, setting: Setting, last: int) -> Reference:
        """Nothing is left out."""
        return self._make((setting, last), setting, last)

    def skipping(self, setting: Setting, step: int, *, halved: bool) -> Reference:
        """One step is skipped by selection: computed, and not applied; with half the scale where it overflowed."""
        return self._make((setting, step, halved), setting, STEPS, skip=step, halved=halved)

    def without(self, setting: Setting, step: int, random: Tensor) -> Reference:
        """One batch is never given to the guard; `random` is the state of the random numbers behind it."""
        return self._make(None, setting, STEPS, drop=step, random=random)

    def _make(
        self,
        key: tuple[Any, ...] | None,
        setting: Setting,
        last: int,
        *,
        skip: int = -1,
        halved: bool = False,
        drop: int = -1,
        random: Tensor | None = None,
    ) -> Reference:
        if key in self._known:
            return self._known[key]
        trial = Trial(setting, rank=self._ranks.rank)
        while trial.place < last:
            here = trial.place
            if here == drop and random is not None:
                trial.place += 1
                torch.set_rng_state(random)
                continue
            trial.step(skip=here == skip)
            if here == skip and halved:
                judge = trial.guard.run.judge
                judge.set_scale(float(judge.scale) / 2)
        made = _as_reference(trial)
        trial.guard.close()
        if key is not None:
            self._known[key] = made
        return made


def _as_reference(trial: Trial) -> Reference:
    seen = trial.seen
    row = [one.weights for one in seen]
    return Reference(row, trial.digests(), [one.loss for one in seen], [one.applied for one in seen])


def try_numbers(fault: Fault, ranks: Ranks, references: References, folder: Path) -> Verdict:
    """Plant it, go on to the last step, and hold everything against the run that leaves the step out."""
    setting, kind = fault.setting, fault.kind
    trial = Trial(setting, rank=ranks.rank, folder=folder)
    run_steps(trial, fault.step)
    raised = False
    struck = kind == "exception" or ranks.rank == fault.rank
    # All processes make this step in the same form, with calls that match.
    plant = make_plant(fault) if struck else _bystander(kind)
    try:
        seen = trial.step(plant)
    except (RuntimeError, MemoryError, KeyboardInterrupt) as error:
        if kind != "exception" or str(error) != "planted":
            raise
        raised = True
    random = torch.get_rng_state()
    if fault.details["resume"]:
        trial = trial.resumed()
    run_steps(trial, STEPS)
    trial.guard.close()
    found, digests = [one.weights for one in trial.seen], trial.digests()
    if kind == "exception":
        if not raised:
            raise BrokenError("lost", "the exception did not reach the caller")
        expected = references.without(setting, fault.step, random)
    else:
        check_step(seen, harmful=True)
        nonfinite = any(not _finite(loss) for loss in ranks.gather(seen.loss))
        reason = "forward-nonfinite" if nonfinite else "overflow"
        if seen.reason != reason:
            raise BrokenError("false ledger", f"the reason is {seen.reason}, and {reason} was planted")
        halved = reason == "overflow" and setting.plan.startswith("fp16")
        expected = references.skipping(setting, fault.step, halved=halved)
        if fault.details.get("how") == "empty":  # an empty batch takes no random numbers for dropout
            expected = _with_random(fault, ranks, random)
    check_row(found, expected.weights)
    check_same(digests, expected.digests, "at the end")
    _check_all_ledgers(trial, ranks, folder)
    return Verdict("survived", 1)


def _with_random(fault: Fault, ranks: Ranks, random: Tensor) -> Reference:
    """The run that skips the step by selection, and goes on with these random numbers."""
    trial = run_steps(Trial(fault.setting, rank=ranks.rank), fault.step)
    trial.step(skip=True)
    torch.set_rng_state(random)
    run_steps(trial, STEPS)
    return _as_reference(trial)


def _bystander(kind: str) -> Plant:
    plant = Plant()
    plant.manual = kind == "reduced"
    return plant


def _finite(loss: float) -> bool:
    return loss - loss == 0.0


def _check_all_ledgers(trial: Trial, ranks: Ranks, folder: Path) -> None:
    witnesses = ranks.gather(trial.seen)
    if ranks.rank == 0:
        check_ledger(folder, witnesses)


def try_clock(fault: Fault, ranks: Ranks, references: References, folder: Path) -> Verdict:
    """From one step on the clock of one process is another one; nothing else may be."""
    trial = Trial(fault.setting, rank=ranks.rank, folder=folder)
    run_steps(trial, fault.step)
    with shifted_clock(fault.details["seconds"] if ranks.rank == fault.rank else 0.0):
        if fault.details["resume"]:
            trial = trial.resumed()
        run_steps(trial, STEPS)
        trial.guard.close()
    expected = references.clean(fault.setting, STEPS)
    check_row([seen.weights for seen in trial.seen], expected.weights)
    check_same(trial.digests(), expected.digests, "at the end")
    _check_all_ledgers(trial, ranks, folder)
    return Verdict("survived")


@contextlib.contextmanager
def shifted_clock(seconds: float) -> Generator[None]:
    """Let time.time() be off by so much."""
    real = time.time
    with mock.patch("time.time", lambda: real() + seconds):
        yield
