"""ScaledPasses: backward passes that begin with a scale, and gradients that the script sees without it."""

# torch shows what its engine does now under a private name only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from floatline.errors import PlanError
from floatline.numerics import foreach
from floatline.optim.mesh import local_part
from floatline.probe.watch.patches import Patches

_Call = Callable[..., Any]
# A loss of FP16 cannot be multiplied by more.
_MOST_IN_FP16 = 2.0**15
_CAN_WIDEN = hasattr(Tensor, "grad_dtype")


@dataclass
class _Pass:
    """A backward pass that runs now: its scale, and the tensors whose gradients are multiples of it."""

    scale: float
    leaves: dict[int, Tensor]


class ScaledPasses:
    """Multiplies what a backward pass begins with, and divides the gradients right after it.

    Hooks of tensors and modules that the script registers are given gradients without the scale, as well, and what
    they return is multiplied; those of nodes of the graph see the scale. Passes that begin at a `GradientEdge`, batched
    ones and those of `torch.func` are not scaled.

    Numerics:
        Where the scale is a power of two, FP32 gradients have the bits of GradScaler's after unscaling. Gradients that
        are there already are multiplied before and divided after: exact below 2^127 / scale. FP16 gradients of
        tensors become FP32 ones; those that `torch.autograd.grad` returns keep their format, as what is returned may
        be computed with. Checked by tests/running/test_scaled_passes.py.

    Args:
        scale: Gives the scale of the next pass.
    """

    def __init__(self, scale: Callable[[], float]) -> None:
        self._scale = scale
        self._known: dict[int, weakref.ref[Tensor]] = {}
        self._pass: _Pass | None = None

    def patch(self, patches: Patches) -> None:
        """Put it into force."""
        patches.wrap(torch.autograd, "backward", self._going_back)
        patches.wrap(torch.autograd, "grad", self._taking_gradients)
        patches.wrap(Tensor, "retain_grad", self._retaining)
        patches.wrap(Tensor, "register_hook", self._hooking(_TensorHook))
        patches.wrap(Tensor, "register_post_accumulate_grad_hook", self._hooking(_GradHook))
        patches.wrap(nn.Module, "register_full_backward_hook", self._hooking(_ModuleHook))
        patches.wrap(nn.Module, "register_full_backward_pre_hook", self._hooking(_ModuleHook))

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Take tensors in whose gradients are divided, whether a pass shows them or not."""
        new = [t for t in tensors if (known := self._known.get(id(t))) is None or known() is not t]
        self._known.update({id(t): weakref.ref(t) for t in new})

    @property
    def running(self) -> float | None:
        """The scale of the pass that runs now; None where none does."""
        return None if self._pass is None else self._pass.scale

    def _going_back(self, original: _Call) -> _Call:
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            roots = _as_list(tensors)
            given = _as_list(grad_tensors) or [None] * len(roots)
            if self._is_inside() or not _fit(roots, given):
                self._join(roots)  # a checkpoint runs its part again, and is in a scaled pass already
                return original(tensors, grad_tensors, *args, **kwargs)
            scale, inputs = self._scale_of(roots), _as_list(kwargs.get("inputs"))
            leaves = {**self._alive(), **{id(t): t for t in (*_walk(roots), *inputs) if isinstance(t, Tensor)}}
            start = [_scaled(r, g, scale) for r, g in zip(roots, given, strict=True)]
            _multiply(leaves.values(), scale)
            self._run(_Pass(scale, leaves), original, roots, start, *args, **kwargs)
            return None

        return backward

    def _taking_gradients(self, original: _Call) -> _Call:
        def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
            roots = _as_list(outputs)
            given = _as_list(grad_outputs) or [None] * len(roots)
            batched = bool(kwargs.get("is_grads_batched")) or len(args) > 4
            if self._is_inside() or batched or not _fit(roots, given):
                return original(outputs, inputs, grad_outputs, *args, **kwargs)
            scale = self._scale_of(roots)
            start = [_scaled(r, g, scale) for r, g in zip(roots, given, strict=True)]
            found = self._run(_Pass(scale, {}), original, roots, inputs, start, *args, **kwargs)
            return tuple(None if one is None else one * (1 / scale) for one in found)

        return grad

    def _retaining(self, original: _Call) -> _Call:
        def retain_grad(tensor: Tensor) -> None:
            original(tensor)
            self.know([tensor])

        return retain_grad

    def _hooking(self, kind: Callable[[Any, Callable[[], float | None]], Any]) -> Callable[[_Call], _Call]:
        def wrap(original: _Call) -> _Call:
            def register(owner: Any, hook: Any, *args: Any, **kwargs: Any) -> Any:
                # torch's own hooks, such as those of FSDP, want what the engine gives; and where a mode of torch
                # functions is on, torch calls this again.
                caller: str = sys._getframe(1).f_globals.get("__name__", "")
                if isinstance(hook, _Hook) or caller.partition(".")[0] == "torch":
                    return original(owner, hook, *args, **kwargs)
                return original(owner, kind(hook, lambda: self.running), *args, **kwargs)

            return register

        return wrap

    def _is_inside(self) -> bool:
        return self._pass is not None or torch._C._current_graph_task_id() != -1

    def _join(self, roots: Sequence[Any]) -> None:
        """A pass inside of another one: what it reaches has gradients with that one's scale, too."""
        if self._pass is None:
            return
        new = {id(leaf): leaf for leaf in _walk(roots) if id(leaf) not in self._pass.leaves}
        _multiply(new.values(), self._pass.scale)
        self._pass.leaves.update(new)

    def _run(self, one: _Pass, function: _Call, *args: Any, **kwargs: Any) -> Any:
        """Where a mode of torch functions is on, torch calls its function again by its name: that is the same pass."""
        self._pass = one
        try:
            return function(*args, **kwargs)
        finally:
            self._pass = None
            _multiply(one.leaves.values(), 1 / one.scale)

    def _scale_of(self, roots: Sequence[Tensor]) -> float:
        scale = self._scale()
        return min(scale, _MOST_IN_FP16) if any(r.dtype == torch.float16 for r in roots) else scale

    def _alive(self) -> dict[int, Tensor]:
        alive = {key: leaf for key, ref in self._known.items() if (leaf := ref()) is not None}
        if len(alive) < len(self._known):
            self._known = {key: self._known[key] for key in alive}
        return alive


class _Hook:
    """A hook of the script, called without the scale of the pass that runs."""

    def __init__(self, hook: _Call, scale: Callable[[], float | None]) -> None:
        self._hook, self._scale = hook, scale


class _TensorHook(_Hook):
    """Of a tensor: it is given the gradient, and may give another one."""

    def __call__(self, grad: Tensor) -> Tensor | None:
        scale = self._scale()
        if scale is None:
            return self._hook(grad)
        shown = _divide(grad, scale)
        version = shown._version
        found = self._hook(shown)
        if found is None and shown._version != version:  # changed in place
            found = shown
        return None if found is None else (found * scale).to(grad.dtype)


class _GradHook(_Hook):
    """Of a tensor whose gradient has been added up: it looks at `.grad`, and may make a step."""

    def __call__(self, tensor: Tensor) -> None:
        scale = self._scale()
        if scale is None:
            self._hook(tensor)
            return
        _multiply([tensor], 1 / scale)
        self._hook(tensor)
        _multiply([tensor], scale)


class _ModuleHook(_Hook):
    """Of a module: it is given the module and tuples of gradients, and may give another tuple."""

    def __call__(self, module: nn.Module, *grads: Any) -> Any:
        scale = self._scale()
        if scale is None:
            return self._hook(module, *grads)
        shown = [tuple(g if g is None else _divide(g, scale) for g in group) for group in grads]
        found = self._hook(module, *shown)
        if found is None:
            return None
        pairs = zip(_as_list(found), grads[0], strict=False)
        return tuple(new if new is None or old is None else (new * scale).to(old.dtype) for new, old in pairs)


def _divide(grad: Tensor, scale: float) -> Tensor:
    """Small FP16 gradients would be 0 in FP16."""
    return (grad.float() if grad.dtype == torch.float16 else grad) * (1 / scale)


def _as_list(tensors: Any) -> list[Any]:
    if tensors is None:
        return []
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _fit(roots: list[Any], given: list[Any]) -> bool:
    """Whether a pass can begin with them; where it cannot, torch says why."""
    return bool(roots) and len(roots) == len(given) and all(isinstance(root, Tensor) for root in roots)


def _scaled(root: Tensor, gradient: Tensor | None, scale: float) -> Tensor | None:
    """What a pass begins with; None where torch shall complain."""
    if gradient is not None:
        return gradient * scale
    return torch.full_like(root, scale) if root.numel() == 1 and root.requires_grad else None


@torch.no_grad()
def _multiply(leaves: Iterable[Tensor], factor: float) -> None:
    dense: list[Tensor] = []
    for leaf in leaves:
        grad = leaf.grad if leaf.is_leaf or leaf.retains_grad else None
        if grad is None:
            continue
        if grad.dtype == torch.float16:
            leaf.grad = None
            _let_widen(leaf)
            leaf.grad = grad.float() * factor
        elif grad.requires_grad or grad.is_sparse or not leaf.is_leaf:
            with torch.enable_grad():
                leaf.grad = grad * factor
        else:
            dense.append(local_part(grad))
    if dense:
        foreach.mul_(dense, factor)


def _let_widen(leaf: Tensor) -> None:
    """Allow an FP16 tensor a gradient of FP32: unscaled, small ones would be 0 in FP16."""
    if not _CAN_WIDEN:
        raise PlanError("This torch has no FP32 gradients for FP16 weights. Keep the weights in FP32, or use bf16.")
    cast("Any", leaf).grad_dtype = None


def _walk(roots: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors that a backward pass writes gradients into."""
    seen: set[Any] = set()
    left: list[Any] = []
    for root in roots:
        if isinstance(root, Tensor):
            if root.grad_fn is not None:
                left.append(root.grad_fn)
            elif root.requires_grad:
                yield root
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        following = node.next_functions
        if following:
            left += [one for one, _ in following if one is not None]
            continue
        variable = getattr(node, "variable", None)  # only the ends of a graph have one
        if isinstance(variable, Tensor):
            yield variable
