"""Which module first makes inf or NaN out of finite numbers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from floatline.optim.mesh import local_part
from floatline.precision.nested import find_tensors


@dataclass(frozen=True)
class NonfinitePlace:
    """Where the first inf or NaN came from.

    Args:
        origin: "module": it made them of finite numbers. "weights": its weights hold them. "inputs": it was given them,
            by the batch or by code outside of all modules. "loss": all modules were fine, the loss function was not.
        module: Qualified name; '' is the model, or no module.
        kind: Class of the module, or 'the loss function'.
        dtype: Of the output, such as 'float16'.
        largest_input: Largest finite magnitude among the inputs; NaN where there is none.
        num_inf: inf in the output.
        num_nan: NaN in the output.
        is_output: Whether the model returns the module's output: an island there keeps its outputs in FP32.
    """

    origin: Literal["module", "weights", "inputs", "loss"]
    module: str
    kind: str
    dtype: str
    largest_input: float
    num_inf: int
    num_nan: int
    is_output: bool = False

    def __str__(self) -> str:
        """One line for people."""
        where = f"{self.module} ({self.kind}, {self.dtype})" if self.module else f"{self.kind} ({self.dtype})"
        why = {"weights": ", of weights that are not finite", "inputs": ", given to it"}.get(self.origin, "")
        size = "" if math.isnan(self.largest_input) else f"; inputs up to {self.largest_input:.3g}"
        return f"{where}: {self.num_inf:,} inf and {self.num_nan:,} NaN{why}{size}"


def first_nonfinite(model: nn.Module, run: Callable[[], Tensor]) -> NonfinitePlace | None:
    """Run one forward pass and say where inf or NaN begins; None where the loss and all modules are finite.

    The deepest module is named whose output is not finite while its inputs and weights are. Additive masks hold -inf on
    purpose: inputs that hold no other, and no number above 0, count as finite; and a module whose output holds no
    other is named only if something behind it fails. The host waits for every module: for one step, not for each.

    Args:
        model: The model. Its hooks are removed afterwards, whatever happens. Compiled code runs uncompiled.
        run: Makes one forward pass through the model and returns the loss. It is called once; restoring random
            states and buffers is up to the caller.
    """
    watch = _NonfiniteWatch(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code does not see new hooks
        modules: list[tuple[str, nn.Module]] = list(model.named_modules())  # pyright: ignore[reportUnknownArgumentType]
        for name, module in modules:
            stack.callback(module.register_forward_pre_hook(watch.begin, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(partial(watch.end, name), with_kwargs=True).remove)
        loss = run()
    return watch.judge(loss)


@dataclass(frozen=True)
class _Made:
    place: NonfinitePlace
    outputs: list[Tensor]

    def feeds(self, tensors: list[Tensor]) -> bool:
        own = {output.untyped_storage().data_ptr() for output in self.outputs}
        return any(tensor.untyped_storage().data_ptr() in own for tensor in tensors)


class _NonfiniteWatch:
    """Looks at every call of a module, from its beginning to its end."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.open: list[tuple[bool, float, list[Tensor]]] = []
        self.found: _Made | None = None
        self.suspects: list[_Made] = []  # -inf only: a mask, or the log of a zero
        self.given: _Made | None = None
        self.returned: list[Tensor] = []

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        # Now and not at the end: a module may write into its inputs.
        inputs = _floats(args, kwargs)
        fine = all(_is_finite(tensor) or _is_mask(tensor) or self.suspect(tensor) for tensor in inputs)
        self.open.append((fine, _largest(inputs), inputs))

    def end(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        del args, kwargs
        fine, largest, inputs = self.open.pop()
        outputs = _floats(output)
        if module is self.model:
            self.returned = outputs
        bad = [tensor for tensor in outputs if not _is_finite(tensor)]
        if self.found is not None or not bad:
            return
        origin: Literal["module", "weights", "inputs"] = "module" if fine else "inputs"
        if fine and not all(_is_finite(local_part(tensor)) for tensor in (*module.parameters(), *module.buffers())):
            origin = "weights"
        made = _Made(_describe(origin, name, type(module).__name__, bad, largest), outputs)
        if not fine:
            self.given = self.given or made
            return
        source = next(filter(None, map(self.suspect, inputs)), None)
        if all(_is_only_minus_inf(tensor) for tensor in bad):
            self.suspects.append(source or made)
        else:
            self.found = source or made

    def suspect(self, tensor: Tensor) -> _Made | None:
        """The module that made a tensor with -inf in it, and nothing else that is not finite."""
        if _is_finite(tensor) or not _is_only_minus_inf(tensor):
            return None
        return next((made for made in self.suspects if made.feeds([tensor])), None)

    def judge(self, loss: Tensor) -> NonfinitePlace | None:
        fails = not _is_finite(loss.detach())
        made = self.found or (next(iter(self.suspects), None) if fails else None) or self.given
        if made is not None:
            return replace(made.place, is_output=made.feeds(self.returned))
        return _describe("loss", "", "the loss function", [loss], math.nan) if fails else None


def _describe(
    origin: Literal["module", "weights", "inputs", "loss"], name: str, kind: str, bad: list[Tensor], largest: float
) -> NonfinitePlace:
    return NonfinitePlace(
        origin=origin,
        module=name,
        kind=kind,
        dtype=str(bad[0].dtype).removeprefix("torch."),
        largest_input=largest,
        num_inf=sum(int(tensor.isinf().sum()) for tensor in bad),
        num_nan=sum(int(tensor.isnan().sum()) for tensor in bad),
    )


def _floats(*trees: Any) -> list[Tensor]:
    return [tensor.detach() for tensor in find_tensors(*trees) if tensor.is_floating_point() and tensor.numel()]


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _is_only_minus_inf(tensor: Tensor) -> bool:
    """Whether -inf is all that is not finite."""
    return bool((tensor.isfinite() | tensor.isneginf()).all())


def _is_mask(tensor: Tensor) -> bool:
    """Whether nothing is above 0 or NaN: 0 and -inf, or slopes that fall to -inf."""
    return bool((tensor <= 0).all())


def _largest(tensors: list[Tensor]) -> float:
    """The largest finite magnitude; NaN where no tensor holds a finite number."""
    finite = [tensor.abs()[tensor.isfinite()] for tensor in tensors]
    return max((float(some.max()) for some in finite if some.numel()), default=math.nan)
