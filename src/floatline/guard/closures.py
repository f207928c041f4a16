"""Losses of micro-batches: computed, scaled, sent backward, and summed so that the step sees their average."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from floatline.errors import GuardError
from floatline.guard.agreement import agree_on_mean

Loss = Tensor | tuple[Tensor, float | Tensor]


@dataclass
class Sum:
    """What the micro-batches of a step have come to so far.

    Numerics:
        Gradients are summed with the weights w_i / w_1 and divided by their sum in the optimizer, in float32: the
        average over all items, however unequal the micro-batches are. The loss is averaged in the same way.
        On several processes w_1 is the mean of theirs, agreed on where weights are given: the average is then that
        over the items of all processes, however unequal they are.

    Args:
        loss: Sum of the losses, each times its weight; float32.
        weight: Sum of the weights, as multiples of `first`.
        first: Weight of the first micro-batch.
        num: Micro-batches so far.
        group: Processes that train together; None is the default group.
    """

    loss: Tensor | None = None
    weight: float | Tensor = 0.0
    first: float | Tensor = 1.0
    num: int = 0
    group: dist.ProcessGroup | None = None

    def add(self, loss: Tensor, weight: float | Tensor | None) -> Tensor:
        """Take one loss; gives it back times its weight, to go backward from."""
        relative: float | Tensor = 1.0
        if weight is not None and self.num == 0:
            self.first = agree_on_mean(weight, home=loss.device, group=self.group)
        if weight is not None and self.first is not weight:
            relative = weight / self.first
        weighted = loss if isinstance(relative, float) and relative == 1.0 else loss * relative
        part = weighted.detach().to(torch.float32)
        self.loss = part if self.loss is None else self.loss + part
        self.weight = self.weight + relative
        self.num += 1
        return weighted

    @property
    def mean(self) -> Tensor:
        """The average loss."""
        if self.loss is None:
            raise GuardError("update() was called before backward(). Call backward(loss) for each batch first.")
        if not isinstance(self.weight, Tensor):
            return self.loss if self.weight == 1.0 else self.loss / self.weight
        # A process that has no items adds nothing: its loss is what it was, not 0 / 0.
        return self.loss / torch.where(self.weight == 0, 1.0, self.weight)


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


class Randomness:
    """The state of torch's random number generators, so that a closure can be run again exactly."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Go back to it."""
        torch.set_rng_state(self._host)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)

    @contextlib.contextmanager
    def replayed(self) -> Generator[None]:
        """Run something with this state, and then go on as if it had not run."""
        now = Randomness(self._device)
        self.restore()
        try:
            yield
        finally:
            now.restore()


def run_micro_batches(
    compute_loss: Callable[[Any], Loss],
    batches: Sequence[Any],
    *,
    model: nn.Module,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]],
    scale: Tensor,
    group: dist.ProcessGroup | None = None,
) -> Sum:
    """Forward and backward of every micro-batch; gradients are added to what the parameters hold.

    Args:
        compute_loss: Gives the loss of a batch.
        batches: The micro-batches.
        model: The model, which may be wrapped for several processes.
        autocast: Gives the context of the forward pass.
        scale: What losses are multiplied by.
        group: Processes that train together; None is the default group.
    """
    total = Sum(group=group)
    for i, batch in enumerate(batches):
        with synced_at_the_end(model, i == len(batches) - 1):
            with autocast():
                value = compute_loss(batch)
            loss, weight = take_loss(value, "The value of compute_loss")
            (total.add(loss, weight).to(torch.float32) * scale).backward()
    return total
