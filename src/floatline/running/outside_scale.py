"""OutsideScale: the loss scale of a script that knows nothing of it, and its steps, made or left out."""

# torch shows what it knows of a step under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from floatline.guard.step.unscaling import unscale
from floatline.optim.mesh import agree_on_overflow
from floatline.plans.plan import Clip, Scaling
from floatline.probe.steps.other_precision import keep_switch
from floatline.probe.watch.patches import Patches
from floatline.running.closures import tell_after_closures
from floatline.running.scaled_passes import ScaledPasses

_Call = Callable[..., Any]
_HIDDEN: set[int] = set()  # optimizers whose step is being left out: torch prepares a class once in a process


class OutsideScale:
    """Scales a script's backward passes, and leaves out steps whose gradients are not finite.

    The script sees gradients that were never scaled, see `ScaledPasses`: it may clip, log, accumulate and penalize
    them as in FP32, in any order. Its own scalers do nothing; what they save and load is this scale. What the plan does
    not set is as in the first of them that is made and on: where the scale begins, and how it moves.

    An optimizer's step with a gradient that is not finite, on any process, is left out: one that is written outside of
    torch is not called, torch's own find no gradients, and weights and states stay as they are. A step with a closure
    is judged each time when the closure has been called.

    The scale moves as that of torch.amp.GradScaler, which is updated once for all optimizers of an iteration: an
    iteration begins with an optimizer that has stepped in the last one.

    Numerics:
        FP32 gradients and updated weights have the bits of the same loop with torch.amp.GradScaler of equal settings,
        where these are powers of two. Checked by tests/running/test_outside_scale.py.

    Args:
        scaling: Its settings; None neither scales nor leaves out steps. Of a default that was not set explicitly, a
            scaler of the script's own knows better.
        clip: Gradients are clipped so before each step; None leaves them alone.
        on_step: Told of each optimizer's step, before it is made, and whether it will be.

    Attributes:
        scale: Of the next backward pass.
        first_scale: The one that its search began at.
        num_steps: Steps that optimizers were asked for.
        num_skipped: How many of them were left out.
        search: Steps that each optimizer leaves out, as a scaler's search did in a run that is held against this one:
            see `LossLog.search`.
    """

    def __init__(self, scaling: Scaling | None, clip: Clip | None, on_step: Callable[[Optimizer, bool], None]) -> None:
        self._scaling, self._clip, self._on_step = scaling, clip, on_step
        self.scale = self.first_scale = 1.0 if scaling is None else scaling.init_scale
        self._has_heard = False  # of a scaler of the script's own
        self._passes = ScaledPasses(lambda: self.scale)
        self._good = self._overflows = 0
        self._stepped: set[int] = set()
        self._is_bad = False  # an optimizer overflowed in this iteration
        self._hidden: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._busy = False
        self._outer: Optimizer | None = None
        self.num_steps = self.num_skipped = 0
        self.search: list[list[int]] = []
        self._asked: dict[int, int] = {}  # steps so far, by optimizer

    def patch(self, patches: Patches) -> Callable[[], None]:
        """Put it into force; gives what ends it, beside undoing the patches."""
        if self._scaling is not None:
            self._passes.patch(patches)
            patches.wrap(torch.amp.GradScaler, "state_dict", self._saving)
            patches.wrap(torch.amp.GradScaler, "load_state_dict", self._loading)
        patches.wrap(Optimizer, "add_param_group", self._adding)
        patches.set(Optimizer, "profile_hook_step", staticmethod(self._leaving_out(Optimizer.profile_hook_step)))
        # A scaler that is off: its scale is 1, it unscales and skips nothing, and calls the optimizer's step. While it
        # is made it is on, so that it has its settings, which a script may ask for.
        making: list[torch.amp.GradScaler] = []
        switch = property(
            lambda scaler: any(one is scaler for one in making) and scaler.__dict__["_enabled"], keep_switch
        )
        patches.set(torch.amp.GradScaler, "_enabled", switch)
        patches.wrap(torch.amp.GradScaler, "__init__", lambda make: self._making(make, making))
        hooks = (
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self._end_step),
        )

        def end() -> None:
            for hook in hooks:
                hook.remove()
            _HIDDEN.difference_update(self._hidden)  # of a step that raised: nothing would take it back

        return end

    def _making(self, make: _Call, making: list[torch.amp.GradScaler]) -> _Call:
        def init(scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> None:
            making.append(scaler)
            try:
                make(scaler, *args, **kwargs)
                if self._scaling is not None and scaler.is_enabled() and not self._has_heard:
                    self._has_heard = True
                    self._scaling = _fill_in(self._scaling, scaler)
                    self.scale = self.first_scale = self._scaling.init_scale
            finally:
                making.pop()

        return init

    def _saving(self, _original: _Call) -> _Call:
        def state_dict(_scaler: Any) -> dict[str, Any]:
            if self._scaling is None:
                return {}
            return {  # torch's own names: a run without floatline can go on from it
                "scale": self.scale,
                "growth_factor": self._scaling.growth_factor,
                "backoff_factor": self._scaling.backoff_factor,
                "growth_interval": self._scaling.growth_interval,
                "_growth_tracker": self._good,
            }

        return state_dict

    def _loading(self, _original: _Call) -> _Call:
        def load_state_dict(_scaler: Any, state_dict: dict[str, Any]) -> None:
            if self._scaling is not None and "scale" in state_dict:
                self.scale = min(max(float(state_dict["scale"]), self._scaling.floor), self._scaling.cap)
                self._good = int(state_dict.get("_growth_tracker", 0))

        return load_state_dict

    def _adding(self, original: _Call) -> _Call:
        def add_param_group(optimizer: Optimizer, param_group: dict[str, Any]) -> None:
            original(optimizer, param_group)
            self._passes.know(optimizer.param_groups[-1]["params"])

        return add_param_group

    @staticmethod
    def _leaving_out(hook_step: _Call) -> _Call:
        """What torch makes of an optimizer's own `step`: not every one looks whether there are gradients."""

        def profile_hook_step(func: _Call) -> _Call:
            @functools.wraps(func)
            def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
                return None if id(optimizer) in _HIDDEN else func(optimizer, *args, **kwargs)

            return hook_step(step)

        return profile_hook_step

    def _begin_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._busy or self._is_part(optimizer):
            return None
        self._outer = optimizer
        told = tell_after_closures(args, kwargs, lambda: self._judge(optimizer))
        if told is None:
            self._judge(optimizer)
        return told

    def _is_part(self, optimizer: Optimizer) -> bool:
        """Whether the step is one inside of another optimizer's, as of one that wraps it."""
        return self._outer is not None and self._outer is not optimizer and _is_stepping(self._outer)

    def _judge(self, optimizer: Optimizer) -> None:
        _HIDDEN.discard(id(optimizer))
        self._hidden.pop(id(optimizer), None)
        bad = self._is_in_search(optimizer) or (self._scaling is not None and _overflows(optimizer))
        self._move(optimizer, bad=bad)
        self.num_steps += 1
        if not bad and self._clip is not None:
            _clip_gradients(optimizer, self._clip)
        self._busy = True
        try:
            self._on_step(optimizer, not bad)
        finally:
            self._busy = False
        if bad:
            self.num_skipped += 1
            self.hide(optimizer)

    def _is_in_search(self, optimizer: Optimizer) -> bool:
        step = self._asked.get(id(optimizer), 0)
        self._asked[id(optimizer)] = step + 1
        number = [*self._asked].index(id(optimizer))
        return number < len(self.search) and step in self.search[number]

    def _end_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._busy:
            return
        if optimizer is self._outer:
            self._outer = None
        _HIDDEN.discard(id(optimizer))
        for param, grad in self._hidden.pop(id(optimizer), ()):
            param.grad = grad

    def hide(self, optimizer: Optimizer) -> None:
        """Let an optimizer find no gradients, until its step is over."""
        held = [(p, p.grad) for p in _params(optimizer) if p.grad is not None]
        self._hidden[id(optimizer)] = held
        _HIDDEN.add(id(optimizer))
        for param, _ in held:
            param.grad = None

    def _move(self, optimizer: Optimizer, *, bad: bool) -> None:
        scaling = self._scaling
        if scaling is None:
            return
        begins = not self._stepped or id(optimizer) in self._stepped
        if begins:
            self._overflows = self._overflows if self._is_bad else 0
            self._stepped, self._is_bad = set(), False
        self._stepped.add(id(optimizer))
        if bad and not self._is_bad:
            self._is_bad, self._good = True, 0
            self._overflows += 1
            if self._overflows >= scaling.hysteresis:
                self.scale = max(self.scale * scaling.backoff_factor, scaling.floor)
        elif begins:
            self._good += 1
            if self._good >= scaling.growth_interval:
                self.scale, self._good = min(self.scale * scaling.growth_factor, scaling.cap), 0


def _fill_in(scaling: Scaling, scaler: torch.amp.GradScaler) -> Scaling:
    """The plan's settings, and where it sets nothing those of a scaler; bounds that are not set make room for them."""
    own = {
        "init_scale": float(scaler._init_scale),
        "growth_factor": float(scaler.get_growth_factor()),
        "backoff_factor": float(scaler.get_backoff_factor()),
        "growth_interval": int(scaler.get_growth_interval()),
    }
    first = scaling.init_scale if "init_scale" in scaling.model_fields_set else own["init_scale"]
    own |= {"floor": min(scaling.floor, first), "cap": max(scaling.cap, first)}
    filled = scaling.model_copy(update={key: own[key] for key in own if key not in scaling.model_fields_set})
    # A bound that the plan sets holds for the script's scale, too.
    return filled.model_copy(update={"init_scale": min(max(filled.init_scale, filled.floor), filled.cap)})


def _is_stepping(optimizer: Optimizer) -> bool:
    """Whether torch's wrapper of this optimizer's step is on the stack: no hook is called where a step raises."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _overflows(optimizer: Optimizer) -> bool:
    """Whether a gradient is not finite, here or on another process; waits for the device."""
    device = next((param.device for param in _params(optimizer)), torch.device("cpu"))
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
