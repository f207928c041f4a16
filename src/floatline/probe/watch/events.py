"""The events of a training loop, one record for each kind of call; a watch notes them in the order they happen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, cast

from torch import Tensor

from floatline.precision.user_frames import NOWHERE, Spot

Owner = Literal["module", "optimizer", "scaler"]


@dataclass(slots=True, eq=False)
class LoopEvent:
    """One call of the loop that matters. The watch that notes it fills in where and when.

    Numbers that are still on a device when they are noted, such as a loss, stay there until `settle`.

    Attributes:
        spot: The user's line; nowhere if the loop is floatline's.
        step: Number of the optimizer step it belongs to, from 0.
    """

    spot: Spot = field(init=False, default=NOWHERE)
    step: int = field(init=False, default=0)

    @property
    def file(self) -> str:
        """Source file of the user's line; '' if the loop is floatline's."""
        return self.spot.file

    @property
    def line(self) -> int:
        """Line in that file."""
        return self.spot.line

    def settle(self) -> None:
        """Read the numbers that are still on a device."""


@dataclass(slots=True, eq=False)
class OptimizerEvent(LoopEvent):
    """A call that concerns one optimizer.

    Args:
        optimizer: Its number in the watch; -1 for updates that the loop makes by itself.
    """

    optimizer: int


@dataclass(slots=True, eq=False)
class ForwardEvent(LoopEvent):
    """A root module runs with gradients.

    Args:
        bad_inputs: Whether an input holds NaN or inf.
        region: Number of the autocast region that it runs in and that keeps weight copies; 0 for none.
    """

    bad_inputs: bool
    region: int

    def settle(self) -> None:
        """Read the numbers that are still on a device."""
        self.bad_inputs = _read(self.bad_inputs)


@dataclass(slots=True, eq=False)
class AutogradEvent(LoopEvent):
    """Autograd runs: a backward pass, or gradients for something else than a step.

    Args:
        loss: The sum of the outputs, without the loss scale.
        factor: The loss scale of a GradScaler that is in the outputs; 1 for none.
        create_graph: Whether the gradients have a graph of their own.
    """

    loss: float
    factor: float
    create_graph: bool

    def settle(self) -> None:
        """Read the numbers that are still on a device."""
        self.loss = float(self.loss)


@dataclass(slots=True, eq=False)
class BackwardEvent(AutogradEvent):
    """A backward pass, or torch.autograd.grad in a loop that trains by it.

    Args:
        by_hand: The number that the loop multiplied its loss by without a scaler; 1 for none.
        penalty: The loss scale of gradients that the loss is made of, if nothing divides by it; 1 for none.
        finite_after: Whether the gradients are finite after it.
    """

    by_hand: float = 1.0
    penalty: float = 1.0
    finite_after: bool = True

    def settle(self) -> None:
        """Read the numbers that are still on a device."""
        self.loss, self.finite_after = float(self.loss), _read(self.finite_after)


@dataclass(slots=True, eq=False)
class GradEvent(AutogradEvent):
    """torch.autograd.grad, where its gradients are no step's."""


@dataclass(slots=True, eq=False)
class NewScalerEvent(LoopEvent):
    """A GradScaler is made."""


@dataclass(slots=True, eq=False)
class ScaleEvent(LoopEvent):
    """A GradScaler scales a loss."""


@dataclass(slots=True, eq=False)
class UnscaleEvent(OptimizerEvent):
    """A GradScaler unscales the gradients of an optimizer.

    Args:
        scale: The loss scale.
        halves: Positions of the optimizer's FP16 parameters that have a gradient.
        shrunk: What the code itself had multiplied the scaled gradients by; 1 for nothing.
        before: The loss scale in the gradients, for each backward pass that is summed up in them.
        after: The same after the call.
    """

    scale: float
    halves: list[int]
    shrunk: float
    before: list[float]
    after: list[float]


BY_HAND = -1


@dataclass(slots=True, eq=False)
class ScalerStepEvent(OptimizerEvent):
    """A GradScaler is asked to step an optimizer, or a loop that checks its gradients decides whether to.

    Args:
        scaler: The scaler's number; BY_HAND for a loop that leaves out steps by itself.
        scale: The loss scale.
        num_gradients: How many parameters have a gradient.
        halves: Positions of the optimizer's FP16 parameters that have a gradient.
        applied: Whether the step was made.
    """

    scaler: int
    scale: float
    num_gradients: int
    halves: list[int]
    applied: bool


@dataclass(slots=True, eq=False)
class ScaleUpdateEvent(LoopEvent):
    """A GradScaler updates its scale.

    Args:
        scaler: The scaler's number.
        after: The loss scale after the call.
    """

    scaler: int
    after: float


@dataclass(slots=True, eq=False)
class NewOptimizerEvent(OptimizerEvent):
    """An optimizer is made."""


@dataclass(slots=True, eq=False)
class StepEvent(OptimizerEvent):
    """An optimizer steps.

    Args:
        name: The optimizer's, such as 'torch.optim.SGD'.
        through_scaler: Whether a GradScaler steps it.
        scales_itself: Whether it takes the scaler's flag, and leaves a step out by itself.
        factors: The loss scale in the gradients, for each backward pass that is summed up in them.
        shrunk: What the code itself multiplied scaled gradients by; 1 for nothing.
        num_parameters: How many parameters it has.
        num_without_gradient: How many of them have no gradient.
        largest: The largest magnitude in each gradient; one or none where not all is looked at.
        rates: Learning rates of its groups.
        region: As in `ForwardEvent`.
        moved: Whether a weight changed; None where nobody looked.
        finite_after: Whether all weights are finite after it.
        dead_moments: Share of its 16-bit second moments that are 0 and drive a weight too far.
    """

    name: str
    through_scaler: bool
    scales_itself: bool
    factors: list[float]
    shrunk: float
    num_parameters: int
    num_without_gradient: int
    largest: list[float]
    rates: list[float]
    region: int
    moved: bool | None = None
    finite_after: bool = True
    dead_moments: float = 0.0

    def settle(self) -> None:
        """Read the numbers that are still on a device."""
        self.largest, self.moved, self.finite_after = _read(self.largest), _read(self.moved), _read(self.finite_after)

    def again(self) -> StepEvent:
        """A further step that is like this one."""
        return StepEvent(
            self.optimizer,
            self.name,
            self.through_scaler,
            self.scales_itself,
            self.factors,
            self.shrunk,
            self.num_parameters,
            self.num_without_gradient,
            self.largest,
            self.rates,
            self.region,
        )


@dataclass(slots=True, eq=False)
class ClearEvent(LoopEvent):
    """Gradients are cleared.

    Args:
        owner: Number of the optimizer or module whose gradients they are.
    """

    owner: int


@dataclass(slots=True, eq=False)
class GradientUseEvent(OptimizerEvent):
    """A call reads or changes gradients that have a loss scale in them.

    Args:
        factor: That scale.
        call: What was called, such as 'torch.Tensor.norm'.
    """

    factor: float
    call: str


@dataclass(slots=True, eq=False)
class ClipEvent(GradientUseEvent):
    """Gradients are clipped by their norm.

    Args:
        norm: Their norm.
        limit: The largest norm that they may have.
    """

    norm: float
    limit: float

    def settle(self) -> None:
        """Read the numbers that are still on a device."""
        self.norm = _read(self.norm)


@dataclass(slots=True, eq=False)
class NormEvent(GradientUseEvent):
    """A norm of gradients, or what one is made of, is read."""


@dataclass(slots=True, eq=False)
class TouchEvent(GradientUseEvent):
    """Code writes into gradients."""


@dataclass(slots=True, eq=False)
class SchedulerEvent(OptimizerEvent):
    """A learning-rate scheduler steps.

    Args:
        rates: Learning rates of the optimizer's groups after it.
    """

    rates: list[float]


@dataclass(slots=True, eq=False)
class AutocastEvent(LoopEvent):
    """The outermost autocast region is entered, or one is made that torch switches off.

    Args:
        enabled: Whether it is on.
        dtype: Such as 'torch.float16'.
        refused: The device that it was asked for and that this process does not have; '' for a region that is entered.
    """

    enabled: bool
    dtype: str
    refused: str = ""


@dataclass(slots=True, eq=False)
class CastEvent(LoopEvent):
    """A module is cast to 16 bits."""


@dataclass(slots=True, eq=False)
class SaveEvent(LoopEvent):
    """A state dict is made.

    Args:
        owner: What it is the state of.
        fingerprint: One number for a module's weights: equal weights give equal numbers. None for other owners.
    """

    owner: Owner
    fingerprint: float | None = None


@dataclass(slots=True, eq=False)
class LoadEvent(LoopEvent):
    """A state dict is loaded.

    Args:
        owner: What it is the state of.
        fingerprint: As in `SaveEvent`.
        stepped: Whether it is the state of an optimizer that has stepped.
    """

    owner: Owner
    fingerprint: float | None = None
    stepped: bool = False


@dataclass(slots=True, eq=False)
class ReplaceEvent(LoopEvent):
    """A parameter or submodule of a module is replaced after an optimizer was made.

    Args:
        name: Of the attribute.
    """

    name: str


@dataclass(slots=True, eq=False)
class CollectiveEvent(LoopEvent):
    """A collective of torch.distributed is called.

    Args:
        name: Such as 'all_reduce'.
    """

    name: str


def _read(value: Any) -> Any:
    return cast("Any", value.tolist()) if isinstance(value, Tensor) else value
