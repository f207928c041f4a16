"""Detectors: a loss scale that starts again, a schedule that outruns the steps, a step inside autocast."""

from __future__ import annotations

from collections.abc import Sequence

from floatline.causes import find_cause
from floatline.findings import Finding
from floatline.probe.runs.records import RunRecord
from floatline.probe.watch.events import (
    ForwardEvent,
    LoadEvent,
    LoopEvent,
    NewScalerEvent,
    OptimizerEvent,
    SaveEvent,
    ScalerStepEvent,
    ScaleUpdateEvent,
    SchedulerEvent,
    StepEvent,
)


def find_lost_scale(given: RunRecord) -> list[Finding]:
    """A scale that jumps back up in mid-run, although the run went on from where it was."""
    last: ScalerStepEvent | None = None
    jumps: list[tuple[ScalerStepEvent, ScalerStepEvent]] = []
    for event in given.of(ScalerStepEvent):
        before = event.scale if last is None else _scale_between(given, last, event)
        if last is not None and event.scale > before and event.scale >= 4 * before:
            jumps.append((last, event))
        last = event
    lost = [(old, new) for old, new in jumps if _goes_on(given, old, new) and _skips_after(given, new)]
    if not lost:
        return []
    old, new = lost[0]
    place, op, fix = _blame_loss(given, old, new)
    skips = sum(_skips_after(given, after) for _, after in lost)
    return [
        Finding(
            find_cause("scaler-state-lost"),
            f"the loss scale went back from {_scale_between(given, old, new):g} to {new.scale:g}, {len(lost)} times "
            f"in the run, and {skips} skipped steps followed",
            fix,
            given.entry,
            place.file,
            place.line,
            op,
        )
    ]


def _scale_between(given: RunRecord, step: ScalerStepEvent, following: ScalerStepEvent) -> float:
    """The scale that a step left to the one after it: two optimizers may step before the scale is updated."""
    for event in given.events[given.events.index(step) : given.events.index(following)]:
        if isinstance(event, ScaleUpdateEvent) and event.scaler == step.scaler:
            return event.after
    return step.scale


def _goes_on(given: RunRecord, old: ScalerStepEvent, new: ScalerStepEvent) -> bool:
    """Whether the same training goes on: the same optimizer, or what was saved in mid-run is loaded."""
    if old.scaler == new.scaler or old.optimizer == new.optimizer:
        return True
    first = given.events.index(given.of(ScalerStepEvent)[0])
    saved = {e.fingerprint for e in given.events[first:] if isinstance(e, SaveEvent) and e.fingerprint is not None}
    between = given.events[given.events.index(old) : given.events.index(new)]
    loads = [e for e in between if isinstance(e, LoadEvent)]
    return any(e.stepped or e.fingerprint in saved for e in loads)


def _skips_after(given: RunRecord, new: ScalerStepEvent) -> int:
    """How many steps in a row this scaler skipped from this one on."""
    num_skips = 0
    for event in given.events[given.events.index(new) :]:
        if not isinstance(event, ScalerStepEvent):
            continue
        if event.applied or event.scaler != new.scaler:
            break
        num_skips += 1
    return num_skips


def _blame_loss(given: RunRecord, old: ScalerStepEvent, new: ScalerStepEvent) -> tuple[LoopEvent, str, str]:
    """Where it was not saved, or not loaded, or where a new scaler is made for no reason."""
    between = given.events[given.events.index(old) : given.events.index(new)]
    saves = [e for e in between if isinstance(e, SaveEvent)]
    loads = [e for e in between if isinstance(e, LoadEvent) and e.owner != "scaler"]
    made = [e for e in between if isinstance(e, NewScalerEvent)]
    # Nothing can be loaded into a scaler that is not there yet.
    last = max([*loads, *made], key=between.index) if loads else None
    if last is not None and any(e.owner == "scaler" for e in saves):
        return last, "torch.amp.GradScaler.load_state_dict", "Load the scaler's saved state here as well."
    if loads and saves:
        fix = "Save the scaler's state_dict here as well, and load it where training goes on."
        return saves[0], "torch.amp.GradScaler.state_dict", fix
    if last is not None:
        fix = "Load the state_dict of the scaler that ran before here as well."
        return last, "torch.amp.GradScaler.load_state_dict", fix
    place = made[-1] if made else new
    return place, "torch.amp.GradScaler", "Make the scaler once, before the loop, and keep it."


def find_schedule_ahead(given: RunRecord, fp32: RunRecord | None) -> list[Finding]:
    """Scheduler steps after skipped optimizer steps, where they moved the learning rate far enough to matter."""
    for number in {e.optimizer for e in given.of(SchedulerEvent)}:
        events = [e for e in given.of(SchedulerEvent, ScalerStepEvent, StepEvent) if e.optimizer == number]
        wasted, shift = _measure_shift(events)
        harmed = fp32 is None or given.progress(fp32) < 0.9
        if not wasted or shift < 0.1 or not (harmed or shift > 0.3):
            continue
        num_applied = sum(isinstance(e, StepEvent) for e in events)
        num_ticks = sum(isinstance(e, SchedulerEvent) for e in events)
        rate = next(e.rates[0] for e in events if isinstance(e, StepEvent))
        place = _find_mover(wasted)
        return [
            Finding(
                find_cause("scheduler-vs-skipped-step"),
                f"{num_ticks} scheduler steps for {num_applied} optimizer steps: {len(wasted)} followed a skipped "
                f"step, and the learning rate was {rate:.3g} at the first update",
                find_cause("scheduler-vs-skipped-step").advice,
                given.entry,
                place.file,
                place.line,
                "torch.optim.lr_scheduler.LRScheduler.step",
            )
        ]
    return []


def _find_mover(wasted: Sequence[tuple[OptimizerEvent, float]]) -> OptimizerEvent:
    """A step of the scheduler that moved the learning rate farthest, of all that have a line of their own."""
    moved: dict[tuple[str, int], float] = {}
    for event, move in wasted:
        moved[event.file, event.line] = moved.get((event.file, event.line), 0.0) + move
    return max((event for event, _ in wasted), key=lambda event: moved[event.file, event.line])


def _measure_shift(events: Sequence[OptimizerEvent]) -> tuple[list[tuple[OptimizerEvent, float]], float]:
    """Scheduler steps that followed a skip, each with its move of the rate; and their shift, of the largest rate."""
    ticks = [e for e in events if isinstance(e, SchedulerEvent)]
    steps = [e for e in events if isinstance(e, StepEvent)]
    if not ticks or not steps:
        return [], 0.0
    start = steps[0].rates[0] if events.index(steps[0]) < events.index(ticks[0]) else _start_rate(events)
    rates = [start, *(tick.rates[0] for tick in ticks)]
    wasted: list[tuple[OptimizerEvent, float]] = []
    shifts: list[float] = []
    num_ticks, skipped, applied, is_wasted = 0, False, False, False
    for event in events:
        if isinstance(event, ScalerStepEvent):
            skipped = skipped or not event.applied
        elif isinstance(event, StepEvent):
            applied = True
            shifts.append(abs(rates[num_ticks] - rates[num_ticks - len(wasted)]))
        else:
            num_ticks += 1
            if skipped or applied:  # else another scheduler of the same optimizer goes on
                is_wasted = skipped and not applied
            wasted += [(event, abs(rates[num_ticks] - rates[num_ticks - 1]))] if is_wasted else []
            skipped = applied = False
    return wasted, sum(shifts) / len(shifts) / max(max(rates), 1e-30)


def _start_rate(events: Sequence[OptimizerEvent]) -> float:
    """The rate before the first scheduler step, which the first attempt saw."""
    return next((e.rates[0] for e in events if isinstance(e, (SchedulerEvent, StepEvent))), 0.0)


def find_stale_weights(given: RunRecord, fp32: RunRecord | None) -> list[Finding]:
    """Optimizer steps inside an autocast region that goes on: forward keeps using the old 16-bit weights."""
    moved: dict[int, StepEvent] = {}
    stale: list[tuple[StepEvent, ForwardEvent]] = []
    for event in given.of(StepEvent, ForwardEvent):
        if isinstance(event, StepEvent):
            if event.region and event.moved is not False:
                moved[event.region] = event
        elif event.region in moved:
            stale.append((moved[event.region], event))
    if not stale or (fp32 is not None and given.progress(fp32) > 0.9):
        return []
    place = stale[0][0]
    same = sum(a == b for a, b in zip(given.losses, given.losses[1:], strict=False))
    return [
        Finding(
            find_cause("autocast-region-misuse"),
            f"{len(stale)} forward passes ran in the autocast region in which the weights had been updated, with the "
            f"16-bit copies made before; {same} of {len(given.losses) - 1} losses repeat the one before bit for bit",
            "Close the autocast region before the optimizer's step.",
            given.entry,
            place.file,
            place.line,
            f"{place.name}.step",
        )
    ]
