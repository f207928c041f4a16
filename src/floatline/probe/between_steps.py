"""BetweenSteps: a recorder of a loop without modules, where the use of a weight tells that a step begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload

from floatline.probe.gradient_errors import GradientRecorder
from floatline.probe.measures import Measures
from floatline.probe.schemas import Call
from floatline.probe.storages import Storages, storage_key
from floatline.probe.trace import Trace
from floatline.probe.twins import Twins


class BetweenSteps(GradientRecorder):
    """Begins after a backward pass, when the loop has yet to update its weights, and records the step that follows.

    What is recorded before the last write to a weight or a gradient is dropped: it belongs to the update. What is
    computed from the weights after the next update belongs to another step, and is dropped as well.

    Args:
        weights: The weights.
        begin: Called before an operation of the step reads a weight for the first time.
        end: Called before an operation of the step after it does.
    """

    def __init__(self, weights: nn.Module, begin: Callable[[], None], end: Callable[[], None]) -> None:
        super().__init__(weights)
        self._on_use: Callable[[], None] | None = begin
        self._waits = True
        self._end = end
        self._length: int | None = None

    def see_backward(self) -> None:
        """The backward pass of the step is over."""
        self._on_use = self._end

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: tuple[Any, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run and record one operation; torch calls this."""
        if self._on_use is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        call = Call(func, args, kwargs or {})
        weights = {storage_key(parameter) for parameter in self.model.parameters()}
        reads = [a.tensor for a in call.tensors if a.tensor.requires_grad and not call.schema.view]
        if torch.is_grad_enabled() and any(storage_key(tensor) in weights for tensor in reads):
            self._use()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._waits and any(storage_key(tensor) in weights | self._gradients() for tensor in call.written):
            self._start_again()
        return result

    def _use(self) -> None:
        on_use, self._on_use = self._on_use, None
        if not self._waits:
            self._length = len(self.trace.ops)
        self._waits = False
        if on_use is not None:
            on_use()

    def _gradients(self) -> set[Any]:
        return {storage_key(p.grad) for p in self.model.parameters() if p.grad is not None}

    def _start_again(self) -> None:
        """What follows is the beginning of a trace."""
        self.trace, self._storages, self._measures = Trace(), Storages(), Measures()
        self._twins = Twins(self._storages)
        self._gradients_due = False
        self._whereabouts.forget()
        self.adopt(self.model)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._length is not None:
            del self.trace.ops[self._length :]
