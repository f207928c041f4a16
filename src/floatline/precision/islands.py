"""FP32 islands in a 16-bit run: weights of the plan's dtype, and modules that compute in FP32."""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from floatline.errors import GuardError, PlanError, suggest
from floatline.plans import Plan
from floatline.plans.matching import name_modules
from floatline.precision.dtypes import DTYPES, find_overflow
from floatline.precision.fp32_call import NARROW, call_in_fp32
from floatline.precision.nonfinite import NonfinitePlace, first_nonfinite

__all__ = ["Islands", "NonfinitePlace", "Outputs", "cast_weights", "first_nonfinite"]

_CAST = (torch.float64, *DTYPES.values())  # FP8 and the like are formats of their own

Outputs = Literal["as-inputs", "fp32"]


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


class _Forward:
    """Stands in for one module's forward. An object and not a closure, so that a copied module gets its own."""

    def __init__(self, module: nn.Module, *, keep: bool, default: torch.dtype | None) -> None:
        self.module = module
        self.replaced = vars(module).get("forward")  # another library's, on the instance
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


@torch.compiler.disable
def _run(forward: _Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return forward.run(args, kwargs)
