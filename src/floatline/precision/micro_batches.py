"""Losses of micro-batches: computed, scaled, sent backward, and summed so that the step sees their average."""
# torch shows this switch to Python under a private name only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from floatline.errors import GuardError
from floatline.optim.mesh import agree_on_mean
from floatline.plans import Plan
from floatline.precision.dtypes import DTYPES

_PASSES_ON = ("ViewBackward0", "ReshapeAliasBackward0", "ToCopyBackward0", "SqueezeBackward0", "UnsafeViewBackward0")


def autocast_of(plan: Plan, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The context of a forward pass: the plan's compute dtype, or nothing where weights have it already."""
    if plan.compute in ("fp32", plan.weights):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[plan.compute])


def find_divisor(loss: Tensor) -> float:
    """What a loss was divided by, or multiplied by the reciprocal of, last of all; 1.0 where it was not.

    It is read from the graph of the loss; nothing waits for a device.
    """
    node: Any = loss.grad_fn
    for _ in _PASSES_ON:
        if node is not None and node.name() in _PASSES_ON:
            node = node.next_functions[0][0]
    if node is None:
        return 1.0
    other = getattr(node, "_saved_other", None)
    if not isinstance(other, Tensor) or other.numel() != 1 or other.device.type != "cpu":
        return 1.0
    with torch._C._DisableTorchDispatch():  # a number of the code is no tensor to dispatch modes such as HalfOnCPU
        value = float(other)
    if node.name() == "DivBackward0":
        return value
    return 1.0 / value if node.name() == "MulBackward0" and value else 1.0


def _without_items(loss: Tensor, weight: float | Tensor) -> Tensor:
    """The mean of nothing is NaN: with a weight of 0 it is 0, and adds nothing."""
    if not isinstance(weight, Tensor):
        return loss if weight else loss.nan_to_num(0.0, 0.0, 0.0)
    if weight.device != loss.device:
        return loss
    return torch.where(weight == 0, loss.nan_to_num(0.0, 0.0, 0.0), loss)


Loss = Tensor | tuple[Tensor, float | Tensor]


@dataclass
class LossSum:
    """What the micro-batches of a step have come to so far.

    Numerics:
        Gradients are summed with the weights w_i / w_1 and divided by their sum in the optimizer, in float32: the
        average over all items, however unequal the micro-batches are. The loss is averaged in the same way.
        On several processes w_1 is the mean of theirs, agreed on where weights are given: the average is then that
        over the items of all processes, however unequal they are.

    Args:
        loss: Sum of the losses, each times its weight; float32.
        weight: Sum of the weights, as multiples of `first`.
        first: Weight of the first micro-batch that has one above 0.
        num: Micro-batches so far.
        divisor: What the first loss was divided by; 1.0 where it was not, or nobody looks.
        looks: Whether to look for it.
        group: Processes that train together; None is the default group.
    """

    loss: Tensor | None = None
    weight: float | Tensor = 0.0
    first: float | Tensor = 1.0
    num: int = 0
    divisor: float = 1.0
    looks: bool = False
    group: dist.ProcessGroup | None = None

    def add(self, loss: Tensor, weight: float | Tensor | None) -> Tensor:
        """Take one loss; gives it back times its weight, to go backward from.

        Raises:
            GuardError: The weight cannot be a number of items. Tensors on a GPU are not looked at: they may still be
                computed.
        """
        if self.looks and self.num == 0:
            self.divisor = find_divisor(loss)
        relative = 1.0 if weight is None else self._as_multiple(_take_weight(weight, self.num + 1), loss.device)
        weighted = (
            loss if isinstance(relative, float) and relative == 1.0 else _without_items(loss, relative) * relative
        )
        part = weighted.detach().to(torch.float32)
        self.loss = part if self.loss is None else self.loss + part
        self.weight = self.weight + relative
        self.num += 1
        return weighted

    def _as_multiple(self, weight: float | Tensor, home: torch.device) -> float | Tensor:
        """A weight as a multiple of the first one that is not 0."""
        if not isinstance(self.weight, Tensor) and self.weight == 0:
            self.first = agree_on_mean(weight, home=home, group=self.group)
        if self.first is weight:
            return 1.0 if isinstance(weight, Tensor) or weight else 0.0
        if isinstance(self.first, Tensor):
            # Where no process has an item yet, there is no first weight, and 0 / 0 would be NaN.
            return weight / torch.where(self.first == 0, 1.0, self.first)
        return weight / self.first

    @property
    def mean(self) -> Tensor:
        """The average loss."""
        if self.loss is None:
            raise GuardError("update() was called before backward(). Call backward(loss) for each batch first.")
        if not isinstance(self.weight, Tensor):
            if self.weight == 0:
                raise GuardError(
                    f"The weights of a step's micro-batches ({self.num:,}) add up to 0. "
                    "Give the number of items of each, and make no step without items."
                )
            return self.loss if self.weight == 1.0 else self.loss / self.weight
        # A process that has no items adds nothing: its loss is what it was, not 0 / 0.
        return self.loss / torch.where(self.weight == 0, 1.0, self.weight)


def _take_weight(weight: float | Tensor, number: int) -> float | Tensor:
    """A micro-batch's weight, as a number where reading it costs nothing; GuardError where it can be none."""
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise GuardError(
                f"The weight of micro-batch {number} has shape {tuple(weight.shape)}. Give the number of its items."
            )
        if weight.device.type != "cpu":
            return weight
    value = float(weight)
    if not 0 <= value < math.inf:
        raise GuardError(
            f"The weight of micro-batch {number} is {value:g}. Give the number of its items: finite, and not below 0."
        )
    return value


def check_closure(optimizer: torch.optim.Optimizer) -> None:
    """GuardError for an optimizer that computes the loss several times in a step, such as LBFGS."""
    parameter = inspect.signature(optimizer.step).parameters.get("closure")
    if parameter is not None and parameter.default is inspect.Parameter.empty:
        name = type(optimizer).__name__
        raise GuardError(
            f"{name}.step() needs a closure, and a guarded step is decided from gradients computed once. "
            f"Use another optimizer, such as floatline.optim.AdamW, or train with {name} without a guard."
        )


def take_loss(given: Any, name: str) -> tuple[Tensor, float | Tensor | None]:
    """The loss, and its weight where one was given; GuardError for anything that cannot be trained on."""
    value: Any = given
    weight = None
    if isinstance(given, tuple) and len(cast("tuple[Any, ...]", given)) == 2:
        value, weight = cast("tuple[Any, Any]", given)
    if not isinstance(value, Tensor):
        raise GuardError(f"{name} is a {type(value).__name__}. Give a loss tensor, or (loss, weight).")
    if value.numel() != 1:
        raise GuardError(f"{name} has shape {tuple(value.shape)}. Give one number: take the mean or the sum.")
    if not value.is_floating_point():
        raise GuardError(f"{name} is a {value.dtype} tensor, which has no gradient. Give a floating-point loss.")
    if not value.requires_grad:
        raise GuardError(f"{name} does not depend on any trained parameter. Check detach(), no_grad() and item().")
    return value.reshape(()), weight


@contextlib.contextmanager
def synced_at_the_end(model: nn.Module, is_last: bool) -> Generator[None]:
    """Let DDP and FSDP2 exchange gradients in the last micro-batch only; a plain module needs nothing."""
    own = cast(Any, model)
    if hasattr(model, "set_requires_gradient_sync"):
        own.set_requires_gradient_sync(is_last)
        try:
            yield
        finally:
            own.set_requires_gradient_sync(True)
    elif hasattr(model, "no_sync") and not is_last:
        with own.no_sync():
            yield
    else:
        yield


def run_micro_batches(
    compute_loss: Callable[[Any], Loss],
    batches: Sequence[Any],
    *,
    model: nn.Module,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]],
    scale: Tensor,
    group: dist.ProcessGroup | None = None,
    looks: bool = False,
) -> LossSum:
    """Forward and backward of every micro-batch; gradients are added to what the parameters hold.

    Args:
        compute_loss: Gives the loss of a batch.
        batches: The micro-batches.
        model: The model, which may be wrapped for several processes.
        autocast: Gives the context of the forward pass.
        scale: What losses are multiplied by.
        group: Processes that train together; None is the default group.
        looks: Whether to look for a division that the average over micro-batches makes a second time.
    """
    total = LossSum(group=group, looks=looks)
    for i, batch in enumerate(batches):
        with synced_at_the_end(model, i == len(batches) - 1):
            with autocast():
                value = compute_loss(batch)
            loss, weight = take_loss(value, "The value of compute_loss")
            (total.add(loss, weight).to(torch.float32) * scale).backward()
    _ = total.mean  # refuses a step without items, before anything is made of its gradients
    return total
