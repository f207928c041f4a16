"""FP32 islands in a 16-bit run: weights of the plan's dtype, and modules and lines of code that compute in FP32."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import copy
import difflib
import math
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from floatline.base.patched_sources import read_source
from floatline.errors import GuardError, PlanError, suggest
from floatline.numerics.uncompiled import uncompiled
from floatline.plans import Plan
from floatline.plans.plan import name_modules
from floatline.precision.dtypes import DTYPES, NARROW, find_overflow
from floatline.precision.fp32_call import call_in_fp32
from floatline.precision.nonfinite import NonfinitePlace, first_nonfinite
from floatline.precision.user_frames import find_caller

__all__ = ["Islands", "NonfinitePlace", "Outputs", "cast_weights", "first_nonfinite"]

_CAST = (torch.float64, *DTYPES.values())  # FP8 and the like are formats of their own

_NARROWING = frozenset(["half", "bfloat16"])  # methods that cast to 16 bits

_NARROW_EPS = frozenset(torch.finfo(dtype).eps for dtype in NARROW)

Outputs = Literal["as-inputs", "fp32"]
Line = tuple[str, int]


def cast_weights(model: nn.Module, plan: Plan) -> None:
    """Give the weights the plan's dtype, in place; call it before the optimizer is made.

    The plan's `fp32_modules`, and all modules under them, get FP32 weights. Under a mixed plan, frozen parameters and
    buffers stay as they were loaded.

    Numerics:
        Rounded to nearest. Norms with running statistics (batch norm) stay in FP32 altogether: a running mean moves
        by a tenth of its distance, and 16 bits round small moves to nothing, while a variance above 65,504 is inf in
        FP16; and torch's kernels take FP32 statistics only with FP32 weights. They accept 16-bit inputs and return
        16 bits. A weight shared with a module outside (tied embeddings) follows that module; an `Islands` widens it.
        Checked by tests/precision/test_islands.py.

    Args:
        model: The model.
        plan: Its weights and fp32_modules.

    Raises:
        PlanError: A pattern matches no module, or FP16 cannot hold a weight. Nothing was changed.
    """
    dtype = DTYPES[plan.weights]
    kept = _with_children(model, plan.check_modules(model))
    kept |= {module for module in model.modules() if isinstance(module, _NormBase) and module.running_mean is not None}
    targets: dict[Tensor, torch.dtype] = {}
    for module in sorted(model.modules(), key=lambda module: module not in kept):  # what is outside comes last and wins
        target = torch.float32 if module in kept else dtype
        own = [p for p in module.parameters(recurse=False) if p.requires_grad or not plan.mixed]
        own += [] if plan.mixed else list(module.buffers(recurse=False))
        targets.update({tensor: target for tensor in own if tensor.dtype in _CAST})
    if dtype == torch.float16:
        _refuse_overflow(model, {tensor for tensor, target in targets.items() if target == dtype})
    for tensor, target in targets.items():
        if tensor.dtype != target:
            tensor.grad = None  # of the old dtype
            tensor.data = tensor.data.to(target)


def _refuse_overflow(model: nn.Module, narrowed: set[Tensor]) -> None:
    names = {name for name, parameter in model.named_parameters() if parameter in narrowed}
    counts = {name: count for name, count in find_overflow(model, "fp16").items() if name in names}
    if not counts:
        return
    name, count = next(iter(counts.items()))
    raise PlanError(
        f"{count} weights of '{name}' are beyond fp16's 65504. "
        f"Keep '{name.rpartition('.')[0]}' in fp32_modules, or use bf16."
    )


def _with_children(model: nn.Module, names: Iterable[str]) -> set[nn.Module]:
    return {child for name in names for child in model.get_submodule(name).modules()}


class Islands:
    """Modules that compute in FP32 inside a 16-bit run, with everything under them.

    Inputs of 16 bits are widened, autocast is off, 16-bit weights are used as FP32 copies that gradients flow through,
    so that an island can be made while an optimizer holds the weights. Under autocast the outputs stay FP32, and the
    operations behind widen or narrow as they need. Without autocast (16-bit weights) the outputs return to the dtype
    of the inputs, because the modules behind expect it.

    It replaces the modules' `forward`, so exceptions, gradient checkpointing, nested islands, modules called twice,
    DDP, FSDP2 and `copy.deepcopy` need no care. torch.compile breaks its graph at an island, and compiles again after
    `add` and `remove`.

    Numerics:
        The same bits as the module in FP32 with the same (rounded) weights and inputs. Gradients of 16-bit weights
        and inputs are rounded once. Checked by tests/precision/test_islands.py.

    Args:
        model: The model, wrapped or not.
        names: Qualified names of modules, as `plan.check_modules` gives them.
        select: Tells of each module, by name and module, whether it is one more island.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Iterable[str] = (),
        *,
        select: Callable[[str, nn.Module], bool] | None = None,
    ) -> None:
        self._model = model
        self._outputs: dict[str, Outputs] = {}
        self._wrapped: list[_Forward] = []
        chosen = () if select is None else (n for n, module in name_modules(model).items() if select(n, module))
        for name in (*names, *chosen):
            self._outputs[self._check(name)] = _usual_outputs(name)
        self._build()

    @property
    def names(self) -> tuple[str, ...]:
        """The modules that were named, in that order."""
        return tuple(self._outputs)

    @property
    def outputs(self) -> dict[str, Outputs]:
        """What becomes of the outputs of each."""
        return dict(self._outputs)

    def add(self, name: str, *, outputs: Outputs | None = None) -> None:
        """Make one more module an island.

        Args:
            name: Its qualified name; '' is the model.
            outputs: "fp32" leaves the outputs in FP32: for the module that feeds the loss, because FP16 ends at
                65,504. "as-inputs" returns them to the dtype of the inputs, outside autocast. None: "fp32" for the
                whole model, else "as-inputs".
        """
        self._outputs[self._check(name)] = outputs or _usual_outputs(name)
        self._build()

    def remove(self) -> None:
        """Put every module back as it was."""
        self._outputs = {}
        self._build()

    def _check(self, name: str) -> str:
        modules: dict[str, nn.Module] = dict(self._model.named_modules())  # pyright: ignore[reportUnknownArgumentType]
        if name not in modules:
            near = difflib.get_close_matches(name, modules, n=3, cutoff=0.5) or [n for n in modules if n][:8]
            raise GuardError(f"The model has no module '{name}' to keep in FP32. {suggest(name, near)}")
        return name

    def _build(self) -> None:
        if not self._wrapped and not self._outputs:
            return
        for forward in self._wrapped:
            forward.undo()
        self._wrapped = []
        narrow = next((p.dtype for p in self._model.parameters() if p.dtype in NARROW), None)
        done: set[nn.Module] = set()
        # Outer islands first: what lies in one is no border, and its outputs stay FP32.
        for name in sorted(self._outputs, key=lambda name: name.count(".") + bool(name)):
            for module in self._model.get_submodule(name).modules():
                if module in done:
                    continue
                back = narrow if module is self._model.get_submodule(name) else None
                self._wrapped.append(_Forward(module, keep=self._outputs[name] == "fp32", default=back))
                done.add(module)
        # torch 2.13 notices that a forward was replaced; whether every version does is not known.
        torch.compiler.reset()


def _usual_outputs(name: str) -> Outputs:
    return "as-inputs" if name else "fp32"


class StandIn:
    """Stands in for one module's forward. An object and not a closure, so that a copied module gets its own.

    Attributes:
        module: Whose forward.
        replaced: Another library's, on the instance; None where there was none.
    """

    module: nn.Module
    replaced: Any

    def __reduce__(self) -> Any:
        if self.replaced is not None:
            return super().__reduce__()
        return getattr, (self.module, "forward")  # a file holds the user's own, and is read without floatline

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIn:
        copied = memo[id(self)] = object.__new__(type(self))
        vars(copied).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return copied


class _Forward(StandIn):
    """Computes it in FP32."""

    def __init__(self, module: nn.Module, *, keep: bool, default: torch.dtype | None) -> None:
        self.module = module
        self.replaced = vars(module).get("forward")
        self.keep = keep
        self.default = default
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _run(self, args, kwargs)  # pyright: ignore[reportCallIssue, reportUnknownVariableType]

    def undo(self) -> None:
        if self.replaced is not None:
            self.module.forward = self.replaced
        else:
            vars(self.module).pop("forward", None)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        original: Callable[..., Any] = self.replaced or type(self.module).forward.__get__(self.module)
        return call_in_fp32(original, args, kwargs, module=self.module, keep=self.keep, default=self.default)


@uncompiled
def _run(forward: _Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return forward.run(args, kwargs)


class LineIslands(TorchFunctionMode):
    """What torch computes on some lines of code is computed in FP32, forward and backward.

    It does what a user would write there: operands of 16 bits are widened, autocast is off, casts to 16 bits and
    tensors made in them are FP32, and so is the eps that `torch.finfo(x.dtype)` gave. The results stay FP32 until
    autocast or a product with 16-bit weights narrows them. An operation in place works in the dtype that its tensor
    has: name the line that makes the tensor, too, or let what is written be widened.

    Numerics:
        The same bits as the line with `.float()` at each operand. Gradients of 16-bit operands are rounded once.
        Checked by tests/probe/runs/test_changes.py.

    Args:
        lines: File and line of each, as a trace names them; or anything that knows which ones they are.
        fitting: Lines whose constants are brought to the nearest number that the format of the first operand holds;
            nothing is widened there.
        widens: Whether a tensor that is written in place there becomes FP32 for good; views of it stay as they are.
    """

    def __init__(
        self, lines: Collection[Line] | Container[Line], *, fitting: Collection[Line] = (), widens: bool = False
    ) -> None:
        super().__init__()
        self._widens = widens
        self._lines = lines if not isinstance(lines, Collection) else frozenset(cast("Collection[Line]", lines))
        self._fitting = frozenset(fitting)

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[Any], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one function; torch calls this."""
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return func(*args, **kwargs)
        spot = find_caller()
        line = (spot.file, spot.line)
        if line in self._fitting:
            return func(*_fit(args, args), **_fit(kwargs, args))
        if line not in self._lines or (_writes(name, kwargs) and not self._widens):
            return _run_behind(func, args, kwargs)
        if _writes(name, kwargs):
            _widen_written(name, args, kwargs)
        if name in _NARROWING:
            return args[0].float()
        busy = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        with contextlib.ExitStack() as stack:
            for device in busy:
                stack.enter_context(torch.autocast(device, enabled=False))
            widen = partial(_widen, file=spot.file)
            wide_args = cast("tuple[Any, ...]", tree_map(widen, tuple(args)))
            return func(*wide_args, **cast("dict[str, Any]", tree_map(widen, kwargs)))


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__setitem__", "__iadd__", "__imul__", "__isub__", "__itruediv__") or "out" in kwargs


def _widen_written(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """What is about to be written becomes FP32: an element of it, as `table[i] = x` writes, its whole tensor."""
    written = kwargs.get("out", args[0] if args else None)
    for tensor in _floats(written):
        is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        if tensor.dtype in NARROW and (name == "__setitem__" or is_whole):
            tensor.data = tensor.data.float()


def _run_behind(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A function on another line: where it takes one dtype only, wide results are narrowed to its other operands'."""
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        narrow = {t.dtype for t in _floats((args, kwargs)) if t.dtype in NARROW}
        if len(narrow) != 1 or not any(t.dtype is torch.float32 for t in _floats((args, kwargs))):
            raise
        dtype = narrow.pop()

        def shrink(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and value.dtype is torch.float32 else value

        return func(*tree_map(shrink, tuple(args)), **tree_map(shrink, kwargs))


def _floats(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _widen(value: Any, *, file: str) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in NARROW else value
    if isinstance(value, float) and value in _NARROW_EPS and _reads_limits(file):
        return torch.finfo(torch.float32).eps
    return torch.float32 if isinstance(value, torch.dtype) and value in NARROW else value


@lru_cache(maxsize=256)
def _reads_limits(file: str) -> bool:
    """Whether a file asks what a dtype holds: in FP32 it is told another eps."""
    with contextlib.suppress(OSError, ValueError):
        return b"finfo(" in read_source(Path(file))
    return False


def _fit(values: Any, operands: Any) -> Any:
    first = next(iter(_floats(operands)), None)
    if first is None:
        return values
    limit = torch.finfo(first.dtype).max

    def fit(value: Any) -> Any:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return max(-limit, min(limit, value))
        return value

    return tree_map(fit, values)
