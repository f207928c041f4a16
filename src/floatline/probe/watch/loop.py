"""Watch: what is known about a training loop so far."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from floatline.precision.user_frames import Spot, find_caller
from floatline.probe.watch.events import ForwardEvent, LoopEvent, ScalerStepEvent, StepEvent
from floatline.probe.watch.gradient_scales import GradientScales, find_factor_by_hand
from floatline.probe.watch.health import LateHealth, LateNumbers, ScaledLoss
from floatline.probe.watch.patches import is_tracing
from floatline.probe.watch.weights import LoopWeights

_AnyEvent = TypeVar("_AnyEvent", bound=LoopEvent)
# A light watch sees all of the first steps, and of as many as _WINDOW after each power of two; from the others it
# keeps what a step has once: the loss, whether the gradients are finite, the scale, the learning rate.
_FIRST, _WINDOW = 24, 2
# A full watch does so from this step on: what a loop does wrong it does from the beginning.
_FIRST_OF_FULL = 256
# Events that a light watch keeps from the beginning, and as many from the end.
_MOST_EVENTS = 8192


@dataclass(slots=True)
class MadeOptimizer:
    """An optimizer that the loop made.

    Args:
        number: Its number in the watch.
        optimizer: The optimizer.
        name: Such as 'torch.optim.SGD'.
        parameters: All that it ever held.
        spot: Where it was made.
        made_with: Its largest learning rate then; None where one is no number.
        rates: Its learning rates as they were last read, where they are tensors.
    """

    number: int
    optimizer: Optimizer
    name: str
    parameters: list[Tensor]
    spot: Spot
    made_with: float | None = None
    rates: list[float] | None = None


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

    def see_compile(self) -> None:
        """The loop is about to compile something."""

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

    def see_functional_gradients(self, gradients: dict[str, Tensor]) -> None:
        """torch.func has taken gradients of the weights that were last said to run forward, by their names."""

    def begin_backward(self) -> None:
        """A loop that calls no module is about to go backward."""

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


@dataclass(slots=True)
class WatchCallbacks:
    """Who is called while the loop runs; None for nobody.

    Attributes:
        forward: Before a root module runs with gradients, with the module and its arguments.
        event: At every event.
        clear: After gradients were cleared.
        leave: Before a root module runs without gradients, such as to evaluate.
    """

    forward: Callable[[nn.Module, tuple[Any, ...]], None] | None = None
    event: Callable[[], None] | None = None
    clear: Callable[[], None] | None = None
    leave: Callable[[], None] | None = None


@dataclass(slots=True)
class CalledModules:
    """The modules that the loop calls.

    Attributes:
        roots: Those that were called from outside any module and have parameters, by id.
        called: Ids of all that were called.
        stack: Those that run now, the outermost first; for a full watch.
        inside: Whether a root module runs now; for a light watch.
        failed: The last exception that left a module, with the innermost module's name.
    """

    roots: dict[int, nn.Module] = field(default_factory=dict[int, nn.Module])
    called: set[int] = field(default_factory=set[int])
    stack: list[nn.Module] = field(default_factory=list[nn.Module])
    inside: bool = False
    failed: tuple[BaseException, str] | None = None

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the root modules, one after the other."""
        for root in self.roots.values():
            yield from root.parameters()


class LossScaling:
    """What is known of the loss scale.

    Attributes:
        gradients: The scale in the gradients of each optimizer.
        scalers: The scale of each GradScaler, by id, as a light watch last read it; None: on its way from the device.
        by_hand: The number that the last loss was multiplied by without a scaler; 1 for none.
        unscaled: Whether the loop itself has unscaled gradients in this step.
        penalties: Whether gradients of a scaled output, with a graph of their own, were asked for.
    """

    def __init__(self) -> None:
        self.gradients = GradientScales()
        self.scalers: dict[int, float | None] = {}
        self.by_hand = 1.0
        self.unscaled = False
        self.penalties = False

    def find_by_hand(self, outputs: Any) -> float:
        """Look what the outputs of a backward pass were multiplied by without a scaler."""
        self.by_hand = 1.0 if self.gradients.active else find_factor_by_hand(outputs)
        return self.by_hand


class AutocastRegions:
    """The autocast regions that are open.

    Attributes:
        failed: The last exception that left a region, whether the region was enabled, and whether one around it was.
    """

    def __init__(self) -> None:
        self.failed: tuple[BaseException, bool, bool] | None = None
        self._open: list[bool] = []  # whether each is enabled, the outermost first
        self._num = 0

    def enter(self, *, enabled: bool) -> bool:
        """A region is entered; whether it is the outermost."""
        self._num += not self._open
        self._open.append(enabled)
        return len(self._open) == 1

    def leave(self, error: BaseException | None, *, enabled: bool) -> None:
        """A region is left, by an exception or not; `enabled` is asked for where its entry was not seen."""
        inner = self._open.pop() if self._open else enabled
        if error is not None and (self.failed is None or self.failed[0] is not error):
            self.failed = (error, inner, any(self._open))

    @property
    def state(self) -> Literal["on", "off", "disabled"]:
        """How autocast stands here; 'disabled': a region is on, and another inside of it switches that off."""
        if not any(self._open):
            return "off"
        return "on" if self._open[-1] else "disabled"

    @property
    def current(self) -> int:
        """Number of the outermost open region that keeps weight copies; 0 where none is open."""
        if not self._open:
            return 0
        return self._num if any(self._open) and torch.is_autocast_cache_enabled() else 0


class _OneCall:
    """A context: inside a call that is itself an event, what is called is no other event."""

    __slots__ = ("_seen",)

    def __init__(self, seen: Watch) -> None:
        self._seen = seen

    def __enter__(self) -> None:
        self._seen.busy += 1

    def __exit__(self, *error: object) -> None:
        self._seen.busy -= 1


class Watch:
    """What is known about the loop so far. The patches of `watch` fill it.

    Attributes:
        events: In the order they happened.
        step: Number of the step that is under way. One ends where gradients are cleared after a backward pass, or
            where a forward or backward pass follows an optimizer step.
        num_stepped: How often optimizers have stepped.
        accumulates: Whether a backward pass was seen that leaves gradients in weights.
        light: Whether the loop must not be slowed down.
        detailed: Whether all calls of the step under way are looked at.
        step_losses: Losses of the step under way, for a light watch.
        optimizers: By id.
        modules: The modules that are called.
        weights: The weights: where they began, which got gradients, and copies of them.
        scaling: The loss scale.
        regions: The autocast regions that are open.
        callbacks: Who is called while the loop runs.
        listener: Told of the steps of a light watch; None where nobody asks.
        updates: Sees steps that no optimizer makes; None where nobody asks.
        late: Numbers that are on their way from a GPU.
        locate: Finds the user's line.
        targets: Targets of the batch under way, where floatline runs the loop.
        busy: How many calls that are themselves events are running: what they call is not another.
        one_call: A context for such a call.
        hooked: Whether a hook of an optimizer is running: no other may be added or removed.
        compiled: Whether the loop compiles something.
        thread: The thread that is watched.

    Args:
        light: Look at all calls in some steps only, and keep a bounded number of events.
    """

    def __init__(self, *, light: bool = False) -> None:
        self.events: list[LoopEvent] = []
        self.step = 0
        self.num_stepped = 0
        self.accumulates = False
        self.light = light
        self.detailed = True
        self.step_losses: list[ScaledLoss | float] = []
        self.optimizers: dict[int, MadeOptimizer] = {}
        self.modules = CalledModules()
        self.weights = LoopWeights()
        self.scaling = LossScaling()
        self.regions = AutocastRegions()
        self.callbacks = WatchCallbacks()
        self.listener: StepListener | None = None
        self.updates: UpdateListener | None = None
        self.late = LateNumbers()
        self.locate: Callable[[], Spot] = find_caller
        self.targets: tuple[Any, ...] = ()
        self.busy = 0
        self.one_call = _OneCall(self)
        self.hooked = False
        self.compiled = False
        self.thread = threading.get_ident()
        self._spots: dict[tuple[type[LoopEvent], int], Spot] = {}
        self._numbers: dict[int, tuple[int, Any]] = {}
        self._saw_backward = self._saw_step = False

    @property
    def elsewhere(self) -> bool:
        """Whether this call is none of the loop's: on another thread, or while torch traces a program."""
        return threading.get_ident() != self.thread or is_tracing()

    def note(self, event: _AnyEvent, spot: Spot | None = None) -> _AnyEvent:
        """Add an event at the user's line, or at a spot found before."""
        event.spot, event.step = spot or self.locate(), self.step
        self.events.append(event)
        if self.callbacks.event is not None:
            self.callbacks.event()
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

    def note_compiled(self) -> None:
        """The loop compiles something."""
        self.compiled = True
        if self.listener is not None:
            self.listener.see_compile()

    def number(self, thing: object) -> int:
        """A number for a scaler, optimizer or module; the thing is kept, so that no other takes its id."""
        return self._numbers.setdefault(id(thing), (len(self._numbers), thing))[0]

    def add_optimizer(self, optimizer: Optimizer, spot: Spot) -> MadeOptimizer:
        """Know an optimizer from now on."""
        if id(optimizer) not in self.optimizers:
            held = self.scaling.gradients.find(optimizer)
            name = f"torch.optim.{type(optimizer).__name__}"
            if not type(optimizer).__module__.startswith("torch."):
                name = type(optimizer).__name__
            given = [group.get("lr") for group in optimizer.param_groups]
            rates = [float(rate) for rate in given if isinstance(rate, (int, float))]
            made_with = max(rates) if given and len(rates) == len(given) else None
            self.optimizers[id(optimizer)] = MadeOptimizer(
                self.number(optimizer), optimizer, name, list(held.parameters), spot, made_with
            )
        made = self.optimizers[id(optimizer)]
        known = {id(parameter) for parameter in made.parameters}
        made.parameters += [p for p in self.scaling.gradients.find(optimizer).parameters if id(p) not in known]
        return made

    def renew_weights(self, optimizer: Optimizer, weights: list[Tensor], former: Iterable[int]) -> None:
        """Know an optimizer's weights, and no longer those that it had before: a functional one makes new ones.

        Args:
            optimizer: The optimizer, which has one group.
            weights: What it has now.
            former: Ids of what it had.
        """
        optimizer.param_groups[0]["params"] = weights
        made = self.optimizers.get(id(optimizer))
        if made is not None:
            made.parameters = list(weights)
        gone = {*former} - {*map(id, weights)}
        for key in gone:
            self.weights.leaves.pop(key, None)

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
        self.scaling.unscaled = False
        first = _FIRST if self.light else _FIRST_OF_FULL
        detailed = self.step < first or self.step - 2 ** (self.step.bit_length() - 1) < _WINDOW
        if detailed and not self.detailed:
            self.scaling.gradients.forget_all()  # what they are made of was not followed meanwhile
        self.detailed = detailed
        if self.light and len(self.events) > 3 * _MOST_EVENTS:
            del self.events[_MOST_EVENTS : len(self.events) - _MOST_EVENTS]

    def note_backward(self, gradients: dict[int, Tensor | None] | None = None) -> None:
        """A backward pass has run in this step; what torch.autograd.grad gave, by the ids of the weights."""
        self._saw_backward = True
        self.accumulates = self.accumulates or gradients is None
        if self.updates is not None:
            self.updates.after_backward(gradients)

    def note_attempt(self) -> None:
        """An optimizer step was tried in this step, and may have been skipped."""
        self._saw_step = True
        if self.updates is not None:
            self.updates.note_optimizer_step()

    def settle(self) -> None:
        """Read the values that are still on a device."""
        self.late.read()
        for event in self.events:
            event.settle()
