"""OutsideScale: the loss scale of a script that knows nothing of it, around each of its backward passes."""

# torch shows what its engine does now, and its functions on lists, under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from floatline.errors import PlanError
from floatline.guard.step.unscaling import unscale
from floatline.numerics import foreach
from floatline.optim.mesh import agree_on_overflow, local_part
from floatline.plans.plan import Clip, Scaling
from floatline.probe.watch.patches import Patches

_Call = Callable[..., Any]
# A loss of FP16 cannot be multiplied by more.
_MOST_IN_FP16 = 2.0**15
# Backward passes whose graphs are looked through for tensors that get gradients.
_LOOKS = 3


class OutsideScale:
    """Multiplies what a backward pass begins with, divides the gradients right after it, and leaves out steps.

    The script sees gradients that were never scaled: it may clip, log, accumulate and penalize them as in FP32, in any
    order. Its own scalers do nothing. An optimizer's step with a gradient that is not finite, on any process, is left
    out: the optimizer finds no gradients, and its weights and states stay as they are.

    Numerics:
        The scale is a power of two where its settings are, so that FP32 gradients have the bits of GradScaler's after
        unscaling. Gradients that are there already are multiplied before and divided after: exact below 2^127 / scale.
        Checked by tests/running/test_outside_scale.py.

    Args:
        scaling: Its settings; None neither scales nor leaves out steps.
        clip: Gradients are clipped so before each step; None leaves them alone.
        on_step: Told of each optimizer's step, before it is made, and whether it will be.
    """

    def __init__(self, scaling: Scaling | None, clip: Clip | None, on_step: Callable[[Optimizer, bool], None]) -> None:
        self._scaling, self._clip, self._on_step = scaling, clip, on_step
        self.scale = 1.0 if scaling is None else scaling.init_scale
        self._good = self._overflows = 0
        self._walks, self._late, self._passes = True, False, 0
        self._leaves: dict[int, weakref.ref[Tensor]] = {}
        self._hidden: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._busy = self._running = False
        self.num_steps = self.num_skipped = 0

    def patch(self, patches: Patches) -> Callable[[], None]:
        """Put it into force; gives what ends it, beside undoing the patches."""
        if self._scaling is not None:
            patches.wrap(torch.autograd, "backward", self._going_back)
            patches.wrap(torch.autograd, "grad", self._taking_gradients)
            patches.wrap(torch.amp.GradScaler, "state_dict", self._saving)
            patches.wrap(torch.amp.GradScaler, "load_state_dict", self._loading)
        patches.wrap(Optimizer, "add_param_group", self._adding)
        # A scaler that is off: its scale is 1, it unscales and skips nothing, and calls the optimizer's step.
        patches.set(torch.amp.GradScaler, "_enabled", property(lambda _: False, lambda _self, _value: None))
        hooks = (
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self._end_step),
        )

        def end() -> None:
            for hook in hooks:
                hook.remove()

        return end

    def _saving(self, _original: _Call) -> _Call:
        def state_dict(_scaler: Any) -> dict[str, Any]:
            return {"scale": self.scale, "good_steps": self._good}

        return state_dict

    def _loading(self, _original: _Call) -> _Call:
        def load_state_dict(_scaler: Any, state: dict[str, Any]) -> None:
            if self._scaling is not None and "scale" in state:
                self.scale = min(max(float(state["scale"]), self._scaling.floor), self._scaling.cap)
                self._good = int(state.get("good_steps", 0))

        return load_state_dict

    def _adding(self, original: _Call) -> _Call:
        def add_param_group(optimizer: Optimizer, group: dict[str, Any]) -> None:
            original(optimizer, group)
            self._know(optimizer.param_groups[-1]["params"])

        return add_param_group

    def _know(self, tensors: Iterable[Tensor]) -> bool:
        """Take tensors in whose gradients are divided; whether any was new."""
        new = [t for t in tensors if (known := self._leaves.get(id(t))) is None or known() is not t]
        self._leaves.update({id(t): weakref.ref(t) for t in new})
        return bool(new)

    def _going_back(self, original: _Call) -> _Call:
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            roots = _as_list(tensors)
            if self._is_inside() or not roots:  # a checkpoint runs its part again, and is in a scaled pass already
                return original(tensors, grad_tensors, *args, **kwargs)
            scale, given = self._scale_of(roots), _as_list(grad_tensors) or [None] * len(roots)
            leaves = self._find_leaves(roots)
            _multiply([leaf for leaf in leaves if leaf.grad is not None], scale)
            start = [_scaled(r, g, scale) for r, g in zip(roots, given, strict=True)]
            try:
                self._run_once(original, roots, start, *args, **kwargs)
            finally:
                _multiply(leaves, 1 / scale)
            return None

        return backward

    def _taking_gradients(self, original: _Call) -> _Call:
        def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
            roots = _as_list(outputs)
            if self._is_inside() or not roots or kwargs.get("is_grads_batched") or len(args) > 4:
                return original(outputs, inputs, grad_outputs, *args, **kwargs)
            scale, given = self._scale_of(roots), _as_list(grad_outputs) or [None] * len(roots)
            start = [_scaled(r, g, scale) for r, g in zip(roots, given, strict=True)]
            found = self._run_once(original, roots, inputs, start, *args, **kwargs)
            return tuple(None if one is None else one * (1 / scale) for one in found)

        return grad

    def _is_inside(self) -> bool:
        return self._running or torch._C._current_graph_task_id() != -1

    def _run_once(self, function: _Call, *args: Any, **kwargs: Any) -> Any:
        """Where a mode of torch functions is on, torch calls its function again by its name."""
        self._running = True
        try:
            return function(*args, **kwargs)
        finally:
            self._running = False

    def _scale_of(self, roots: Sequence[Tensor]) -> float:
        return min(self.scale, _MOST_IN_FP16) if any(r.dtype == torch.float16 for r in roots) else self.scale

    def _find_leaves(self, roots: Sequence[Tensor]) -> list[Tensor]:
        """Tensors that get gradients in this pass: those that are known, and any others where there are some."""
        if self._walks:
            new = self._know(_walk(roots))
            self._passes += 1
            # New ones in a later pass, such as inputs that are attacked: every pass is looked through.
            self._late = self._late or (new and self._passes > 1)
            self._walks = self._late or self._passes < _LOOKS
        alive = {key: leaf for key, ref in self._leaves.items() if (leaf := ref()) is not None}
        if len(alive) < len(self._leaves):
            self._leaves = {key: self._leaves[key] for key in alive}
        return [*alive.values()]

    def _begin_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # One that is given a closure computes its gradients itself; one inside another's step is a part of it.
        if self._busy or any(callable(argument) for argument in (*args, *kwargs.values())):
            return
        bad = self._scaling is not None and _overflows(optimizer)
        self._move(bad=bad)
        self.num_steps += 1
        self._busy = True
        try:
            self._on_step(optimizer, not bad)
        finally:
            self._busy = False
        if bad:
            self.num_skipped += 1
            self.hide(optimizer)
        elif self._clip is not None:
            _clip_gradients(optimizer, self._clip)

    def _end_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._busy:
            return
        for param, grad in self._hidden.pop(id(optimizer), ()):
            param.grad = grad

    def hide(self, optimizer: Optimizer) -> None:
        """Let an optimizer find no gradients, until its step is over."""
        held = [(p, p.grad) for p in _params(optimizer) if p.grad is not None]
        self._hidden[id(optimizer)] = held
        for param, _ in held:
            param.grad = None

    def _move(self, *, bad: bool) -> None:
        scaling = self._scaling
        if scaling is None:
            return
        self._good, self._overflows = (0, self._overflows + 1) if bad else (self._good + 1, 0)
        if bad and self._overflows >= scaling.hysteresis:
            self.scale = max(self.scale * scaling.backoff_factor, scaling.floor)
        elif self._good >= scaling.growth_interval:
            self.scale, self._good = min(self.scale * scaling.growth_factor, scaling.cap), 0


def _as_list(tensors: Any) -> list[Any]:
    if tensors is None:
        return []
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _scaled(root: Tensor, gradient: Tensor | None, scale: float) -> Tensor | None:
    """What a pass begins with; None where torch shall complain."""
    if gradient is not None:
        return gradient * scale
    return torch.full_like(root, scale) if root.numel() == 1 and root.requires_grad else None


@torch.no_grad()
def _multiply(leaves: Sequence[Tensor], factor: float) -> None:
    dense: list[Tensor] = []
    for leaf in leaves:
        grad = leaf.grad
        if grad is None:
            continue
        if grad.dtype == torch.float16 and factor < 1:
            leaf.grad = None
            _let_widen(leaf)
            leaf.grad = grad.float() * factor
        elif grad.requires_grad or grad.is_sparse:
            with torch.enable_grad():
                leaf.grad = grad * factor
        else:
            dense.append(local_part(grad))
    if dense:
        foreach.mul_(dense, factor)


def _let_widen(leaf: Tensor) -> None:
    """Allow an FP16 tensor a gradient of FP32: unscaled, small ones would be 0 in FP16."""
    if not hasattr(Tensor, "grad_dtype"):
        raise PlanError("This torch has no FP32 gradients for FP16 weights. Keep the weights in FP32, or use bf16.")
    cast("Any", leaf).grad_dtype = None


def _walk(roots: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors that a backward pass writes gradients into."""
    seen: set[Any] = set()
    left = [root.grad_fn for root in roots if root.grad_fn is not None]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            yield variable
        left += [following for following, _ in node.next_functions if following is not None]


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _overflows(optimizer: Optimizer) -> bool:
    """Whether a gradient is not finite, here or on another process; waits for the device."""
    device = next(iter(_params(optimizer))).device
    one = torch.ones((), dtype=torch.float32, device=device)
    found = unscale(optimizer, inverse=one, zero=torch.zeros_like(one), keep=True)
    found = agree_on_overflow(found, home=device, group=None)
    return any(bool(flag.item()) for flag in found.values())


def _clip_gradients(optimizer: Optimizer, clip: Clip) -> None:
    held = [param for param in _params(optimizer) if param.grad is not None]
    if clip.max_norm is not None:
        torch.nn.utils.clip_grad_norm_(held, clip.max_norm, norm_type=clip.norm_type)
    elif clip.max_value is not None:
        torch.nn.utils.clip_grad_value_(held, clip.max_value)
