"""Bits that flip in weights and optimizer states, behind the guard's back."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from campaign.judge import BrokenError, Verdict, check_ledger, check_row, check_same
from campaign.numbers import Ranks, References
from campaign.plan import LONG, Fault
from campaign.trial import Trial, run_steps
from floatline.findings import GuardStop
from floatline.guard.checkpoints import guard_state


def flip(trial: Trial, fault: Fault) -> str:
    """Flip one bit of one number that this process holds; says what it was and is."""
    prefix = "model." if fault.kind == "weight-flip" else "optimizer."
    tensors = guard_state.live_tensors(trial.guard.run)
    names = sorted(name for name, tensor in tensors.items() if name.startswith(prefix) and tensor.numel())
    name = names[fault.details["tensor"] % len(names)]
    values = tensors[name].detach().view(-1)
    place = fault.details["element"] % values.numel()
    bits = 8 * values.element_size()
    bit = bits - 1 - int(fault.details["bit"] * (bits // 4 if fault.details["high"] else bits))
    before = values[place].item()
    flip_bit(values, place, bit)
    return f"bit {bit} of {name.removeprefix(prefix)}: {before:g} to {values[place].item():g}"


def flip_bit(values: Tensor, place: int, bit: int) -> None:
    """Flip a bit of an element in place; bit 0 is the lowest."""
    values.view(torch.uint8)[place * values.element_size() + bit // 8] ^= 1 << bit % 8


def try_flip(fault: Fault, ranks: Ranks, references: References, folder: Path) -> Verdict:
    """Flip it, go on, and see whether the run notices; where it goes back, it must be back to the bit."""
    expected = references.clean(fault.setting, LONG)
    trial = Trial(fault.setting, rank=ranks.rank, folder=folder)
    back = _watch_restores(trial)
    run_steps(trial, fault.step)
    words = flip(trial, fault) if ranks.rank == fault.rank else ""
    words = max(ranks.gather(words))
    random, stop = None, ""
    returns: list[int] = []  # steps after which the run went back
    try:
        while trial.place < LONG:
            trial.step()
            if len(back) > len(returns):
                returns.append(trial.place)
            if back and random is None:
                random = torch.get_rng_state()
                check_row([trial.weights()], [expected.weights[back[0] - 1]])
    except GuardStop as error:
        stop = str(error)
    check_row([seen.weights for seen in trial.seen[: fault.step]], expected.weights[: fault.step])
    with contextlib.suppress(GuardStop):
        trial.guard.close()
    if not stop:
        _check_ledger(trial, ranks, folder, returns)
    finite = trial.guard._rescue.weights_are_finite()
    if not finite:
        raise BrokenError("corrupted", f"{words}; the weights are not finite at the end")
    if stop:
        return Verdict("stopped", LONG - back[-1] if back else 0, f"{words}; {stop}")
    if len(back) == 1 and random is not None:
        _check_went_on(trial, ranks, back[0], returns[0], random)
    if back:
        lost = sum(at - step for at, step in zip(returns, back, strict=True))
        return Verdict("survived", lost, f"{words}; went back {len(back)} times")
    pairs = zip(trial.seen[fault.step :], expected.losses[fault.step :], strict=True)
    losses = [abs(seen.loss - loss) for seen, loss in pairs]
    apart = max(ranks.gather(max((x for x in losses if math.isfinite(x)), default=0.0)))
    # An outlier that the run without the fault has skipped, too, is no sign of it.
    num_skipped = sum(was and not seen.applied for seen, was in zip(trial.seen, expected.applied, strict=True))
    outcome = "noticed" if num_skipped else "not seen"
    return Verdict(outcome, num_skipped, f"{words}; {num_skipped} skipped; losses within {apart:.2g}")


def _watch_restores(trial: Trial) -> list[int]:
    """The steps that the run goes back to, as it does."""
    ring, found = trial.guard.run.ring, list[int]()
    restore = ring.restore

    def note(snapshot: Any, tensors: Any) -> None:
        restore(snapshot, tensors)
        found.append(snapshot.attempt)

    ring.restore = note  # type: ignore[method-assign]
    return found


def _check_went_on(trial: Trial, ranks: Ranks, back: int, came_back: int, random: Tensor) -> None:
    """A run that stood at that step and got the later batches ends with the same bits."""
    twin = run_steps(Trial(trial.setting, rank=ranks.rank), back)
    twin.place = came_back
    torch.set_rng_state(random)
    run_steps(twin, LONG)
    check_same(trial.digests(), twin.digests(), f"after going back to step {back}")


def _check_ledger(trial: Trial, ranks: Ranks, folder: Path, returns: list[int]) -> None:
    """Where the run went back, weights have changed and the step was not applied."""
    rows = [replace(seen, changed=seen.applied) if i + 1 in returns else seen for i, seen in enumerate(trial.seen)]
    witnesses = ranks.gather(rows)
    if ranks.rank == 0:
        check_ledger(folder, witnesses)
