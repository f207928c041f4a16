"""StepRecording: one step of a run that is watched, recorded from where it begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from floatline.probe.gradient_errors import GradientRecorder
from floatline.probe.records import RunRecord
from floatline.probe.trace import Trace
from floatline.probe.watch import Watch


class StepRecording:
    """Records a step from its forward pass on.

    In a loop of the user's it begins where gradients are cleared, the first one where an optimizer is made: what is
    computed before the forward pass, such as features, belongs to the step. What an evaluation in between computes does
    not.

    Args:
        seen: The watch; its hooks of forward passes, clearing and leaving are taken.
        step: Number of the step.
        record: Of the run: its kind, and the model of a workload.
        originals: What buffers and batch held before they were cast.
        on_forward: Called with every root module before it runs.

    Attributes:
        recorder: The recorder; None before the step, and where none came.
    """

    def __init__(
        self,
        seen: Watch,
        step: int,
        record: RunRecord,
        originals: Mapping[str, Tensor],
        *,
        on_forward: Callable[[nn.Module], None],
    ) -> None:
        self.recorder: GradientRecorder | None = None
        self._early = False  # no forward pass has run in it yet
        self._seen, self._step, self._record, self._originals = seen, step, record, originals
        self._on_forward = on_forward
        seen.on_forward, seen.on_clear, seen.on_leave = self._begin, self._begin_early, self._give_up

    def finish(self) -> Trace | None:
        """The run is over: what was recorded; None where the step had no forward pass."""
        if self._record.exception is None:  # else the step ended before its forward pass
            self._give_up()
        if self.recorder is None:
            return None
        self.recorder.__exit__(None, None, None)
        return self.recorder.trace

    def _begin(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._on_forward(module)
        if self._seen.step != self._step or (self.recorder is not None and not self._early):
            return
        model = self._record.model if self._record.model is not None else module
        if self.recorder is None:
            batch = (inputs, self._seen.targets)
            self.recorder = GradientRecorder(model, batch=batch, twins=True, weights=self._originals)
            self.recorder.__enter__()
        else:
            self.recorder.adopt(model)
            self.recorder.name_batch(inputs, self._seen.targets)
        self._early = False

    def note_event(self) -> None:
        """Something happened: the first step begins where an optimizer is made."""
        if not self._seen.step and self._seen.events[-1].kind == "optimizer-new":
            self._begin_early()

    def _begin_early(self) -> None:
        if self._seen.step == self._step and self.recorder is None and self._record.kind == "train":
            self.recorder, self._early = GradientRecorder(nn.Module(), twins=True), True  # its model is not known yet
            self.recorder.__enter__()

    def _give_up(self) -> None:
        if self.recorder is not None and self._early:
            self.recorder.__exit__(None, None, None)
            self.recorder, self._early = None, False
