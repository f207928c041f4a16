"""CapturedStep: one captured step, run again in any precision beside the run it came from."""
# torch shows which dispatch modes are on under a private name only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from floatline import optim
from floatline.errors import ReplayError, suggest
from floatline.findings import Finding
from floatline.numerics.cuda_autocast import cuda_autocast_lists, follows_cuda_lists
from floatline.numerics.half_on_cpu import HalfOnCPU
from floatline.plans import Plan
from floatline.precision.dtypes import DTYPES
from floatline.precision.islands import Islands
from floatline.precision.micro_batches import Loss, LossSum, run_micro_batches
from floatline.precision.nested import find_tensors, map_tensors
from floatline.precision.random_state import RandomState
from floatline.probe.steps.bundle_files import DATA, STATE, pack, write_files
from floatline.probe.steps.compiled_loss import Backend, compile_loss
from floatline.probe.steps.origin import StepOrigin, describe_origin
from floatline.probe.steps.other_precision import AutocastState, as_bf16, as_fp16, as_fp32
from floatline.probe.steps.replayed import Replay
from floatline.probe.steps.stopwatch import Stopwatch
from floatline.probe.steps.weight_copies import StandIns
from floatline.probe.trace.trace import Trace
from floatline.probe.watch.patches import Aside

Precision = Literal["fp32", "bf16", "fp16"]


class CapturedStep:
    """One captured step. `capture_step` makes it.

    A replay runs on copies that take the place of the model's tensors meanwhile (`StandIns`): weights, gradients,
    states, random numbers, hooks and flags of the run are afterwards what they were, bit for bit, also where the
    replay raised. The copies are made once; a replay costs one copy of the weights, and the step.

    Numerics:
        Run again as it was, a step gives the same loss, gradients, buffers and updated weights bit for bit on a CPU,
        and on a GPU whose kernels are deterministic. Checked by tests/probe/steps/test_replay.py.

    Attributes:
        model: The model.
        plan: How the step computes.
        scale: Its loss scale.
        batches: Its batches.
        origin: Where it comes from.
        random_state: Its random numbers.
        around: What surrounds each replay beside that: a plan that is in force in the step and not in the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        compute_loss: Callable[[Any], Loss],
        batches: tuple[Any, ...],
        *,
        plan: Plan,
        scale: float,
        checked: bool,
        random_state: RandomState,
        buffers: Mapping[str, Tensor] | None,
        half_on_cpu: bool,
        keep_optimizer: bool,
        origin: StepOrigin,
    ) -> None:
        self.model = model
        self.plan = plan
        self.scale = scale
        self.batches = batches
        self.random_state = random_state
        self.origin = origin
        self.checked = checked
        self.around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self._compute_loss = compute_loss
        held = [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
        self.state = StandIns(model, held, buffers=buffers)
        # The parameters themselves, with states of their own.
        self.optimizer = copy.deepcopy(optimizer, {id(p): p for p in held}) if keep_optimizer else None
        self.autocast = AutocastState.now()
        self.half_on_cpu = half_on_cpu
        self.cuda_lists = follows_cuda_lists()
        self.device = next((t.device for t in self.state.live.values()), torch.device("cpu"))

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
        """Run the step again, on copies.

        Numerics:
            'fp32' and 'bf16' overrule autocast and casts, as `as_fp32` and `as_bf16` do, without a loss scale unless
            one is given; 'fp16' does so with BF16, and switches autocast on for a step in FP32. Weights and batches
            of 16 bits are widened exactly to FP32, and rounded to another 16-bit format.
            Gradients are those of the mean over the batches, still scaled in `Replay.raw`.
            Compiled, a step runs without `HalfOnCPU`, which torch.compile does not look through.

        Args:
            precision: What to compute in; None is as it was.
            scale: The loss scale; None is the step's own, and 1 in FP32 and BF16.
            islands: Modules that compute in FP32, beside those that do already.
            trace: Record every operation beside its FP32 value.
            update: Make the optimizer's step, too.
            compiled: Compile the loss function with all that it calls: True by Inductor, or the backend to use.

        Raises:
            ReplayError: The precision, scale or module is not known, an update cannot be made, or nothing could be
                compiled.
        """
        self._check(precision, scale, islands, update=update)
        if compiled is not False and (precision or trace or islands):
            raise ReplayError("Compiled code runs in the step's own precision, unseen. Leave the others out.")
        if scale is None:
            scale = self.scale if precision in (None, "fp16") else 1.0
        wide = None if precision is None else DTYPES[precision]
        began = time.perf_counter()
        batches = _cast_narrow(self.batches, wide)
        recorder: Any = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.random_state.replayed())
            stack.enter_context(self.state.in_place(narrow_as=wide))
            eager, half = bool(precision or trace or islands), False if compiled is not False else None
            stack.enter_context(self._surroundings(precision, eager=eager, half_on_cpu=half))
            stack.enter_context(self.around())
            if islands:
                stack.callback(Islands(self.model, islands).remove)
            if trace:
                from floatline.probe.trace.recorder import Recorder

                recorder = stack.enter_context(Recorder(self.model, batch=_roles(batches), twins=True))
            compute_loss = stack.enter_context(compile_loss(self._compute_loss, compiled))
            with Stopwatch(self.device) as stopwatch:
                total = run_micro_batches(
                    compute_loss,
                    batches,
                    model=self.model,
                    autocast=lambda: self._autocast(precision),
                    scale=torch.tensor(scale, device=self.device),
                )
            raw = {name: tensor.grad for name, tensor in self.state.live.items() if tensor.grad is not None}
            with Aside():
                finite = _all_finite([total.mean, *raw.values()])
            after = None
            if update:
                with Aside():
                    raw = {name: grad.clone() for name, grad in raw.items()}
                self._update(total, scale, finite=finite)
                with Aside():
                    after = self.state.copy_now()
        return Replay(
            precision=precision or self.precision,
            scale=scale,
            islands=tuple(islands),
            loss=float(total.mean),
            finite=finite,
            raw=raw,
            unit=scale * float(total.weight),
            before=self.state.captured if update else None,
            after=after,
            trace=None if recorder is None else self._label(recorder.trace, precision, scale),
            seconds=time.perf_counter() - began,
            compute_seconds=stopwatch.read(),
        )

    def save(self, folder: str | Path, *, with_data: bool = False, findings: Sequence[Finding] = ()) -> Path:
        """Write the step as a replay bundle: a new folder with safetensors and JSON, there whole or not at all.

        Args:
            folder: Where; it must not exist, or be empty.
            with_data: Put the batches in, too.
            findings: What a diagnosis has found of it.

        Raises:
            ReplayError: It cannot be written.
        """
        return write_step(self, Path(folder), with_data=with_data, findings=findings)

    @property
    def precision(self) -> str:
        """What the step computes in, as it was."""
        return self.plan.compute

    def _check(self, precision: str | None, scale: float | None, islands: Sequence[str], *, update: bool) -> None:
        if precision not in (None, "fp32", "bf16", "fp16"):
            raise ReplayError(f"Precision '{precision}' is not known. {suggest(precision, ('fp32', 'bf16', 'fp16'))}")
        if scale is not None and not 0 < scale < float("inf"):
            raise ReplayError(f"scale is {scale!r}. Give a number above 0.")
        if isinstance(islands, str):
            raise ReplayError(f"islands is the text '{islands}'. Give a list of module names.")
        if update and self.optimizer is None:
            raise ReplayError(
                "The step was captured without its optimizer, and has no update. Give capture_step the optimizer."
            )
        narrow = any(t.dtype in (torch.float16, torch.bfloat16) for t in self.state.captured.values())
        if update and narrow and precision not in (None, self.plan.weights):
            raise ReplayError(
                f"The optimizer's state is that of {self.plan.weights} weights, and cannot make an update in "
                f"{precision}. Replay it without the update, or as it was."
            )

    @contextlib.contextmanager
    def _surroundings(
        self, precision: Precision | None, *, eager: bool, half_on_cpu: bool | None = None
    ) -> Generator[None]:
        """Autocast, arithmetic and gradient mode as they were, and then the precision that is asked for."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self.autocast.replayed())
            if eager:
                # Compiled code would not show its operations.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            # For a model on another device it does nothing, and would be asked about every operation.
            on_cpu = self.device.type == "cpu" or any(t.device.type == "cpu" for t in self.state.live.values())
            wanted = on_cpu and (self.half_on_cpu or precision in ("fp16", "bf16"))
            wanted = wanted if half_on_cpu is None else half_on_cpu
            if wanted and not is_half_on_cpu():
                stack.enter_context(HalfOnCPU())
            if wanted and (self.cuda_lists or precision in ("fp16", "bf16")):
                stack.enter_context(cuda_autocast_lists())
            if precision == "fp32":
                stack.enter_context(as_fp32())
            elif precision is not None:
                stack.enter_context(as_bf16() if precision == "bf16" else as_fp16())
            yield

    def _autocast(self, precision: Precision | None) -> contextlib.AbstractContextManager[Any]:
        plan = self.plan
        if precision in (None, plan.compute, "fp32"):
            dtype = None if plan.compute in ("fp32", plan.weights) else DTYPES[plan.compute]
        else:
            dtype = None if plan.compute == plan.weights != "fp32" else DTYPES[precision]
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def _update(self, total: LossSum, scale: float, *, finite: bool) -> None:
        """The optimizer's step on the copies, as a plain loop with a GradScaler makes it."""
        held: list[Tensor] = [p for g in cast(Any, self.optimizer).param_groups for p in g["params"]]
        own = copy.deepcopy(cast("torch.optim.Optimizer", self.optimizer), {id(p): p for p in held})
        clip = self.plan.clip
        with torch.autocast(self.device.type, enabled=False):
            if isinstance(own, optim.Optimizer):
                own.step(scale=scale * float(total.weight), clip_norm=None if clip is None else clip.max_norm)
                return
            if self.checked and not finite:
                return
            factor = 1.0 / scale / float(total.weight)
            for param in held:
                if param.grad is not None and factor != 1.0:
                    param.grad.mul_(factor)
            if clip is not None and clip.max_norm is not None:
                nn.utils.clip_grad_norm_(held, clip.max_norm, clip.norm_type)
            elif clip is not None and clip.max_value is not None:
                nn.utils.clip_grad_value_(held, clip.max_value)
            own.step()

    def _label(self, trace: Trace, precision: str | None, scale: float) -> Trace:
        trace.meta |= {
            "precision": precision or self.plan.name,
            "step": self.origin.step,
            "scale": scale,
            "whole": [],
        }
        return trace


def is_half_on_cpu() -> bool:
    """Whether `HalfOnCPU` is on."""
    return any(isinstance(mode, HalfOnCPU) for mode in _get_current_dispatch_mode_stack())


def _all_finite(tensors: list[Tensor]) -> bool:
    """Waits for the device, once."""
    return bool(torch.stack([t.isfinite().all().to(tensors[0].device) for t in tensors]).all())


def _cast_narrow(batches: tuple[Any, ...], dtype: torch.dtype | None) -> tuple[Any, ...]:
    """The batches with their 16-bit tensors in another format; None leaves them."""

    def cast_one(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.dtype in (torch.float16, torch.bfloat16) else tensor

    return batches if dtype is None else map_tensors(cast_one, batches)


def _roles(batches: tuple[Any, ...]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Inputs and targets, where a batch is such a pair; else all its tensors as inputs."""
    first: Any = batches[0]
    if len(batches) == 1 and isinstance(first, list | tuple) and len(cast("Sequence[Any]", first)) == 2:
        inputs, targets = cast("tuple[Any, Any]", first)
        if isinstance(inputs, list | tuple) and isinstance(targets, list | tuple):
            return cast("Sequence[Any]", inputs), cast("Sequence[Any]", targets)
    return find_tensors(*batches), ()


def write_step(step: CapturedStep, folder: Path, *, with_data: bool, findings: Sequence[Finding] = ()) -> Path:
    """Write a captured step; `CapturedStep.save` is the way to it."""
    tensors = {f"model.{name}": tensor for name, tensor in step.state.captured.items()}
    tensors |= {f"buffer.{name}": tensor for name, tensor in step.state.captured_buffers.items()}
    random_tensors, random_state = step.random_state.as_parts()
    optimizer, states = _pack_optimizer(step.optimizer)
    batches, data = pack(list(step.batches), "batch") if with_data else (None, {})
    fields = {
        **describe_origin("build", step.origin, findings),
        "plan": step.plan.model_dump(mode="json"),
        "scale": step.scale,
        "checked": step.checked,
        "half_on_cpu": step.half_on_cpu,
        "cuda_lists": step.cuda_lists,
        "training": step.state.training,
        "autocast": step.autocast.as_json(),
        "random": random_state,
        "optimizer": optimizer,
        "batches": batches,
    }
    parts = {STATE: {**tensors, **random_tensors, **states}}
    return write_files(folder, fields, {**parts, DATA: data} if with_data else parts)


def _pack_optimizer(optimizer: torch.optim.Optimizer | None) -> tuple[Any, dict[str, Tensor]]:
    if optimizer is None:
        return None, {}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = cast("dict[Tensor, dict[str, Any]]", optimizer.state)
    tree = {
        "class": type(optimizer).__name__,
        "state": [dict(state[p]) if p in state else {} for p in params],
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
    }
    return pack(tree, "optimizer")
