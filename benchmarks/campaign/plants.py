"""What a fault does in the step that it strikes."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from torch import Tensor, nn

from campaign.plan import Fault
from floatline.guard.checkpoints.guard_state import local

ERRORS = {"RuntimeError": RuntimeError, "MemoryError": MemoryError, "KeyboardInterrupt": KeyboardInterrupt}


class Plant:
    """What a fault does in the step it strikes; this one does nothing."""

    manual = False  # backward() and update() in place of step()
    pieces = 1  # micro-batches

    def rows(self, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The batch."""
        return rows

    def arm(self, _: nn.Module) -> list[Any]:
        """Hooks for this step."""
        return []

    def before(self, piece: int) -> None:
        """In the loss, before the forward pass."""

    def after(self, _: int, loss: Tensor) -> Tensor:
        """In the loss, behind the forward pass."""
        return loss

    def gradients(self, model: nn.Module) -> None:
        """Behind the backward pass and the exchange of gradients."""


class Forward(Plant):
    """An element of a module's output, or of the gradient that comes back to it; once, not when the canary is asked."""

    def __init__(self, details: dict[str, Any], *, backward: bool) -> None:
        self._details, self._backward, self._struck = details, backward, False

    def arm(self, model: nn.Module) -> list[Any]:
        """A hook on the module."""

        def change(_: nn.Module, __: Any, out: Tensor) -> Tensor | None:
            if self._struck:
                return None
            self._struck = True
            if not self._backward:
                return self._spoil(out)
            out.register_hook(self._spoil)
            return None

        return [model.get_submodule(self._details["module"]).register_forward_hook(change)]

    def _spoil(self, values: Tensor) -> Tensor:
        spoiled = values.clone()
        spoiled.view(-1)[self._details["element"] % spoiled.numel()] = float(self._details["value"])
        return spoiled


class Reduced(Plant):
    """An element of a gradient, after the processes have added theirs up."""

    manual = True

    def __init__(self, details: dict[str, Any]) -> None:
        self._details = details

    def gradients(self, model: nn.Module) -> None:
        """In the first gradient from that parameter on of which this process holds anything."""
        grads = [local(param.grad).view(-1) for param in model.parameters() if param.grad is not None]
        first = self._details["param"] % len(grads)
        grad = next(grad for grad in [*grads[first:], *grads[:first]] if grad.numel())
        grad[self._details["element"] % grad.numel()] = float(self._details["value"])


class Batch(Plant):
    """A batch with inf or NaN in it, or with nothing in it."""

    def __init__(self, details: dict[str, Any]) -> None:
        self._details = details

    def rows(self, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The spoiled rows."""
        x, y = rows
        if self._details["how"] == "empty":
            return x[:0], y[:0]
        x.view(-1)[self._details["element"] % x.numel()] = float(self._details["how"])
        return x, y


class Raises(Plant):
    """A loss that raises: before the forward pass, behind it, or in the second of two micro-batches."""

    def __init__(self, details: dict[str, Any]) -> None:
        self._where, self._error = details["where"], ERRORS[details.get("error", "RuntimeError")]
        self.pieces = 2 if self._where == "second" else 1

    def before(self, piece: int) -> None:
        """Maybe raise."""
        if self._where == "before" or piece == 1:
            raise self._error("planted")

    def after(self, _: int, loss: Tensor) -> Tensor:
        """Maybe raise."""
        if self._where == "after":
            raise self._error("planted")
        return loss


class Kill(Plant):
    """SIGKILL to this process, somewhere in the step."""

    def __init__(self, where: str) -> None:
        self._where = where

    def before(self, _: int) -> None:
        """Before the forward pass."""
        if self._where == "before":
            die(signal.SIGKILL)

    def arm(self, model: nn.Module) -> list[Any]:
        """Between two layers, forward or backward."""

        def strike(*_: Any) -> None:
            die(signal.SIGKILL)

        def hook(_: nn.Module, __: Any, out: Tensor) -> None:
            if self._where == "forward":
                strike()
            out.register_hook(strike)

        strikes = self._where in ("forward", "backward")
        return [model.get_submodule("norm").register_forward_hook(hook)] if strikes else []


class RaisesAlone(Plant):
    """An uncaught error; or one after which the process stays, and does nothing more."""

    def __init__(self, where: str) -> None:
        self._where = where

    def before(self, _: int) -> None:
        """Maybe raise."""
        if self._where == "before":
            raise RuntimeError("planted")

    def after(self, _: int, loss: Tensor) -> Tensor:
        """Stay, without a word."""
        if self._where == "after":
            time.sleep(1000)
        return loss


def make_plant(fault: Fault) -> Plant:
    """What strikes the step."""
    if fault.kind in ("forward", "backward"):
        return Forward(fault.details, backward=fault.kind == "backward")
    if fault.kind == "reduced":
        return Reduced(fault.details)
    return Batch(fault.details) if fault.kind == "batch" else Raises(fault.details)


def die(number: int) -> None:
    """End this process by a signal."""
    os.kill(os.getpid(), number)
