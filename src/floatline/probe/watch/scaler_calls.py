"""The loss scaler's calls, and what clips, reads or changes gradients that are still scaled."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from floatline.probe.watch.events import (
    ClipEvent,
    GradientUseEvent,
    LoadEvent,
    NewScalerEvent,
    NormEvent,
    SaveEvent,
    ScaleEvent,
    ScalerStepEvent,
    ScaleUpdateEvent,
    TouchEvent,
    UnscaleEvent,
)
from floatline.probe.watch.gradient_scales import Held, mark_scaled
from floatline.probe.watch.health import ScaledLoss, is_far
from floatline.probe.watch.loop import MadeOptimizer, Watch
from floatline.probe.watch.patches import Patches

_Call = Callable[..., Any]
_READS = ("norm", "pow", "__pow__", "square", "abs")
_WRITES = ("mul_", "div_", "clamp_", "clip_", "copy_", "__imul__", "__itruediv__", "clamp_max_", "clamp_min_")
_FOREACH_WRITES = ("_foreach_mul_", "_foreach_div_", "_foreach_clamp_min_", "_foreach_clamp_max_")


def patch_scaler(seen: Watch) -> Patches:
    """Begin to watch; the caller undoes the patches."""
    patches = Patches()
    scaler = torch.amp.GradScaler
    patches.wrap(scaler, "__init__", lambda make: _watch_making(seen, make))
    patches.wrap(scaler, "scale", lambda scale: _watch_scale(seen, patches, scale))
    patches.wrap(scaler, "unscale_", lambda unscale: _watch_unscale(seen, unscale))
    patches.wrap(scaler, "step", lambda step: _watch_step(seen, step))
    patches.wrap(scaler, "update", lambda update: _watch_update(seen, update))
    patches.wrap(scaler, "state_dict", lambda save: _watch_state(seen, save, SaveEvent))
    patches.wrap(scaler, "load_state_dict", lambda load: _watch_state(seen, load, LoadEvent))
    # clip_grad_norm_ itself may have been imported by name; these two it looks up when it runs.
    patches.wrap(clip_grad, "_get_total_norm", lambda read: _watch_norm(seen, read))
    patches.wrap(clip_grad, "_clip_grads_with_norm_", lambda clip: _watch_clip(seen, clip))
    return patches


def _read_scale(seen: Watch, scaler: Any) -> float:
    """The loss scale. A light watch has it sent after each update, and reads it when it is needed: in the next step."""
    if not seen.light:
        return scaler.get_scale()
    if id(scaler) in seen.scaling.scalers and seen.scaling.scalers[id(scaler)] is None:
        seen.late.read()
    # Before the first use the scaler has no tensor to read; then its scale may still be set by hand.
    if id(scaler) not in seen.scaling.scalers and scaler._scale is not None:
        seen.scaling.scalers[id(scaler)] = scaler.get_scale()
    return seen.scaling.scalers.get(id(scaler)) or scaler.get_scale()


def _watch_making(seen: Watch, make: _Call) -> _Call:
    def watched(scaler: Any, *args: Any, **kwargs: Any) -> None:
        make(scaler, *args, **kwargs)
        if scaler._enabled:
            seen.note(NewScalerEvent())

    return watched


def _watch_scale(seen: Watch, patches: Patches, scale: _Call) -> _Call:
    def watched(scaler: Any, outputs: Any) -> Any:
        if not scaler._enabled:
            return scale(scaler, outputs)
        if not seen.scaling.gradients.active:
            seen.scaling.gradients.active = True
            _patch_gradients(seen, patches)
        value = _read_scale(seen, scaler)
        if seen.detailed:
            seen.note(ScaleEvent())
        scaled = scale(scaler, outputs)
        for tensor in (scaled,) if isinstance(scaled, Tensor) else tree_leaves(scaled):
            if isinstance(tensor, Tensor):
                mark_scaled(tensor, value)
        return scaled

    return watched


def _watch_unscale(seen: Watch, unscale: _Call) -> _Call:
    def watched(scaler: Any, optimizer: Optimizer) -> None:
        if not scaler._enabled:
            return unscale(scaler, optimizer)
        if not seen.detailed:
            seen.scaling.unscaled = seen.scaling.unscaled or not seen.busy
            with seen.one_call:
                return unscale(scaler, optimizer)
        made = seen.add_optimizer(optimizer, seen.locate())
        held = seen.scaling.gradients.find(optimizer)
        seen.scaling.gradients.look(held)
        value = _read_scale(seen, scaler)
        factors = list(held.factors)
        event = seen.note(UnscaleEvent(made.number, value, _find_halves(made), held.shrunk, factors, after=[]))
        with seen.one_call:
            result = unscale(scaler, optimizer)
        event.after = seen.scaling.gradients.unscale(optimizer, value)[1]
        return result

    return watched


def _watch_step(seen: Watch, step: _Call) -> _Call:
    def watched(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not scaler._enabled:
            return step(scaler, optimizer, *args, **kwargs)
        known = None if seen.detailed else seen.optimizers.get(id(optimizer))
        made = known or seen.add_optimizer(optimizer, seen.locate())
        event = ScalerStepEvent(
            made.number,
            seen.number(scaler),
            _read_scale(seen, scaler),
            num_gradients=sum(p.grad is not None for p in made.parameters),
            halves=_find_halves(made) if seen.detailed else [],
            applied=False,
        )
        seen.note_cheaply(event, of=made.number)
        seen.note_attempt()
        num_stepped, losses = seen.num_stepped, seen.step_losses
        with seen.one_call:
            result = step(scaler, optimizer, *args, **kwargs)
        stepped = seen.num_stepped > num_stepped
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            _tell(seen, event, losses, applied=stepped)  # torch has asked the device, and left the step out or not
            return result
        flags: list[Tensor] = list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
        if stepped and not seen.detailed and len(flags) == 1 and is_far(flags[0]):
            seen.late.ask(flags[0], event.step, lambda found: _tell(seen, event, losses, applied=not found[0]))
        else:
            _tell(seen, event, losses, applied=stepped and not any(float(flag) for flag in flags))
        return result

    return watched


def _tell(seen: Watch, event: ScalerStepEvent, losses: list[ScaledLoss | float], *, applied: bool) -> None:
    event.applied = applied
    if seen.listener is not None:
        seen.listener.see_attempt(event, losses)


def _find_halves(made: MadeOptimizer) -> list[int]:
    return [i for i, p in enumerate(made.parameters) if p.dtype == torch.float16 and p.grad is not None]


def _watch_update(seen: Watch, update: _Call) -> _Call:
    def watched(scaler: Any, *args: Any, **kwargs: Any) -> None:
        if not scaler._enabled:
            return update(scaler, *args, **kwargs)
        event = seen.note_cheaply(ScaleUpdateEvent(seen.number(scaler), after=0.0))
        result = update(scaler, *args, **kwargs)
        scale: Any = scaler._scale
        if seen.light and not seen.detailed and isinstance(scale, Tensor) and is_far(scale):
            seen.scaling.scalers[id(scaler)] = None
            seen.late.ask(scale, event.step, lambda found: _note_scale(seen, scaler, event, found[0]))
        else:
            seen.scaling.scalers.pop(id(scaler), None)
            event.after = _read_scale(seen, scaler)
        if seen.listener is not None:
            seen.listener.end_step()
        return result

    return watched


def _note_scale(seen: Watch, scaler: Any, event: ScaleUpdateEvent, scale: float) -> None:
    event.after = scale
    if id(scaler) in seen.scaling.scalers:
        seen.scaling.scalers[id(scaler)] = scale


def _watch_state(seen: Watch, call: _Call, kind: type[SaveEvent | LoadEvent]) -> _Call:
    def watched(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(scaler, *args, **kwargs)
        seen.scaling.scalers.pop(id(scaler), None)
        if scaler._enabled:
            seen.note(kind("scaler"))
        return result

    return watched


def _watch_norm(seen: Watch, read: _Call) -> _Call:
    def watched(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not seen.detailed:
            return read(tensors, *args, **kwargs)
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        with seen.one_call:
            norm = read(tensors, *args, **kwargs)
        for held in seen.scaling.gradients.owners_of_all(tensors):
            seen.note(NormEvent(_number_of(seen, held), held.scale, "torch.nn.utils.get_total_norm"))
        return norm

    return watched


def _watch_clip(seen: Watch, clip: _Call) -> _Call:
    def watched(parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not seen.detailed:
            return clip(parameters, max_norm, total_norm, *args, **kwargs)
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        owners = seen.scaling.gradients.owners_of_all([p.grad for p in parameters if p.grad is not None])
        norm: Any = total_norm.detach()
        for held in owners:
            call = "torch.nn.utils.clip_grad_norm_"
            seen.note(ClipEvent(_number_of(seen, held), held.scale, call, norm, float(max_norm)))
        with seen.one_call:
            result = clip(parameters, max_norm, total_norm, *args, **kwargs)
        for held in owners:
            seen.scaling.gradients.settle(held.optimizer)
        return result

    return watched


def _number_of(seen: Watch, held: Held) -> int:
    return seen.add_optimizer(held.optimizer, seen.locate()).number


def _patch_gradients(seen: Watch, patches: Patches) -> None:
    """Watch the tensor operations by which code reads or changes gradients by hand."""
    uses: tuple[tuple[Any, str, type[GradientUseEvent], tuple[str, ...]], ...] = (
        (Tensor, "torch.Tensor", NormEvent, _READS),
        (torch, "torch", NormEvent, ("norm", "square", "pow", "_foreach_norm")),
        (torch.linalg, "torch.linalg", NormEvent, ("vector_norm", "norm")),
        (Tensor, "torch.Tensor", TouchEvent, _WRITES),
        (torch, "torch", TouchEvent, _FOREACH_WRITES),
    )
    for owner, prefix, kind, names in uses:
        for name in names:
            patches.wrap(owner, name, functools.partial(_watch_use, seen, kind, f"{prefix}.{name}"))


def _watch_use(seen: Watch, kind: type[GradientUseEvent], name: str, call: _Call) -> _Call:
    def watched(first: Any, *args: Any, **kwargs: Any) -> Any:
        if seen.busy or not seen.detailed or seen.elsewhere:
            return call(first, *args, **kwargs)
        tensors: list[Any] = [*first] if isinstance(first, (list, tuple)) else [first]  # pyright: ignore[reportUnknownArgumentType]
        owners = seen.scaling.gradients.owners_among([tensor for tensor in tensors if isinstance(tensor, Tensor)])
        for held in owners:
            held.touched = held.touched or kind is TouchEvent
        with seen.one_call:
            result = call(first, *args, **kwargs)
        for held in owners:
            seen.note(kind(_number_of(seen, held), held.scale, name))
        return result

    return watched
