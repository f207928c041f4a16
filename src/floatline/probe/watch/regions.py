"""Autocast regions and learning-rate schedules, as events."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from floatline.probe.watch.events import AutocastEvent, SchedulerEvent
from floatline.probe.watch.full_steps import read_rates
from floatline.probe.watch.loop import Watch
from floatline.probe.watch.patches import Patches

_Call = Callable[..., Any]


def patch_autocast(seen: Watch, patches: Patches) -> None:
    """Watch which autocast regions are open."""

    def watch_entry(enter: _Call) -> _Call:
        def watched(region: Any) -> Any:
            if not seen.regions:
                seen.num_regions += 1
            seen.regions.append((seen.num_regions if not seen.regions else seen.regions[0][0], region._enabled))
            if len(seen.regions) == 1 and seen.detailed:
                seen.note(AutocastEvent(region._enabled, str(region.fast_dtype)))
            return enter(region)

        return watched

    def watch_exit(leave: _Call) -> _Call:
        def watched(region: Any, kind: Any, error: Any, trace: Any) -> Any:
            inner = seen.regions.pop()[1] if seen.regions else region._enabled
            if error is not None and (seen.failed_region is None or seen.failed_region[0] is not error):
                seen.failed_region = (error, inner, any(enabled for _, enabled in seen.regions))
            return leave(region, kind, error, trace)

        return watched

    patches.wrap(torch.amp.autocast_mode.autocast, "__enter__", watch_entry)
    patches.wrap(torch.amp.autocast_mode.autocast, "__exit__", watch_exit)


def patch_schedulers(seen: Watch, patches: Patches) -> None:
    """Watch learning-rate schedulers; one inside another is not counted twice."""
    schedulers = torch.optim.lr_scheduler
    depth = 0

    def watch_step(step: _Call) -> _Call:
        def watched(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                result = step(scheduler, *args, **kwargs)
            finally:
                depth -= 1
            if not depth:
                number = seen.number(scheduler.optimizer)
                seen.note_cheaply(SchedulerEvent(number, read_rates(seen, scheduler.optimizer)), of=number)
            return result

        return watched

    def watch_first(first: _Call) -> _Call:
        def watched(scheduler: Any) -> Any:  # a scheduler steps once when it is made: that is no step of the loop
            nonlocal depth
            depth += 1
            try:
                return first(scheduler)
            finally:
                depth -= 1

        return watched

    patches.wrap(schedulers.LRScheduler, "_initial_step", watch_first)
    for kind in (schedulers.LRScheduler, schedulers.SequentialLR, schedulers.ChainedScheduler):
        patches.wrap(kind, "step", watch_step)
