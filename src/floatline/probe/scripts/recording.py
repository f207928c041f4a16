"""ScriptRecording: the recorder of one step of a script; Schedule: which healthy steps are recorded."""
# torch shows its dispatcher to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import _pop_mode, _push_mode

from floatline.optim.mesh import local_part
from floatline.precision.rewrites.calls import tensors_in
from floatline.probe.scripts.last_forward import Forward
from floatline.probe.scripts.setup import SetupRecorder
from floatline.probe.trace.measures import Measures
from floatline.probe.trace.recorder import GradientRecorder
from floatline.probe.trace.schemas import TracedCall
from floatline.probe.trace.storages import Storages, storage_key
from floatline.probe.trace.trace import Op, Trace
from floatline.probe.trace.twins import Twins
from floatline.probe.watch.patches import Eagerly, is_inside_compiled

# Applied steps after which the first three are recorded; then whenever there are four times as many. The first one
# fills caches and tables, which later ones only read.
_FIRST, _FACTOR = (0, 2, 9), 4
# Steps that each of several processes records: they must be the same.
PLANNED = (0, 2, 9, 36)
# Seconds after which no further healthy step is recorded.
BUDGET = 60.0


class Schedule:
    """Says when to record: the first step, after 2 applied steps, after 9, then whenever there are four times as many.

    What is recorded depends on the number of applied steps alone, counted again where training begins again in another
    format. A budget of work only ends recording, and then `ended_at` says so.

    Attributes:
        num_applied: Optimizer steps that were applied so far.
        due: How many it takes before a step is recorded.
        ended_at: The number of applied steps at which the budget was spent; None while it is not.
    """

    def __init__(self) -> None:
        self.num_applied = 0
        self.due = _FIRST[0]
        self.ended_at: int | None = None
        self._begun = 0

    def begin_again(self) -> None:
        """Count from here: what is trained now computes otherwise than before."""
        self._begun = self.num_applied
        self.due = self._begun + _FIRST[0]

    def is_due(self, *, spent: float, after: int = 0) -> bool:
        """Whether the step that begins is recorded.

        Args:
            spent: Seconds that recording took so far.
            after: How many more steps will have been applied by then.
        """
        if self.num_applied + after < self.due or self.ended_at is not None:
            return False
        if spent > BUDGET:
            self.ended_at = self.num_applied
            return False
        while self.due <= self.num_applied + after:
            last = self.due - self._begun
            self.due = self._begun + next((due for due in _FIRST if due > last), _FACTOR * last)
        return True


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
        call = TracedCall(func, args, kwargs or {})
        weights = {storage_key(local_part(parameter)) for parameter in self.model.parameters()}
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
        return {storage_key(local_part(p.grad)) for p in self.model.parameters() if p.grad is not None}

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


_SUMS = frozenset(
    f"aten.{name}_" for name in ("add", "sub", "addcdiv", "addcmul", "lerp", "_foreach_add", "_foreach_sub")
)


class ScriptRecording:
    """Records one step after the other.

    Attributes:
        step: The step that is recorded, or was last; -1 before the first.
        early: Whether the recorder runs, and the forward pass of its step has not begun.
        begins_late: Whether what came before the forward pass of the first step is not in its record.
    """

    def __init__(self) -> None:
        self.step = -1
        self.early = self.begins_late = False
        self._recorder: GradientRecorder | None = None
        self._dropped = False
        self._eagerly = contextlib.ExitStack()
        self._setup: SetupRecorder | None = None

    @property
    def runs(self) -> bool:
        """Whether something is recorded now."""
        return self._recorder is not None

    def begin_setup(self) -> None:
        """Record what comes before the first pass of a model."""
        self._setup = SetupRecorder()
        self._setup.__enter__()

    def end_setup(self) -> Trace | None:
        """What was recorded before; None where it has ended already."""
        setup, self._setup = self._setup, None
        if setup is None:
            return None
        above: list[Any] = []  # modes that the script has entered since
        while torch._C._len_torch_dispatch_stack() and _top() is not setup:
            above.append(_pop_mode())
        setup.__exit__(None, None, None)
        for mode in reversed(above):
            _push_mode(mode)
        return setup.trace

    def begin_early(self, step: int) -> None:
        """Record what comes before the forward pass of a step."""
        if is_inside_compiled():
            return
        self.step, self.early = step, True
        self._enter(GradientRecorder(nn.Module()))  # its model is not known yet

    def begin(self, forward: Forward, model: nn.Module, loose: Mapping[str, Tensor]) -> None:
        """Record a step from its forward pass on, or go on with it; `loose` are weights of no module that is called."""
        inputs = tensors_in(forward.args, forward.kwargs)
        self.step, self.early = forward.event.step, False
        self.begins_late = self._recorder is None and self.step == 0
        if self._recorder is None:
            recorder = GradientRecorder(model, batch=(inputs, ()))
            recorder.name_weights(loose)
            self._enter(recorder)
        else:
            self._recorder.adopt(model)
            self._recorder.name_batch(inputs, ())
            self._recorder.name_weights(loose)

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

    def give_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Gradients that lie in no weight's `grad`."""
        if self._recorder is not None:
            self._recorder.give_gradients(gradients)

    def _enter(self, recorder: GradientRecorder) -> None:
        self._eagerly.enter_context(Eagerly())
        recorder.__enter__()
        self._recorder = recorder

    def hides(self, mode: object) -> bool:
        """Whether the recorder lies above a dispatch mode, which would then leave the recorder instead of itself."""
        if self._recorder is None or mode is self._recorder:
            return False
        return torch._C._len_torch_dispatch_stack() > 0 and _top() is self._recorder

    def cut(self) -> None:
        """The step is over, but the recorder cannot be left here: what comes belongs to it no more."""
        if self._recorder is not None:
            self._recorder.cut()

    def end(self) -> Trace | None:
        """What was recorded; None where nothing was, or where the recorder cannot be left yet, and is for nothing."""
        if self._recorder is not None and is_inside_compiled():
            self._recorder.cut()
            self._dropped = True
            return None
        recorder, self._recorder, self.early = self._recorder, None, False
        dropped, self._dropped = self._dropped, False
        if recorder is None:
            return None
        with self._eagerly:
            recorder.__exit__(None, None, None)
        recorder.trace.meta["step"] = self.step
        for op in find_updates_by_hand(recorder.trace):
            op.phase = "update"
        return None if dropped else recorder.trace


def _top() -> object:
    """The dispatch mode that was entered last."""
    return torch._C._get_dispatch_stack_at(torch._C._len_torch_dispatch_stack() - 1)


def find_updates_by_hand(trace: Trace) -> list[Op]:
    """Sums in place that change a weight outside of an optimizer."""
    return [
        op
        for op in trace.ops
        if op.phase == "outside" and op.name in _SUMS and op.inputs and op.inputs[0].role.startswith("param:")
    ]


def fails_by_state(trace: Trace) -> bool:
    """Whether nothing but the optimizer's own state, from before the step, is not finite in it."""
    if any(v.nonfinite for op in trace.ops if op.phase == "backward" for v in op.outputs):
        return False
    if any(operand.value.nonfinite for operand in trace.gradients.values()):
        return False
    read = (o for op in trace.ops if op.phase == "update" for o in op.inputs if o.made_by is None)
    return any(o.role.startswith("state:") and o.value.nonfinite for o in read)
