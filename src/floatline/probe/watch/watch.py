"""watch: a training loop observed without changing it: its modules, backward passes and optimizers, as events."""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from floatline.precision.user_frames import NOWHERE
from floatline.probe.watch.events import (
    BackwardEvent,
    ClearEvent,
    ForwardEvent,
    GradEvent,
    NewOptimizerEvent,
    StepEvent,
)
from floatline.probe.watch.functional_gradients import patch_functional_gradients
from floatline.probe.watch.functional_steps import FunctionalSteps
from floatline.probe.watch.gradient_scales import (
    find_factor,
    find_leaves,
    find_scaled_gradient,
    largest_of,
    mark_scaled_gradients,
)
from floatline.probe.watch.health import are_weights_finite
from floatline.probe.watch.loop import Watch
from floatline.probe.watch.own_updates import OwnUpdates, Updates
from floatline.probe.watch.patches import Aside, CompilerWatch, Patches
from floatline.probe.watch.scaler_calls import patch_scaler
from floatline.probe.watch.state_calls import patch_autocast, patch_schedulers, patch_state
from floatline.probe.watch.steps import (
    describe_step,
    has_bad,
    note_light_forward,
    note_light_step,
    run_light_backward,
    share_of_dead_moments,
)
from floatline.probe.watch.weights import copy_weights

_Call = Callable[..., Any]
_HERE = str(Path(__file__).parents[1])
# How torch warns of the recorder's own hooks, in a step that runs eagerly.
_OF_HOOKS = "Using `torch.compile(module)` when there are global hooks on modules"


@contextlib.contextmanager
def watch(*, light: bool = False) -> Generator[Watch]:
    """Observe the training loop that runs inside; everything is put back at the end.

    Observed on this thread: forward passes, backward passes and torch.autograd.grad, torch.amp.GradScaler, optimizers,
    schedulers, clipping and norms of gradients, autocast regions, state dicts, casts of modules and collectives::

        with watch() as seen:
            train()
        print([type(event).__name__ for event in seen.events])

    The results of the loop are those without it. It costs a few microseconds a call, one reduction over the gradients
    and one copy of the weights (up to 16 million of them) for each optimizer step. From step 256 on, the copy is made,
    and calls that a step may have several of are seen, in two steps after each power of two only.

    Args:
        light: Whether the loop must not be slowed down: all of that is seen in the first 24 steps and in two after
            each power of two; from the others, what a step has once is kept. On a GPU nothing is waited for.
    """
    seen = Watch(light=light)
    patches, hooks = patch_calls(seen)
    scaler_patches = patch_scaler(seen)
    seen.updates = OwnUpdates(seen)
    compiler = CompilerWatch((patches, scaler_patches), seen.note_compiled)
    try:
        yield seen
    finally:
        compiler.undo()
        scaler_patches.undo()
        patches.undo()
        for hook in hooks:
            hook.remove()
        with Aside():
            seen.settle()


def patch_calls(seen: Watch) -> tuple[Patches, list[RemovableHandle]]:
    """Begin to watch; the caller undoes the patches and removes the hooks."""
    patches = Patches()
    patches.wrap(nn.Module, "__call__", lambda call: (_watch_root if seen.light else _watch_module)(seen, call))
    # Both backward() and grad() end here, also where they were imported by name before.
    patches.wrap(torch.autograd, "_engine_run_backward", lambda run: _watch_engine(seen, run))
    patches.wrap(Optimizer, "__init__", lambda make: _watch_making(seen, make))
    patches.wrap(Optimizer, "zero_grad", lambda clear: _watch_clearing(seen, clear))
    patches.wrap(nn.Module, "zero_grad", lambda clear: _watch_clearing(seen, clear))
    patches.wrap(TorchDispatchMode, "__exit__", lambda leave: _watch_mode(seen, leave))
    functional = FunctionalSteps(seen)
    patch_functional_gradients(patches, functional.hear)
    patch_autocast(seen, patches)
    patch_schedulers(seen, patches)
    patch_state(seen, patches)
    patch_warnings(seen, patches)
    pending: dict[int, tuple[StepEvent, list[Tensor], list[Tensor] | None]] = {}

    def before(optimizer: Optimizer, *_: Any) -> None:
        if seen.elsewhere:
            return
        functional.before_step()
        with _hooked(seen):
            if not seen.light and seen.detailed:
                pending[id(optimizer)] = _note_step(seen, optimizer)
                return
            event = note_light_step(seen, optimizer)
            if not seen.light:  # whether the weights stay finite is always asked
                pending[id(optimizer)] = event, seen.scaling.gradients.find(optimizer).parameters, None

    def after(optimizer: Optimizer, *_: Any) -> None:
        if pending and id(optimizer) in pending:
            _finish_step(optimizer, *pending.pop(id(optimizer)))
        elif seen.listener is not None and not seen.elsewhere:
            with _hooked(seen):
                seen.listener.see_weights(optimizer)
            if not seen.busy and _is_last(hooks[1]):  # else a scaler says when the step is over
                seen.listener.end_step()

    hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    return patches, hooks


@contextlib.contextmanager
def _hooked(seen: Watch) -> Generator[None]:
    """Inside a hook of an optimizer, which torch finds in a list that must not change meanwhile."""
    seen.hooked = True
    try:
        yield
    finally:
        seen.hooked = False


def _is_last(hook: RemovableHandle) -> bool:
    """Whether no other hook runs after this one: only then may a recorder add its own."""
    return next(reversed(_global_optimizer_post_hooks), None) == hook.id


def _watch_mode(seen: Watch, leave: _Call) -> _Call:
    def watched(mode: TorchDispatchMode, *error: Any) -> Any:
        if seen.listener is not None and threading.get_ident() == seen.thread:
            seen.listener.leave_mode(mode)
        return leave(mode, *error)

    return watched


def _watch_module(seen: Watch, call: _Call) -> _Call:
    def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if seen.elsewhere:
            return call(module, *args, **kwargs)
        if not seen.modules.stack and not seen.busy:
            _note_root(seen, module, args, kwargs)
        seen.modules.stack.append(module)
        seen.modules.called.add(id(module))
        try:
            return call(module, *args, **kwargs)
        except Exception as error:
            if seen.modules.failed is None or seen.modules.failed[0] is not error:
                seen.modules.failed = (error, _find_path(seen.modules.stack))
            raise
        finally:
            seen.modules.stack.pop()

    return watched


def _watch_root(seen: Watch, call: _Call) -> _Call:
    """The same for a light watch: a module inside another costs next to nothing."""
    plain = call is getattr(nn.Module, "_wrapped_call_impl", None)

    def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if seen.modules.inside or seen.busy or seen.elsewhere:
            if seen.detailed:
                seen.modules.called.add(id(module))
            if plain and module._compiled_call_impl is None:  # what `call` would do: one call less
                return module._call_impl(*args, **kwargs)  # pyright: ignore[reportUnknownVariableType]
            return call(module, *args, **kwargs)
        seen.modules.inside = True
        seen.modules.called.add(id(module))
        try:
            _note_root(seen, module, args, kwargs)
            return call(module, *args, **kwargs)
        except Exception as error:
            seen.modules.failed = (error, _find_path(_find_stack(error.__traceback__)))
            raise
        finally:
            seen.modules.inside = False

    return watched


def _find_stack(trace: TracebackType | None) -> list[nn.Module]:
    """The modules that an exception came through, the outermost first."""
    stack: list[nn.Module] = []
    while trace is not None:
        if trace.tb_frame.f_code is nn.Module._call_impl.__code__:
            stack.append(trace.tb_frame.f_locals["self"])
        trace = trace.tb_next
    return stack


def _find_path(stack: list[nn.Module]) -> str:
    if not stack:
        return ""

    names: dict[int, str] = {id(module): name for name, module in stack[0].named_modules()}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return next((names[id(module)] for module in reversed(stack) if id(module) in names), "")


def _note_root(seen: Watch, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if id(module) not in seen.modules.roots:
        if not (module._parameters or module._modules) or next(module.parameters(), None) is None:
            return  # a loss or an activation: no model
        seen.modules.roots[id(module)] = module
        seen.weights.keep_start(list(module.parameters()))
    if not torch.is_grad_enabled():
        if seen.listener is not None:
            seen.listener.leave_step()
        if seen.callbacks.leave is not None:
            seen.callbacks.leave()
        return
    if seen.detailed and seen.num_stepped:
        held = [p for made in seen.optimizers.values() for p in made.parameters]
        seen.weights.find_masters([*seen.modules.parameters()], held)
    seen.note_boundary(cleared=False)
    if seen.light:
        note_light_forward(seen, module, args, kwargs)
    else:
        bad: Any = has_bad(args, kwargs)
        seen.note(ForwardEvent(bad, seen.regions.current))
    if seen.callbacks.forward is not None:
        seen.callbacks.forward(module, args)


def _watch_engine(seen: Watch, run: _Call) -> _Call:
    def watched(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if seen.busy or seen.elsewhere:
            return run(outputs, *args, **kwargs)
        accumulates = kwargs.get("accumulate_grad", True)
        trained = [] if accumulates else _find_trained(seen, args)
        if accumulates or trained:
            seen.note_boundary(cleared=False)
            if seen.listener is not None and not seen.modules.roots:
                seen.listener.begin_backward()
        if not seen.detailed:
            return run_light_backward(seen, run, outputs, args, kwargs, trained)
        factor = find_factor((*outputs, *(args[0] if args else ())))
        with Aside():
            loss: Any = torch.stack([output.detach().double().sum().cpu() for output in outputs]).sum() / factor
        event = BackwardEvent(loss, factor, bool(args[2]), seen.scaling.find_by_hand(outputs))
        if accumulates and seen.scaling.penalties:
            event.penalty = find_scaled_gradient(outputs)
        seen.note(event if accumulates or trained else GradEvent(loss, factor, event.create_graph))
        if seen.light and (accumulates or trained):
            seen.step_losses.append(float(loss))
        if accumulates and (seen.step < 4 or seen.step % 32 == 0):
            seen.weights.add_leaves(find_leaves(outputs))
        seen.scaling.gradients.before_backward()
        try:
            with seen.one_call:
                result = run(outputs, *args, **kwargs)
        finally:
            if accumulates:
                _note_gradients(seen, event, factor)
        if trained:
            seen.note_backward(dict(zip(map(id, trained), result, strict=True)))
        if event.create_graph and factor != 1.0:
            seen.scaling.penalties = True
            made = [leaf.grad for leaf in seen.weights.leaves.values()] if accumulates else result
            mark_scaled_gradients(made, factor)
        return result

    return watched


def _find_trained(seen: Watch, args: tuple[Any, ...]) -> list[Tensor]:
    """The weights of a loop that trains by torch.autograd.grad; [] where that is no step.

    Gradients that another loss is made of have a graph of their own, and those of inputs are no weights' gradients.
    Where an optimizer of torch makes the steps, they are its weights', and no other pass was seen that gives them.
    """
    inputs = [leaf for leaf in args[3] if isinstance(leaf, Tensor)] if len(args) > 3 and not args[2] else []
    makers = [made for made in seen.optimizers.values() if not isinstance(made.optimizer, Updates)]
    held = {id(p) for made in makers for p in made.parameters}
    if makers and (seen.accumulates or not inputs or not {id(leaf) for leaf in inputs} <= held):
        return []
    weights = {id(p) for p in seen.modules.parameters()} | set(seen.weights.leaves)
    leaves = [leaf for leaf in inputs if leaf.is_leaf and leaf.requires_grad]
    known = [leaf for leaf in leaves if id(leaf) in weights]
    # Weights that a functional optimizer makes new in each step are known by their number alone.
    found = leaves if known or len(leaves) > 1 else []
    seen.weights.add_leaves(found)
    return found


def _note_gradients(seen: Watch, event: BackwardEvent, factor: float) -> None:
    seen.scaling.gradients.after_backward(factor)
    seen.note_backward()
    if seen.light:
        return  # the gradients are looked at once, when the optimizer steps
    trained = [p for made in seen.optimizers.values() for p in made.parameters if p.grad is not None]
    seen.weights.add_leaves(trained)
    largest = largest_of([parameter.grad for parameter in trained if parameter.grad is not None])
    with Aside():
        finite: Any = True if largest is None else largest.isfinite().all()
    event.finite_after = finite


def _watch_making(seen: Watch, make: _Call) -> _Call:
    def watched(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        make(optimizer, *args, **kwargs)
        made = seen.add_optimizer(optimizer, seen.locate())
        seen.note(NewOptimizerEvent(made.number), made.spot)

    return watched


def _watch_clearing(seen: Watch, clear: _Call) -> _Call:
    def watched(owner: Optimizer | nn.Module, *args: Any, **kwargs: Any) -> Any:
        if seen.elsewhere:
            return clear(owner, *args, **kwargs)
        seen.note_boundary(cleared=True)
        result = clear(owner, *args, **kwargs)
        if seen.callbacks.clear is not None:
            seen.callbacks.clear()
        if not seen.detailed:
            return result
        if isinstance(owner, Optimizer):
            seen.scaling.gradients.clear(owner)
        seen.note(ClearEvent(seen.number(owner)))
        return result

    return watched


def _note_step(seen: Watch, optimizer: Optimizer) -> tuple[StepEvent, list[Tensor], list[Tensor] | None]:
    made = seen.add_optimizer(optimizer, NOWHERE)
    held = seen.scaling.gradients.find(optimizer)
    if seen.scaling.gradients.active:
        seen.scaling.gradients.look(held)
    parameters = held.parameters
    seen.weights.add_leaves(p for p in parameters if p.grad is not None)
    gradients = held.gradients
    largest = largest_of(gradients)
    counts = len(parameters), len(gradients)
    event = describe_step(seen, optimizer, made, held, counts, [] if largest is None else largest)
    seen.num_stepped += 1
    if not seen.busy:
        seen.note_attempt()
    return seen.note(event), parameters, copy_weights(parameters)


def _finish_step(optimizer: Optimizer, event: StepEvent, parameters: list[Tensor], copies: list[Tensor] | None) -> None:
    with Aside():
        event.dead_moments = share_of_dead_moments(optimizer)
        if copies is not None and parameters:
            changed = [(new.detach() != old).any() for new, old in zip(parameters, copies, strict=True)]
            moved: Any = torch.stack([flag.to(changed[0].device) for flag in changed]).any()
            event.moved = moved
        finite: Any = are_weights_finite([p for p in parameters if p.is_floating_point()])
        event.finite_after = finite


def patch_warnings(seen: Watch, patches: Patches) -> None:
    """Let warnings count their stack levels without the frames of the watch, and not speak of its hooks."""
    patches.wrap(warnings, "warn", lambda warn: _count_levels(seen, warn))


def _count_levels(seen: Watch, warn: Callable[..., None]) -> Callable[..., None]:
    def watched(message: Any, category: Any = None, stacklevel: int = 1, source: Any = None, **kwargs: Any) -> None:
        if seen.listener is not None and seen.listener.records and str(message).startswith(_OF_HOOKS):
            return
        # One level more, for this frame.
        warn(message, category, _find_level(sys._getframe(1), stacklevel) + 1, source, **kwargs)  # pyright: ignore[reportPrivateUsage]

    return watched


def _find_level(frame: FrameType | None, wanted: int) -> int:
    """The stack level at which the wanted one lies, where frames of the watch are not counted.

    Args:
        frame: Who warns.
        wanted: The level that it gave: 1 is itself, 2 its caller.
    """
    level, counted = 0, 0
    while frame is not None and counted < max(wanted, 1):
        level += 1
        counted += level == 1 or not frame.f_code.co_filename.startswith(_HERE)
        frame = frame.f_back
    return level if frame is not None else wanted
