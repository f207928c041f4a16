"""CapturedForward: a forward pass without training, run again in any precision and held against FP32 by its outputs."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from floatline.errors import ReplayError
from floatline.plans import Plan
from floatline.plans.presets import resolve_plan
from floatline.precision.dtypes import DTYPES, NARROW
from floatline.precision.islands import Islands
from floatline.precision.nested import find_tensors, map_tensors
from floatline.precision.random_state import RandomState
from floatline.precision.user_frames import end_search_at
from floatline.probe.steps.captured_step import CapturedStep, Precision
from floatline.probe.steps.compiled_loss import Backend
from floatline.probe.steps.origin import StepOrigin
from floatline.probe.steps.outputs import OutputMatch, find_logits, match_output, name_outputs
from floatline.probe.steps.replayed import Replay
from floatline.probe.steps.stopwatch import Stopwatch
from floatline.probe.trace.recorder import Recorder
from floatline.probe.trace.trace import Trace
from floatline.probe.watch.patches import Aside


class FunctionModule(nn.Module):
    """A function that gives tensors, as a module without weights."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self._function(*args, **kwargs)


class CapturedForward(CapturedStep):
    """One forward pass, kept to be run again. `capture_forward` makes it.

    It is a step whose outputs stand where another has its gradients: `Replay.raw` holds them by name, and so does
    `Trace.gradients`. There is no loss, no scale and no update.

    Numerics:
        In a plan with 16-bit weights, those of the model, and its inputs, are rounded to the format that a replay is
        asked for, from the values that were captured; FP32 takes these as they are. The FP32 values beside a trace
        begin from them, too. In a mixed plan autocast does it.
        Checked by tests/probe/steps/test_captured_forward.py.

    Attributes:
        recorded: What the last replay with `trace=True` recorded, also where it raised; None before it.
        casts_inputs: Whether FP32 inputs are cast as 16-bit ones are. What a model with 16-bit weights is given in FP32
            is meant to be FP32.
        has_marks: Whether NaN and inf that FP32 gives, too, are meant, as marks of what is not valid.
    """

    recorded: Trace | None = None
    casts_inputs: bool = False
    has_marks: bool = False
    _ruled_out: Mapping[str, Tensor] | None = None

    def replay(
        self,
        *,
        precision: Precision | None = None,
        scale: float | None = None,
        islands: Sequence[str] = (),
        trace: bool = False,
        update: bool = False,
        compiled: Backend = False,
    ) -> Replay:
        """Run the forward pass again, on copies; None is the plan's precision."""
        if compiled is not False:
            raise ReplayError("A forward pass is not replayed compiled. Give model and inputs to parity.")
        if scale not in (None, 1.0) or update:
            raise ReplayError("A forward pass has no loss scale and no update. Leave both out.")
        self._check(precision, scale, islands, update=update)
        wanted = precision or self.plan.compute
        began, recorder = time.perf_counter(), None
        inputs = copy_inputs(self.batches[0])
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.random_state.replayed())
            stack.enter_context(self.state.in_place(narrow_as=DTYPES[wanted]))
            stack.enter_context(self._surroundings(wanted, eager=True))
            stack.enter_context(torch.no_grad())
            stack.enter_context(self.around())
            if islands:
                stack.callback(Islands(self.model, islands).remove)
            if trace:
                recorder = stack.enter_context(self._make_recorder(inputs))
                self.recorded = self._label(recorder.trace, wanted, 1.0)
                recorder.trace.meta["whole"] = self._find_whole(inputs)
            with Stopwatch(self.device) as stopwatch, self._autocast(wanted):
                given = self._cast(inputs, DTYPES[wanted])
                num_casts = 0 if recorder is None else len(recorder.trace.ops)
                made = self._compute_loss(given)
            outputs = name_outputs(made)
            if recorder is not None:
                recorder.note_outputs(outputs)
                for op in recorder.trace.ops[:num_casts]:  # no line of the user's casts the inputs
                    op.file, op.line, op.function = "", 0, ""
            with Aside():
                raw = {name: tensor.detach().clone() for name, tensor in outputs.items()}
        return Replay(
            precision=wanted,
            scale=1.0,
            islands=tuple(islands),
            loss=0.0,
            finite=self._is_sound(raw, wanted),
            raw=raw,
            unit=1.0,
            before=None,
            after=None,
            trace=None if recorder is None else recorder.trace,
            seconds=time.perf_counter() - began,
            compute_seconds=stopwatch.read(),
        )

    def match(self, own: Replay, wide: Replay) -> dict[str, OutputMatch]:
        """Every output of a replay held against that of another, such as the one in FP32."""
        logits = find_logits(self.model, wide.raw)
        return {
            name: match_output(name, own.raw[name], tensor, logits=name in logits, marks=self.has_marks)
            if name in own.raw
            else OutputMatch(name, "numbers", float("inf"))
            for name, tensor in wide.raw.items()
        }

    def _is_sound(self, raw: Mapping[str, Tensor], precision: str) -> bool:
        """Whether outputs are finite, but for -inf, and marks where there are some, that FP32 has, too: it is meant."""
        if precision == "fp32":
            self._ruled_out = {name: self._may_stay(tensor) for name, tensor in raw.items()}
        meant = self._ruled_out or {}
        for name, tensor in raw.items():
            fine = tensor.isfinite()
            if name in meant and meant[name].shape == fine.shape:
                fine |= meant[name] & self._may_stay(tensor)
            if not bool(fine.all()):
                return False
        return True

    def _may_stay(self, tensor: Tensor) -> Tensor:
        return ~tensor.isfinite() if self.has_marks else tensor == float("-inf")

    def _make_recorder(self, inputs: Any) -> Recorder:
        held = {**self.state.captured, **self.state.captured_buffers}
        now = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        cast = {name: values for name, values in held.items() if name in now and _is_cast(values, now[name])}
        # Where a format holds what was captured, the tensor is its own FP32 value already.
        same = [(now[name].to(values.dtype) == values).all() for name, values in cast.items()]
        moved = {name: cast[name].float() for name, is_same in zip(cast, read_flags(same), strict=True) if not is_same}
        return Recorder(self.model, batch=(find_tensors(inputs), ()), weights=moved)

    def _find_whole(self, inputs: Any) -> list[str]:
        """Roles of floating-point inputs and buffers that hold whole numbers."""
        rows = {f"inputs[{i}]": tensor for i, tensor in enumerate(find_tensors(inputs))}
        rows |= {f"buffer:{name}": tensor for name, tensor in self.state.captured_buffers.items()}
        with Aside():
            return [
                role
                for role, tensor in rows.items()
                if tensor.is_floating_point() and tensor.numel() > 1 and bool((tensor == tensor.round()).all())
            ]

    def _cast(self, inputs: Any, dtype: torch.dtype) -> Any:
        """The inputs in the format of the weights; autocast takes care of those of a mixed plan."""
        old = (*NARROW, torch.float32) if self.casts_inputs else NARROW

        def cast_one(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.dtype in old else tensor

        return map_tensors(cast_one, inputs)


def capture_forward(
    model: nn.Module | Callable[..., Any],
    inputs: Any,
    *,
    plan: Plan | str = "fp16-true",
    half_on_cpu: bool = True,
    random_state: RandomState | None = None,
    origin: StepOrigin | None = None,
) -> CapturedForward:
    """Keep a forward pass, so that it can be run in several precisions and compared.

    Args:
        model: The model, or any function that gives tensors. Replays are in evaluation mode; it itself stays as it is.
        inputs: What it is called with: a tensor, a row of arguments, or a mapping of named ones; or `Arguments`.
        plan: The precision that is asked about. With 16-bit weights, the weights that are 16-bit in any format are cast
            to it; of a model that is FP32 throughout, all parameters and the buffers that a checkpoint holds.
        half_on_cpu: Whether 16-bit products on a CPU are computed as on a GPU.
        random_state: Random numbers of the pass; None takes those of now.
        origin: Where it comes from.
    """
    inner = model if isinstance(model, nn.Module) else FunctionModule(model)
    given = resolve_plan(plan)
    step = CapturedForward(
        inner,
        None,
        lambda batch: call_with(inner, batch),
        (inputs,),
        plan=given.model_copy(update={"scaling": None}),
        scale=1.0,
        checked=False,
        random_state=random_state or RandomState.now(),
        buffers=None,
        half_on_cpu=half_on_cpu,
        keep_optimizer=False,
        origin=origin or StepOrigin(),
    )
    step.state.training = dict.fromkeys(step.state.training, False)
    if given.weights != "fp32":
        step.state.cast_too = _find_checkpoint(inner)
        step.casts_inputs = not any(parameter.dtype in NARROW for parameter in inner.parameters())
    return step


class Arguments(tuple[Any, ...]):
    """Arguments of a call, by position and by name, as one row of two."""

    __slots__ = ()


def call_with(model: nn.Module, inputs: Any) -> Any:
    """Call a model with its inputs, however they are given."""
    if isinstance(inputs, Arguments):
        return model(*inputs[0], **inputs[1])
    if isinstance(inputs, Mapping):
        return model(**cast("Mapping[str, Any]", inputs))
    return model(*cast("Sequence[Any]", inputs)) if isinstance(inputs, list | tuple) else model(inputs)


end_search_at(call_with)


def _find_checkpoint(model: nn.Module) -> frozenset[str]:
    """FP32 weights and buffers that a 16-bit checkpoint holds in 16 bits: none where some are so already."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if any(tensor.dtype in NARROW for tensor in tensors.values()):
        return frozenset()
    kept = {*model.state_dict(), *dict(model.named_parameters())}
    return frozenset(n for n, tensor in tensors.items() if n in kept and tensor.dtype == torch.float32)


def cast_all_buffers(step: CapturedForward) -> None:
    """Cast buffers that no checkpoint holds as well, as `model.half()` does: the model may not run otherwise."""
    names = {name for name, tensor in step.state.captured_buffers.items() if tensor.dtype == torch.float32}
    step.state.cast_too |= names


def _is_cast(values: Tensor, now: Tensor) -> bool:
    return values.is_floating_point() and values.dtype != now.dtype and values.shape == now.shape


def read_flags(flags: Sequence[Tensor]) -> list[bool]:
    """Truth values that lie on devices, which are waited for once each."""
    by_device: dict[torch.device, list[int]] = {}
    for number, flag in enumerate(flags):
        by_device.setdefault(flag.device, []).append(number)
    found = [False] * len(flags)
    for numbers in by_device.values():
        values = cast("list[bool]", torch.stack([flags[one] for one in numbers]).tolist())
        for number, value in zip(numbers, values, strict=True):
            found[number] = value
    return found


def copy_inputs(inputs: Any) -> Any:
    """A copy that a pass may write to, such as a cache; what cannot be copied is handed over as it is."""
    try:
        return copy.deepcopy(inputs)
    except Exception:  # a tensor of a graph, an open file
        return map_tensors(lambda tensor: tensor.detach().clone(), inputs)
