"""LossScaler: torch's GradScaler for every 16-bit dtype, with limits, and one decision for all processes."""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from floatline import optim
from floatline.errors import ScalerError
from floatline.guard.step.stepping import prepare_momentum
from floatline.guard.step.unscaling import unscale, widen_fp16
from floatline.numerics.moving import send
from floatline.optim.mesh import agree_on_overflow

_FLOOR, _CAP = 1.0, 2.0**24
_USUAL = {"growth_factor": 2.0, "backoff_factor": 0.5}
# A scale is a number of float32, and so is its inverse.
_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class LossScaler(torch.amp.GradScaler):
    """Multiplies the loss, divides the gradients, skips a step that is not finite, and moves the scale.

    A drop-in for torch.amp.GradScaler: same methods, same errors, same state_dict keys and a few more.

    Numerics:
        The scale is a float32 number on the device. Overflow: scale x backoff_factor; growth_interval steps without
        one: scale x growth_factor; then it is kept within [floor, cap]. With the default factors it stays a power of
        two, so that scaling and unscaling are exact where they do not leave a format's range.
        A skipped step leaves weights and optimizer states as they are.
        Checked by tests/guard/test_scaler.py against torch.amp.GradScaler.

    Args:
        device: Device type.
        init_scale: Scale at the start; any number but NaN. A limit that was not given moves to let it in.
        growth_factor: What the scale is multiplied by after growth_interval steps without overflow.
        backoff_factor: What it is multiplied by after an overflow.
        growth_interval: Half of torch's 2000: a scale that had to fall comes back sooner.
        enabled: False: every method does nothing, and `step` is the optimizer's step.
        floor: Smallest scale; None is 1, or an `init_scale` between 0 and that. Without one, 144 steps that are not
            finite in a row make 1 / scale inf, and the next healthy step writes inf into the weights.
        cap: Largest scale; None is 2^24, or a larger `init_scale`.
        hysteresis: The scale falls from the N-th overflow in a row on; the steps are skipped all the same.
        process_group: Processes that train together, or None for the default group. If any of them finds an inf or
            NaN, all skip the step: one all-reduce of 8 bytes for each optimizer.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        enabled: bool = True,
        *,
        floor: float | None = None,
        cap: float | None = None,
        hysteresis: int = 1,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        _check_factors(growth_factor=growth_factor, backoff_factor=backoff_factor)
        start = _number(init_scale, "init_scale") if self._enabled else _FLOOR
        low = floor if floor is not None else _lowered(start)
        high = cap if cap is not None else _raised(start)
        _check_limits(floor=low, cap=high, hysteresis=hysteresis)
        if self._enabled and ((floor is not None and start < floor) or (cap is not None and start > cap)):
            raise ScalerError(
                f"init_scale {start:g} is outside floor {low:g} and cap {high:g}. Move init_scale or the limit."
            )
        self._init_scale = min(max(start, low), high)
        self._floor = float(low)
        self._cap = float(high)
        self._hysteresis = hysteresis
        self._process_group = process_group
        self._init_overflows = 0
        self._overflows: Tensor | None = None  # in a row; made with the scale
        self._flags: dict[int, Tensor] = {}
        self._iteration_over = False

    @property
    def applied_flag(self) -> Tensor | None:
        """1.0 if every optimizer's step of this iteration was made, else 0.0; on the device. None before any step."""
        if not self._flags:
            return None
        first, *others = self._flags.values()
        for other in others:
            first = torch.minimum(first, send(other, first.device))
        return first

    @property
    def applied(self) -> bool:
        """Whether every optimizer's step of this iteration was made; waits for the device. False before any step.

        It stands until the first step after `update`.
        """
        flag = self.applied_flag
        return flag is not None and bool(flag.item())

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer's step if no gradient, on any process, is inf or NaN.

        Optimizers of `floatline.optim`, and torch's with `fused=True`, unscale and skip in their own kernels, and the
        host waits for nothing. For others the host reads one number.

        Args:
            optimizer: The optimizer.
            args: For the optimizer's step.
            kwargs: For the optimizer's step: `clip_norm=1.0` for those of `floatline.optim`.

        Returns:
            What the optimizer's step returned; None if it was not called. Ask `applied` whether it was made.
        """
        if self._enabled:
            prepare_momentum(optimizer)
        result = super().step(optimizer, *args, **kwargs)
        if self._iteration_over:
            self._flags, self._iteration_over = {}, False
        self._flags[id(optimizer)] = self._flag_of(optimizer)
        return result

    def _flag_of(self, optimizer: torch.optim.Optimizer) -> Tensor:
        found: list[Tensor] = []
        if self._enabled:
            found = list(self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
        if isinstance(optimizer, optim.Optimizer) and optimizer.decision is not None:
            # It knows more: a norm that overflowed, or a skip the caller asked for.
            return optimizer.decision.applied.to(torch.float32)
        if not found:
            devices = (param.device for group in optimizer.param_groups for param in group["params"])
            return torch.ones((), dtype=torch.float32, device=next(devices, "cpu"))
        home = found[0].device
        total = found[0] if len(found) == 1 else torch.stack([send(f, home) for f in found]).sum()
        return (total == 0).to(torch.float32)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale, once after the steps of all optimizers, and keep it within floor and cap.

        Args:
            new_scale: The scale to take instead, brought within floor and cap: 0 is the floor. A tensor is read on
                the host.

        Raises:
            ScalerError: `new_scale` is NaN.
        """
        if not self._enabled:
            self._iteration_over = True
            return
        if new_scale is not None:
            new_scale = self._within(new_scale)
        before = overflow = None
        if new_scale is None and self._hysteresis > 1 and self._scale is not None:
            before, overflow = self._scale.clone(), self._overflow_found(self._scale.device)
        super().update(new_scale)
        scale = cast(Tensor, self._scale)
        if before is not None and overflow is not None:
            count = cast(Tensor, self._overflows)
            count.copy_(torch.where(overflow, count + 1, 0))
            scale.copy_(torch.where(overflow & (count < self._hysteresis), before, scale))
        scale.clamp_(self._floor, self._cap)
        self._iteration_over = True

    def _within(self, given: float | Tensor) -> float | Tensor:
        """A new scale within the limits. A tensor comes back as it is: torch says what is wrong with one."""
        if isinstance(given, Tensor):
            _number(math.nan if bool(given.isnan().any()) else 1.0, "new_scale")
            return given
        return min(max(_number(given, "new_scale"), self._floor), self._cap)

    def _overflow_found(self, home: torch.device) -> Tensor | None:
        states = cast("Iterable[dict[str, Any]]", self._per_optimizer_states.values())
        found = [send(flag, home) for s in states for flag in s["found_inf_per_device"].values()]
        return torch.stack(found).any() if found else None

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # torch calls this once per optimizer and iteration. allow_fp16: only look, the optimizer unscales by itself.
        if not allow_fp16:
            widen_fp16(optimizer)
        found = unscale(optimizer, inverse=inv_scale, zero=found_inf, keep=allow_fp16)
        return agree_on_overflow(found, home=found_inf.device, group=self._process_group)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._overflows = torch.full((), self._init_overflows, dtype=torch.int32, device=dev)

    def _num_overflows(self) -> int:
        return self._init_overflows if self._overflows is None else int(self._overflows.item())

    def set_growth_factor(self, new_factor: float) -> None:
        """Take another growth factor from the next `update` on.

        Args:
            new_factor: Any number but NaN.
        """
        _check_factors(growth_factor=new_factor)
        super().set_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Take another backoff factor from the next `update` on.

        Args:
            new_factor: Any number but NaN.
        """
        _check_factors(backoff_factor=new_factor)
        super().set_backoff_factor(new_factor)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on, as plain numbers: torch's five entries, and ours.

        torch.amp.GradScaler loads it too; it ignores what it does not know.
        """
        if not self._enabled:
            return {}
        return {
            **super().state_dict(),
            "floor": self._floor,
            "cap": self._cap,
            "hysteresis": self._hysteresis,
            "_hysteresis_tracker": self._num_overflows(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` saved, here or in torch.amp.GradScaler.

        A scale of torch's scaler is brought within floor and cap. Entries that are missing leave what is set.

        Args:
            state_dict: From an enabled scaler.
        """
        if not self._enabled or not state_dict:
            super().load_state_dict(state_dict)  # does nothing, or raises
            return
        scale = float(state_dict["scale"])
        if not math.isfinite(scale):
            raise ScalerError(f"The saved scale is {scale}. Start with a new scaler, or load an earlier checkpoint.")
        floor, cap = state_dict.get("floor", self._floor), state_dict.get("cap", self._cap)
        hysteresis = state_dict.get("hysteresis", self._hysteresis)
        _check_limits(floor=floor, cap=cap, hysteresis=hysteresis)
        _check_factors(**{name: state_dict[name] for name in _USUAL if name in state_dict})
        super().load_state_dict({**state_dict, "scale": min(max(scale, floor), cap)})
        self._floor, self._cap, self._hysteresis = float(floor), float(cap), hysteresis
        self._init_overflows = int(state_dict.get("_hysteresis_tracker", 0))
        if self._overflows is not None:
            self._overflows.fill_(self._init_overflows)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {**state, "_init_overflows": self._num_overflows(), "_overflows": None, "_flags": {}}


def _check_limits(*, floor: float, cap: float, hysteresis: int) -> None:
    _positive(floor, "floor")
    _positive(cap, "cap")
    if floor > cap:
        raise ScalerError(f"floor {floor:g} is above cap {cap:g}. Give a floor no larger than the cap.")
    if isinstance(hysteresis, bool) or not isinstance(hysteresis, int) or hysteresis < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ScalerError(f"hysteresis {hysteresis!r} is not a number of overflows. Give a whole number from 1 up.")


def _check_factors(**factors: float) -> None:
    """Refuse NaN, which torch lets through: the scale would be NaN after an overflow, or never grow."""
    for name, factor in factors.items():
        if math.isnan(factor):
            raise ScalerError(f"{name} nan is no factor of a scale. Give a number, such as {_USUAL[name]:g}.")


def _number(value: float | Tensor, name: str) -> float:
    """A number that can be brought within limits."""
    number = float(value)
    if math.isnan(number):
        raise ScalerError(f"{name} nan cannot be a scale. Give a number, such as 65536.")
    return number


def _lowered(start: float) -> float:
    """The floor that lets a start value in: it stays so large that 1 / scale is finite in float32."""
    return min(_FLOOR, max(start, _SMALLEST)) if start > 0 else _FLOOR


def _raised(start: float) -> float:
    """The cap that lets a start value in: a number of float32. An infinite one is no scale, and gives nothing away."""
    return max(_CAP, min(start, _LARGEST)) if math.isfinite(start) else _CAP


def _positive(value: float, name: str) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ScalerError(f"{name} {value!r} cannot be a scale. Give a finite number above 0.")
    return value
