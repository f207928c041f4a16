"""What a loop calls beside its steps, as events: autocast, schedules, state dicts, casts and collectives."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from floatline.precision.dtypes import NARROW
from floatline.precision.user_frames import find_script_line
from floatline.probe.watch.events import (
    AutocastEvent,
    CastEvent,
    CollectiveEvent,
    LoadEvent,
    Owner,
    ReplaceEvent,
    SaveEvent,
    SchedulerEvent,
)
from floatline.probe.watch.loop import Watch
from floatline.probe.watch.patches import Aside, Patches, holds_numbers
from floatline.probe.watch.steps import read_rates

_Call = Callable[..., Any]
_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "barrier",
)


def patch_state(seen: Watch, patches: Patches) -> None:
    """Watch state dicts of modules and optimizers, casts of modules, and collectives."""
    owners: tuple[tuple[type, Owner], ...] = ((nn.Module, "module"), (Optimizer, "optimizer"))
    for owner, kind in owners:
        patches.wrap(owner, "state_dict", lambda save, kind=kind: _watch_saving(seen, save, kind))
        patches.wrap(owner, "load_state_dict", lambda load, kind=kind: _watch_loading(seen, load, kind))
    patches.wrap(nn.Module, "__setattr__", lambda put: _watch_replacing(seen, put))
    for name in ("half", "bfloat16", "to"):
        patches.wrap(nn.Module, name, lambda cast, name=name: _watch_cast(seen, cast, name))
    if torch.distributed.is_available():
        for name in _COLLECTIVES:
            patches.wrap(torch.distributed, name, lambda call, name=name: _watch_collective(seen, call, name))


def fingerprint(state: Any) -> float:
    """One number for the weights in a module's state dict: equal weights give equal numbers."""
    tensors = [
        value
        for value in state.values()
        if isinstance(value, Tensor) and value.is_floating_point() and holds_numbers(value)
    ]
    with Aside():
        return sum(float(tensor.detach().double().abs().sum()) for tensor in tensors)


def _watch_saving(seen: Watch, save: _Call, kind: Owner) -> _Call:
    def watched(owner: Any, *args: Any, **kwargs: Any) -> Any:
        if seen.busy or args or "destination" in kwargs or seen.elsewhere:  # a submodule's part of a state dict
            return save(owner, *args, **kwargs)
        with seen.one_call:
            state = save(owner, *args, **kwargs)
        seen.note(SaveEvent(kind, fingerprint(state) if kind == "module" else None))
        return state

    return watched


def _watch_loading(seen: Watch, load: _Call, kind: Owner) -> _Call:
    def watched(owner: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        if seen.elsewhere:
            return load(owner, state, *args, **kwargs)
        if kind == "module":
            seen.note(LoadEvent(kind, fingerprint(state)))
        else:
            seen.note(LoadEvent(kind, stepped=bool(state.get("state"))))
        return load(owner, state, *args, **kwargs)

    return watched


def _watch_replacing(seen: Watch, put: _Call) -> _Call:
    def watched(module: nn.Module, name: str, value: Any) -> None:
        # Only what comes after an optimizer can be missing in it.
        if seen.optimizers and isinstance(value, (nn.Module, nn.Parameter)) and hasattr(module, name):
            seen.note(ReplaceEvent(name))
        put(module, name, value)

    return watched


def _watch_cast(seen: Watch, cast: _Call, name: str) -> _Call:
    def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        dtypes = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
        if name != "to" or any(dtype in NARROW for dtype in dtypes):
            # PEFT and the like cast on behalf of a line of the user's.
            seen.note(CastEvent(), find_script_line())
        return cast(module, *args, **kwargs)

    return watched


def _watch_collective(seen: Watch, call: _Call, name: str) -> _Call:
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not seen.busy and not seen.elsewhere:
            seen.note(CollectiveEvent(name))
        return call(*args, **kwargs)

    return watched


def patch_autocast(seen: Watch, patches: Patches) -> None:
    """Watch which autocast regions are open."""

    def watch_entry(enter: _Call) -> _Call:
        def watched(region: Any) -> Any:
            if seen.regions.enter(enabled=region._enabled) and seen.detailed:
                seen.note(AutocastEvent(region._enabled, str(region.fast_dtype)))
            return enter(region)

        return watched

    def watch_exit(leave: _Call) -> _Call:
        def watched(region: Any, kind: Any, error: Any, trace: Any) -> Any:
            seen.regions.leave(error, enabled=region._enabled)
            return leave(region, kind, error, trace)

        return watched

    def watch_asking(is_missing: _Call) -> _Call:
        # A region that is on asks this; a frame around its __init__ would move torch's warning off the user's line.
        def watched() -> bool:
            missing, region = is_missing(), sys._getframe(1).f_locals.get("self")
            if missing and seen.detailed and isinstance(region, torch.amp.autocast_mode.autocast):
                seen.note(AutocastEvent(enabled=False, dtype=str(region.fast_dtype), refused="cuda"))
            return missing

        return watched

    patches.wrap(torch.cuda.amp.common, "amp_definitely_not_available", watch_asking)
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
