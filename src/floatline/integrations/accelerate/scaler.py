"""GuardScaler: the loss scaler that a framework knows how to call, with guards that decide behind it."""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from floatline.errors import GuardError
from floatline.guard.guard import Guard
from floatline.guard.outcome import Outcome
from floatline.guard.scaler import LossScaler
from floatline.guard.step.unscaling import unscale, widen_fp16
from floatline.integrations import saved_state
from floatline.optim import mesh
from floatline.plans import Plan
from floatline.precision.micro_batches import LossSum

_DEBTS = "floatline_debts"


class GuardScaler(LossScaler):
    """A LossScaler whose steps are taken by guards, one for each optimizer.

    Frameworks call `scale`, `unscale_`, `step` and `update` of torch's GradScaler. Here `scale` notes the loss, `step`
    hands loss and gradients to the optimizer's guard, which unscales, clips, decides and steps in one pass, and
    `update` has nothing left to do. The scale is one for all optimizers: a backward pass does not say which of them
    its gradients are for.

    Numerics:
        Scale, skips and clipping are the guard's: see `floatline.guard.step.judge`. A loss of 16 bits is multiplied in
        float32. Losses of several `scale` calls before a step are added up, as their gradients are.
        Checked by tests/integrations/test_accelerate.py.

    Args:
        device: Device type.
        plan: Its scaling. Without one the scale is 1, and steps that are not finite are skipped all the same.

    Attributes:
        guards: In the order of the optimizers.
    """

    def __init__(self, device: str, plan: Plan) -> None:
        scaling = plan.scaling
        if scaling is None:
            super().__init__(device, init_scale=1.0, floor=1.0, cap=1.0)
        else:
            super().__init__(
                device,
                scaling.init_scale,
                scaling.growth_factor,
                scaling.backoff_factor,
                scaling.growth_interval,
                floor=scaling.floor,
                cap=scaling.cap,
                hysteresis=scaling.hysteresis,
            )
        self.guards: list[Guard] = []
        self._outcomes: dict[int, Outcome] = {}
        self._skipped: dict[int, bool] = {}
        self._told: dict[int, int] = {}
        self._loss: Tensor | None = None  # the sum since the last step
        self._num_losses = 0
        self._last: tuple[Tensor, int] | None = None  # of the last step
        self._used: Tensor | None = None  # the scale of the last loss
        self._unscaled: dict[int, Tensor] = {}  # of optimizers whose gradients were unscaled before the step
        self._norms: dict[int, Tensor] = {}  # returned by clip_by, to be filled in the step
        self._usual: dict[int, tuple[float, float | None, float]] = {}  # own clipping, put back after a step

    def add(self, guard: Guard) -> None:
        """Let this guard take the steps of its optimizer."""
        if self.guards:
            guard.share_scale(*self.guards[0].shared_scale)
        elif guard.plan.scaling is not None:
            guard.load_scaler(super().state_dict())
        self.guards.append(guard)

    def forget(self) -> None:
        """Let go of the guards and of all that belongs to them; the scale goes on."""
        if not self.guards:
            return
        super().load_state_dict(saved_state.without_guards(self.state_dict()))
        self.guards = []
        for own in (self._outcomes, self._skipped, self._told, self._unscaled, self._norms, self._usual):
            own.clear()
        self._loss, self._last, self._used, self._num_losses = None, None, None, 0

    def guard_of(self, optimizer: torch.optim.Optimizer) -> Guard:
        """The guard of an optimizer."""
        for guard in self.guards:
            if guard.optimizer is optimizer:
                return guard
        raise GuardError(
            f"{type(optimizer).__name__} has no guard. Give it to accelerator.prepare together with its model."
        )

    @property
    def waiting(self) -> bool:
        """Whether a loss has gone backward since the last step."""
        return self._num_losses > 0

    def scale(self, outputs: Any) -> Any:
        """The loss times the scale, to go backward from."""
        if not isinstance(outputs, Tensor):
            return [self.scale(output) for output in outputs]
        if not self.guards:
            raise GuardError("A loss was sent backward before accelerator.prepare(model, optimizer). Prepare first.")
        if outputs.numel() == 1:
            part = outputs.detach().reshape(()).to(torch.float32)
            self._loss = part if self._loss is None else self._loss + part.to(self._loss.device)
            self._num_losses += 1
        scale = self.guards[0].scale
        # With several optimizers the first one's step may move the scale before the second one's.
        self._used = scale.clone() if len(self.guards) > 1 else scale
        return outputs.to(torch.float32) * scale.to(outputs.device)

    def clip_by(self, optimizer: torch.optim.Optimizer, norm: float) -> Tensor:
        """Clip by this norm in the optimizer's next step.

        Returns:
            A tensor that will hold the norm of the unscaled gradients once the step was taken; NaN before.
        """
        guard = self.guard_of(optimizer)
        self._clip(guard, norm=norm)
        self._norms[id(guard)] = torch.full((), torch.nan, dtype=torch.float32, device=guard.device)
        return self._norms[id(guard)]

    def bound_by(self, optimizer: torch.optim.Optimizer, value: float) -> None:
        """Bound each element of the unscaled gradients in the optimizer's next step, behind the check for inf."""
        self._clip(self.guard_of(optimizer), value=value)

    def _clip(self, guard: Guard, *, norm: float = math.inf, value: float | None = None) -> None:
        self._usual.setdefault(id(guard), (guard.clip_norm, guard.clip_value, guard.norm_type))
        guard.clip_by(norm=norm, value=value)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale now, for code that looks at them before the step; FP16 ones widen."""
        guard = self.guard_of(optimizer)
        if id(guard) in self._unscaled:
            raise RuntimeError("unscale_() has already been called on this optimizer since its last step.")
        used = guard.scale if self._used is None else self._used
        widen_fp16(optimizer)
        found = unscale(optimizer, inverse=used.reciprocal(), zero=torch.zeros_like(used), keep=False)
        flags = [flag.to(used.device) for flag in found.values()]
        self._unscaled[id(guard)] = torch.stack(flags).any() if flags else torch.zeros_like(used).bool()

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **_kwargs: Any) -> None:
        """Let the guard take the step: unscaled, clipped, and made wholly or not at all, on every process."""
        if any(arg is not None for arg in args):
            raise GuardError("The optimizer's step was given a closure, which runs unseen. Call it without one.")
        guard = self.guard_of(optimizer)
        total = self._take_total(guard)
        overflow = self._unscaled.pop(id(guard), None)
        if overflow is not None:
            _restore_overflow(optimizer, overflow)
        outcome = guard.take_step(total)
        if id(guard) in self._usual:  # what was asked for holds for one step
            norm, value, norm_type = self._usual.pop(id(guard))
            guard.clip_by(norm=norm, value=value, norm_type=norm_type)
        self._outcomes[id(guard)] = outcome
        self._skipped[id(guard)] = self._debt(guard) > 0
        self._told[id(guard)] = self._told.get(id(guard), 0) + self._skipped[id(guard)]
        asked = self._norms.pop(id(guard), None)
        if asked is not None:
            asked.copy_(outcome.report[2])

    def _take_total(self, guard: Guard) -> LossSum:
        if self._loss is not None:
            self._last = self._loss, self._num_losses
            self._loss, self._num_losses = None, 0
        if self._last is None or self._used is None:
            raise GuardError("step() was called before backward(). Call accelerator.backward(loss) for each batch.")
        loss, num = self._last
        scale = guard.scale
        # Gradients are multiples of scale * divisor: of the scale they were made with, or of 1.
        if id(guard) in self._unscaled:
            divisor = scale.reciprocal()
        elif self._used is not scale:
            divisor = self._used / scale
        else:
            return LossSum(loss=loss, weight=1.0, num=num)
        return LossSum(loss=loss.to(scale.device) * divisor, weight=divisor, num=num)  # its mean divides again

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Take the new scale where one is given; the guards have moved theirs already."""
        if new_scale is not None:
            self.guards[0].set_scale(float(new_scale))

    def _debt(self, guard: Guard) -> int:
        """Skipped steps that nobody was told of yet."""
        return guard.accounts.run.num_skipped - self._told.get(id(guard), 0)

    def was_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step of the optimizer was skipped; after each step, one skip is told of, if there is one to tell.

        That is the step just made, unless the policy's `read_after` lets a GPU run ahead: the host learns of a skip
        some steps later then, and tells of as many as there were.
        """
        return self._skipped.get(id(self.guard_of(optimizer)), False)

    def outcome_of(self, optimizer: torch.optim.Optimizer) -> Outcome | None:
        """What the optimizer's last step came to; reading it waits for the device."""
        return self._outcomes.get(id(self.guard_of(optimizer)))

    @property
    def applied_flag(self) -> Tensor | None:
        """1.0 if the last step of every optimizer was made, else 0.0; on the device. None before any step."""
        flags = [(outcome.report[3] == 0).to(torch.float32) for outcome in self._outcomes.values()]
        return torch.stack([flag.to(flags[0].device) for flag in flags]).amin() if flags else None

    def get_scale(self) -> float:
        """The scale; waits for the device."""
        return float(self.guards[0].scale) if self.guards else super().get_scale()

    def drain(self) -> None:
        """Read what became of all steps; waits for the device."""
        for guard in self.guards:
            guard.drain()

    def state_dict(self) -> dict[str, Any]:
        """What LossScaler saves, and everything else the guards need to go on; torch's GradScaler loads it, too."""
        saved = super().state_dict()
        if not self.guards:
            return saved
        self.drain()
        return {
            **saved,
            **saved_state.collect_with_scaler(self.guards),
            _DEBTS: [self._debt(guard) for guard in self.guards],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave, here, in LossScaler or in torch's GradScaler."""
        super().load_state_dict(saved_state.without_guards(state_dict))
        if not self.guards:
            return
        saved_state.restore_with_scaler(self.guards, state_dict)
        for guard, debt in zip(self.guards, state_dict.get(_DEBTS, [0] * len(self.guards)), strict=True):
            self._told[id(guard)] = guard.accounts.run.num_skipped - debt


@torch.no_grad()
def _restore_overflow(optimizer: torch.optim.Optimizer, overflow: Tensor) -> None:
    """Put an inf back where gradients held one: what was done to them since, such as clamping, may have hidden it."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is None:
                continue
            grad = mesh.local_part(param.grad)
            grad = grad._values() if grad.is_sparse else grad
            if grad.numel():
                first = grad[(0,) * grad.dim()]
                first.copy_(torch.where(overflow.to(grad.device), torch.inf, first))
                return
