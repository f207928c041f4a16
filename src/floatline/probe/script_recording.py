"""ScriptRecording: the recorder of one step of a script, which may begin before the step's forward pass."""

# torch shows its dispatcher to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib

import torch
from torch import nn

from floatline.probe.between_steps import BetweenSteps
from floatline.probe.compiled import Eagerly, is_inside_compiled
from floatline.probe.gradient_errors import GradientRecorder
from floatline.probe.script_forward import Forward, tensors_in
from floatline.probe.trace import Op, Trace

_SUMS = frozenset(
    f"aten.{name}_" for name in ("add", "sub", "addcdiv", "addcmul", "lerp", "_foreach_add", "_foreach_sub")
)


class ScriptRecording:
    """Records one step after the other.

    Attributes:
        step: The step that is recorded, or was last; -1 before the first.
        early: Whether the recorder runs, and the forward pass of its step has not begun.
    """

    def __init__(self) -> None:
        self.step = -1
        self.early = False
        self._recorder: GradientRecorder | None = None
        self._eagerly = contextlib.ExitStack()

    @property
    def runs(self) -> bool:
        """Whether something is recorded now."""
        return self._recorder is not None

    def begin_early(self, step: int) -> None:
        """Record what comes before the forward pass of a step."""
        if is_inside_compiled():
            return
        self.step, self.early = step, True
        self._enter(GradientRecorder(nn.Module()))  # its model is not known yet

    def begin(self, forward: Forward, model: nn.Module) -> None:
        """Record a step from its forward pass on, or go on with it."""
        inputs = tensors_in(forward.args, forward.kwargs)
        self.step, self.early = forward.event.step, False
        if self._recorder is None:
            self._enter(GradientRecorder(model, batch=(inputs, ())))
        else:
            self._recorder.adopt(model)
            self._recorder.name_batch(inputs, ())

    def begin_between(self, step: int, recorder: BetweenSteps) -> None:
        """Record the step of a loop that calls no module, and has yet to update its weights."""
        self.step = step
        self._enter(recorder)

    def see_backward(self) -> None:
        """A backward pass of such a loop is over."""
        if isinstance(self._recorder, BetweenSteps):
            self._recorder.see_backward()

    def begin_without_module(self, step: int, weights: nn.Module) -> None:
        """Record a step of a loop that calls no module."""
        self.step = step
        self._enter(GradientRecorder(weights))

    def _enter(self, recorder: GradientRecorder) -> None:
        self._eagerly.enter_context(Eagerly())
        recorder.__enter__()
        self._recorder = recorder

    def hides(self, mode: object) -> bool:
        """Whether the recorder lies above a dispatch mode, which would then leave the recorder instead of itself."""
        if self._recorder is None or mode is self._recorder:
            return False
        depth = torch._C._len_torch_dispatch_stack()
        return depth > 0 and torch._C._get_dispatch_stack_at(depth - 1) is self._recorder

    def end(self) -> Trace | None:
        """What was recorded; None where nothing was."""
        recorder, self._recorder, self.early = self._recorder, None, False
        if recorder is None:
            return None
        with self._eagerly:
            recorder.__exit__(None, None, None)
        recorder.trace.meta["step"] = self.step
        for op in find_updates_by_hand(recorder.trace):
            op.phase = "update"
        return recorder.trace


def find_updates_by_hand(trace: Trace) -> list[Op]:
    """Sums in place that change a weight outside of an optimizer."""
    return [
        op
        for op in trace.ops
        if op.phase == "outside" and op.name in _SUMS and op.inputs and op.inputs[0].role.startswith("param:")
    ]
