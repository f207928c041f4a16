"""Workload: what is trained; OnDemand: its batches, where they are made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast, overload

from floatline.errors import PlanError, TargetError
from floatline.plans import Plan
from floatline.plans.presets import resolve_plan

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

T = TypeVar("T")
# The plain tuple that a target may return instead.
FIELDS = ("model", "batches", "loss_fn", "precision", "make_optimizer")


@dataclass(frozen=True)
class Workload:
    """What is trained. Any plan can run it.

    Args:
        model: The module.
        batches: A list of (inputs, targets), each a tuple; or another sequence, such as `OnDemand`.
        loss_fn: Gives the loss: `loss_fn(model(*inputs), *targets)`.
        precision: The plan it is meant to run in: a name, a YAML file or a Plan.
        make_optimizer: Gives the optimizer of a model.
        evaluate: Gives the metric of a trained model; None takes the loss over the batches. The model may be on a GPU:
            called with tensors on the CPU, it brings them there, and gives back what it returns on the CPU. What else
            touches its weights needs tensors on `next(model.parameters()).device`.
        metric: Name of the metric, for people. None: 'loss', or the name of the function that evaluates.
        higher_is_better: Whether the metric is such as an accuracy. None: not said.
        settings: What it was built from, as plain data: a run folder keeps it, and a resumed run must have the same.
        policy: What it wants otherwise in the guard's policy, by field, such as {'most_bad': 10}; a policy that is
            given by name or as a Policy is taken as it is.
        note: Says what the model counted while it trained, '' for nothing; the ledger tells it with every checkpoint.
    """

    model: nn.Module
    batches: Sequence[tuple[Sequence[Any], Sequence[Any]]]
    loss_fn: Callable[..., Tensor]
    precision: str | Plan
    make_optimizer: Callable[[nn.Module], Optimizer]
    evaluate: Callable[[nn.Module], float] | None = None
    metric: str | None = None
    higher_is_better: bool | None = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    policy: Mapping[str, Any] = field(default_factory=dict[str, Any])
    note: Callable[[nn.Module], str] | None = None

    def __post_init__(self) -> None:
        problem = _find_problem(self)
        if problem:
            raise TargetError(problem)

    def compute_loss(self, inputs: Sequence[Any], targets: Sequence[Any]) -> Tensor:
        """The loss of one batch."""
        return self.loss_fn(self.model(*inputs), *targets)

    @property
    def plan_name(self) -> str:
        """Name of the plan it is meant to run in, as it was given."""
        return self.precision.name if isinstance(self.precision, Plan) else self.precision

    @property
    def metric_name(self) -> str:
        """Name of the metric, for people."""
        if self.metric is not None:
            return self.metric
        if self.evaluate is None:
            return "loss"
        name = getattr(self.evaluate, "__name__", "")
        return name if name.isidentifier() and name != "evaluate" else "metric"


def _find_problem(workload: Workload) -> str:
    from torch import nn

    # The values come from the user's code: their types are claims until they are looked at.
    model, batches = cast("object", workload.model), cast("object", workload.batches)
    if not isinstance(model, nn.Module):
        return f"model is {describe(model)}. It must be a torch.nn.Module."
    if not is_sequence(batches) or not batches:
        return f"batches is {describe(batches)}. It must be a list of (inputs, targets), not empty."
    first = batches[0]
    if not is_row(first) or len(first) != 2:
        return f"batches[0] is {describe(first)}. It must be a pair (inputs, targets)."
    for part, name in zip(first, ("inputs", "targets"), strict=True):
        if not is_row(part):
            return f"{name} of batches[0] is {describe(part)}. It must be a tuple, also for one tensor."
    for name in ("loss_fn", "make_optimizer"):
        if not callable(getattr(workload, name)):
            return f"{name} is {describe(getattr(workload, name))}. It must be callable."
    try:
        resolve_plan(workload.precision)
    except PlanError as error:
        return f"precision: {error}"
    return ""


def is_sequence(value: object) -> TypeGuard[Sequence[object]]:
    """Whether it has a length and entries by number, and is no text."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def is_row(value: object) -> TypeGuard[Sequence[object]]:
    """Whether it is a list or a tuple."""
    return isinstance(value, (list, tuple))


def describe(value: object) -> str:
    """A value by its type and length, for an error."""
    size = f" of {len(value)}" if is_row(value) else ""
    return f"a {type(value).__name__}{size}"


class OnDemand(Sequence[T]):
    """Entries of a function; nothing is kept, so that the same number must give the same entry each time.

    Args:
        make: Gives the entry of a number.
        numbers: Which ones there are, or how many from 0 on.
    """

    def __init__(self, make: Callable[[int], T], numbers: range | int) -> None:
        self._make = make
        self._numbers = range(numbers) if isinstance(numbers, int) else numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> OnDemand[T]: ...

    def __getitem__(self, index: int | slice) -> T | OnDemand[T]:
        if isinstance(index, slice):
            return OnDemand(self._make, self._numbers[index])
        return self._make(self._numbers[index])
