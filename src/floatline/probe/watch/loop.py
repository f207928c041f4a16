"""Watch: what is known about a training loop so far."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from floatline.precision.user_frames import Spot, find_caller
from floatline.probe.watch.events import ForwardEvent, LoopEvent, ScalerStepEvent, StepEvent
from floatline.probe.watch.gradient_scales import GradientScales
from floatline.probe.watch.late_numbers import LateHealth, LateNumbers, ScaledLoss
from floatline.probe.watch.patches import Aside, is_tracing

_AnyEvent = TypeVar("_AnyEvent", bound=LoopEvent)
# Above this many weights, a copy for each step costs more than it tells.
_MOST_WEIGHTS = 2**24
# A light watch sees all of the first steps, and of as many as _WINDOW after each power of two; from the others it
# keeps what a step has once: the loss, whether the gradients are finite, the scale, the learning rate.
_FIRST, _WINDOW = 24, 2
# A full watch does so from this step on: what a loop does wrong it does from the beginning.
_FIRST_OF_FULL = 256
# Events that a light watch keeps from the beginning, and as many from the end.
_MOST_EVENTS = 8192


@dataclass(slots=True)
class MadeOptimizer:
    """An optimizer that the loop made: its number, parameters and place."""

    number: int
    optimizer: Optimizer
    name: str
    parameters: list[Tensor]
    spot: Spot


class StepListener(Protocol):
    """Who is told of the steps of a light watch."""

    @property
    def records(self) -> bool:
        """Whether a step is recorded now."""
        ...

    def begin_forward(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], event: ForwardEvent
    ) -> None:
        """A root module is about to run, with gradients."""

    def leave_step(self) -> None:
        """What comes now is no part of the step, but an evaluation."""

    def see_gradients(self, optimizer: Optimizer, event: StepEvent, health: LateHealth | float) -> None:
        """An optimizer is about to step; the weights are as they were. Health is finite where gradients and loss are.

        It is a number, or what will tell when a GPU has got there.
        """

    def see_weights(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""

    def see_attempt(self, event: ScalerStepEvent, losses: Sequence[ScaledLoss | float]) -> None:
        """A scaler has let a step with these losses through, or not; if not, the device was asked, and has answered."""

    def end_step(self, *, late: bool = False) -> None:
        """A step is over: what comes now belongs to the next one, or, where it was found out late, has begun it."""

    def end_backward(self) -> None:
        """The gradients of a loop without modules and optimizers are there: it updates its weights, then goes on."""

    def leave_mode(self, mode: object) -> None:
        """The loop is about to leave a dispatch mode of its own."""


class UpdateListener(Protocol):
    """Who sees the steps that no optimizer of torch makes."""

    scales_itself: bool

    def after_backward(self, gradients: dict[int, Tensor | None] | None) -> None:
        """Gradients are there; None: in the weights' own `grad`."""

    def settle(self, *, cleared: bool) -> bool:
        """A pass begins, or gradients are cleared, and no optimizer stepped; whether the loop made or left out one."""
        ...

    def note_optimizer_step(self) -> None:
        """An optimizer of torch steps."""

    def begin_step(self, *, stepped: bool) -> None:
        """A step begins; whether an optimizer or a scaler was called in the last one."""


class Watch:
    """What is known about the loop so far. The patches of `watch_calls` and `watch_scaler` fill it.

    Attributes:
        events: In the order they happened.
        num_stepped: How often optimizers have stepped.
        step: Number of the step that is under way. One ends where gradients are cleared after a backward pass, or
            where a forward or backward pass follows an optimizer step.
        optimizers: By id.
        roots: Modules that were called from outside any module, by id.
        leaves: Tensors that received gradients, by id.
        targets: Targets of the batch under way, where floatline runs the loop.
        on_forward: Called before a root module runs with gradients, with the module and its arguments.
        on_event: Called at every event.
        on_clear: Called after gradients were cleared.
        on_leave: Called before a root module runs without gradients, such as to evaluate.
        light: Whether the loop must not be slowed down.
        detailed: Whether all calls of the step under way are looked at.
        listener: Told of the steps of a light watch; None where nobody asks.
        late: Numbers that are on their way from a GPU.
        updates: Sees steps that no optimizer makes; None where nobody asks.
        masters: Tensors of optimizers that are copies of weights, by id, with those weights.
        locate: Finds the user's line.
        thread: The thread that is watched.

    Args:
        light: Look at all calls in some steps only, and keep a bounded number of events.
    """

    def __init__(self, *, light: bool = False) -> None:
        self.events: list[LoopEvent] = []
        self.num_stepped = 0
        self.light = light
        self.detailed = True
        self.inside = False  # a root module is running
        self.compiled = False  # the loop compiles something
        self.hooked = False  # inside a hook of an optimizer: no other may be added or removed
        self.listener: StepListener | None = None
        self.updates: UpdateListener | None = None
        self.scale_by_hand = 1.0  # that the last loss was multiplied by, without a scaler
        self.moved: set[int] | None = None  # weights outside of optimizers that move in training; None: nobody looked
        self.masters: dict[int, list[Tensor]] = {}
        self.locate: Callable[[], Spot] = find_caller
        self.late = LateNumbers()
        self.step_losses: list[ScaledLoss | float] = []  # of the step under way, for a light watch
        self.loss_scales: dict[int, float | None] = {}  # of scalers, by id; None: on its way from the device
        self.rates: dict[int, list[float]] = {}  # of optimizers, by id, where they are tensors
        self.unscaled = False  # the loop itself has unscaled gradients in this step
        self.step = 0
        self.scales = GradientScales()
        self.optimizers: dict[int, MadeOptimizer] = {}
        self.roots: dict[int, nn.Module] = {}
        self.called: set[int] = set()
        self.leaves: dict[int, Tensor] = {}
        self.start: dict[int, Tensor] = {}
        self.regions: list[tuple[int, bool]] = []  # open autocast regions: number of the outermost, enabled
        self.num_regions = 0
        self.failed_module: tuple[BaseException, str] | None = None
        self.failed_region: tuple[BaseException, bool, bool] | None = None
        self.penalties = False  # gradients of a scaled output, with a graph of their own, were asked for
        self.targets: tuple[Any, ...] = ()
        self.on_forward: Callable[[nn.Module, tuple[Any, ...]], None] | None = None
        self.on_event: Callable[[], None] | None = None
        self.on_clear: Callable[[], None] | None = None
        self.on_leave: Callable[[], None] | None = None
        self.modules: list[nn.Module] = []
        self.busy = 0  # inside a call that is itself an event: what it calls is not another
        self._spots: dict[tuple[type[LoopEvent], int], Spot] = {}
        self._numbers: dict[int, tuple[int, Any]] = {}
        self._saw_backward = self._saw_step = False
        self.thread = threading.get_ident()

    @property
    def elsewhere(self) -> bool:
        """Whether this call is none of the loop's: on another thread, or while torch traces a program."""
        return threading.get_ident() != self.thread or is_tracing()

    def note(self, event: _AnyEvent, spot: Spot | None = None) -> _AnyEvent:
        """Add an event at the user's line, or at a spot found before."""
        event.spot, event.step = spot or self.locate(), self.step
        self.events.append(event)
        if self.on_event is not None:
            self.on_event()
        return event

    def note_cheaply(self, event: _AnyEvent, *, of: int = -1) -> _AnyEvent:
        """The same; in steps that are not seen in detail, the line is that of the last such call.

        Args:
            event: The event.
            of: Number of the optimizer that is called: each has a line of its own.
        """
        key = type(event), of
        spot = None if self.detailed else self._spots.get(key)
        if spot is None:
            spot = self._spots[key] = self.locate()
        return self.note(event, spot)

    def number(self, thing: object) -> int:
        """A number for a scaler, optimizer or module; the thing is kept, so that no other takes its id."""
        return self._numbers.setdefault(id(thing), (len(self._numbers), thing))[0]

    def add_optimizer(self, optimizer: Optimizer, spot: Spot) -> MadeOptimizer:
        """Know an optimizer from now on."""
        if id(optimizer) not in self.optimizers:
            held = self.scales.find(optimizer)
            name = f"torch.optim.{type(optimizer).__name__}"
            if not type(optimizer).__module__.startswith("torch."):
                name = type(optimizer).__name__
            self.optimizers[id(optimizer)] = MadeOptimizer(
                self.number(optimizer), optimizer, name, list(held.parameters), spot
            )
        made = self.optimizers[id(optimizer)]
        known = {id(parameter) for parameter in made.parameters}
        made.parameters += [p for p in self.scales.find(optimizer).parameters if id(p) not in known]
        return made

    def forget_optimizer(self, optimizer: Optimizer) -> None:
        """Know nothing of an optimizer, nor of its steps, any more."""
        made = self.optimizers.pop(id(optimizer), None)
        if made is not None:
            self.events[:] = [e for e in self.events if not isinstance(e, StepEvent) or e.optimizer != made.number]

    def note_boundary(self, *, cleared: bool) -> None:
        """Count a step where a new one begins."""
        if self.updates is not None and self._saw_backward and not self._saw_step:
            self._saw_step = self.updates.settle(cleared=cleared)
        if self._saw_step or (cleared and self._saw_backward):
            if self.updates is not None:
                self.updates.begin_step(stepped=self._saw_step)
            self.step += 1
            self._saw_step = self._saw_backward = False
            self._begin_step()

    def _begin_step(self) -> None:
        self.step_losses = []  # a new list: what a GPU tells late of the last step is told with its losses
        self.unscaled = False
        first = _FIRST if self.light else _FIRST_OF_FULL
        detailed = self.step < first or self.step - 2 ** (self.step.bit_length() - 1) < _WINDOW
        if detailed and not self.detailed:
            self.scales.forget_all()  # what they are made of was not followed meanwhile
        self.detailed = detailed
        if self.light and len(self.events) > 3 * _MOST_EVENTS:
            del self.events[_MOST_EVENTS : len(self.events) - _MOST_EVENTS]

    def note_backward(self, gradients: dict[int, Tensor | None] | None = None) -> None:
        """A backward pass has run in this step; what torch.autograd.grad gave, by the ids of the weights."""
        self._saw_backward = True
        if self.updates is not None:
            self.updates.after_backward(gradients)

    def note_attempt(self) -> None:
        """An optimizer step was tried in this step, and may have been skipped."""
        self._saw_step = True
        if self.updates is not None:
            self.updates.note_optimizer_step()

    def copy_weights(self, parameters: Sequence[Tensor]) -> list[Tensor] | None:
        """A copy to compare with; None where it would be too large."""
        if sum(parameter.numel() for parameter in parameters) > _MOST_WEIGHTS:
            return None
        with Aside():
            return [parameter.detach().clone() for parameter in parameters]

    def settle(self) -> None:
        """Read the values that are still on a device."""
        self.late.read()
        for event in self.events:
            event.settle()
