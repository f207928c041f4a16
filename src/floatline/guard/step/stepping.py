"""One way to step any optimizer: look at the gradients, let the judge decide, and make the step or leave it."""
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from floatline import optim
from floatline.errors import GuardError
from floatline.numerics import foreach
from floatline.optim import mesh
from floatline.optim.gradients import Gradients
from floatline.optim.survey import Decision, Survey


def prepare_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give weights that have no momentum yet a momentum of 0, which the first step turns into their gradient.

    torch makes the momentum of a first step with `empty_like`, and a fused kernel that is told to skip the step does
    not write to it: from the second step on the weights are moved by what was in memory before.

    Numerics:
        0 x momentum + gradient is the gradient, as in torch's first step; a gradient of -0.0 becomes 0.0, which moves
        a weight by as much. With dampening torch's first step is another one: such an optimizer is not changed here,
        see `is_prepared`. Checked by tests/guard/step/test_first_momentum.py.
    """
    if type(optimizer) is not torch.optim.SGD:
        return
    state = cast("dict[Tensor, dict[str, Any]]", optimizer.state)
    for group in optimizer.param_groups:
        if not (group.get("fused") and group["momentum"]) or group["dampening"]:
            continue
        for param in group["params"]:
            if param.grad is not None and state.get(param, {}).get("momentum_buffer") is None:
                state[param]["momentum_buffer"] = torch.zeros_like(param.grad)


def is_prepared(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `prepare_momentum` can do it: not for a fused SGD with momentum and dampening."""
    groups = optimizer.param_groups if type(optimizer) is torch.optim.SGD else []
    return not any(group.get("fused") and group["momentum"] and group["dampening"] for group in groups)


Kind = Literal["floatline", "fused", "plain"]


class Stepper:
    """Makes the steps of an optimizer as the judge decides them.

    Three kinds, told apart once: floatline's optimizers and torch's with `fused=True` take the decision as device
    tensors, and the host waits for nothing. For every other optimizer the host reads one number, late: after the
    whole step is on its way.

    Args:
        optimizer: The optimizer.
        clip_value: Largest magnitude of an element of the unscaled gradient; None bounds none.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, clip_value: float | None) -> None:
        self.optimizer = optimizer
        self.kind: Kind = _kind(optimizer)
        self.clip_value = clip_value
        self._gradients = Gradients(optimizer.param_groups)

    def step(self, judge: Callable[[Survey], Decision], divisor: Tensor) -> Decision:
        """Survey, decide, step.

        Args:
            judge: Gives the decision.
            divisor: What unscaled gradients are multiples of: scale and number of batches; for `clip_value`.
        """
        if isinstance(self.optimizer, optim.Optimizer):
            self.optimizer.step(decide=lambda survey: self._judge(judge, survey, divisor))
            return cast(Decision, self.optimizer.decision)
        decision = self._judge(judge, self._gradients.survey(), divisor)
        if self.kind == "fused":
            self._step_fused(decision)
        elif bool(decision.applied):
            self._step_plain(decision)
        return decision

    def marks(self) -> list[int]:
        """How often the first weight of each group was written to: tells whether a step that raised has moved any."""
        groups = ((p for p in group["params"] if p.grad is not None) for group in self.optimizer.param_groups)
        return [mesh.local_part(p.detach())._version for group in groups for p in [next(group, None)] if p is not None]

    def drop_gradients(self) -> None:
        """Set every gradient to None, as the optimizer's zero_grad does, without the time that it takes to say so."""
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                param.grad = None

    def _judge(self, judge: Callable[[Survey], Decision], survey: Survey, divisor: Tensor) -> Decision:
        # The survey saw the gradients before any bound: clamping would turn inf into a finite lie.
        decision = judge(survey)
        if self.clip_value is not None:
            bound = self.clip_value * divisor
            for grad in self._grads():
                grad.clamp_(-bound.to(grad.dtype), bound.to(grad.dtype))
        return decision

    def _step_fused(self, decision: Decision) -> None:
        """torch's fused kernels divide by grad_scale and leave everything as it is where found_inf is not 0."""
        fused = cast(Any, self.optimizer)
        prepare_momentum(self.optimizer)
        fused.grad_scale = decision.factor.reciprocal()
        fused.found_inf = (~decision.applied).to(torch.float32)
        try:
            self.optimizer.step()
        finally:
            del fused.grad_scale, fused.found_inf

    def _step_plain(self, decision: Decision) -> None:
        kinds: dict[torch.device, list[Tensor]] = {}
        for grad in self._grads():
            kinds.setdefault(grad.device, []).append(grad)
        for device, grads in kinds.items():
            foreach.mul_(grads, decision.factor.to(device))
        self.optimizer.step()

    def _grads(self) -> list[Tensor]:
        grads = [param.grad for group in self.optimizer.param_groups for param in group["params"]]
        local = [mesh.local_part(grad) for grad in grads if grad is not None]
        return [grad._values() if grad.is_sparse else grad for grad in local]


def _kind(optimizer: torch.optim.Optimizer) -> Kind:
    if isinstance(optimizer, optim.Optimizer):
        return "floatline"
    # SGD's fused kernel takes found_inf, too; an optimizer that merely has the flag says so by this attribute.
    ready = getattr(optimizer, "_step_supports_amp_scaling", False)
    fused = ready and all(group.get("fused") for group in optimizer.param_groups)
    return "fused" if fused and is_prepared(optimizer) else "plain"


def check_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that would lose FP16 gradients: unscaled in FP16, small ones are zero."""
    if isinstance(optimizer, optim.Optimizer):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.dtype == torch.float16 and param.requires_grad:
                raise GuardError(
                    f"{type(optimizer).__name__} would train FP16 weights: its states and updates are rounded to FP16, "
                    "where eps 1e-8 is 0. Use floatline.optim, or keep the trained weights in float32."
                )


def norm_of(grads_of: torch.optim.Optimizer, norm_type: float) -> Tensor | None:
    """The p-norm of all gradients as they are; None for the Euclidean one, which the survey gives.

    Numerics:
        float32, of the norms of the parts. Sharded gradients take one all-reduce for each mesh dimension that shards
        something. inf and NaN stay what they are.
    """
    if norm_type == 2.0:
        return None
    params: list[Tensor] = [p for group in grads_of.param_groups for p in group["params"]]
    norm_of_one = cast("Callable[..., Tensor]", torch.linalg.vector_norm)
    found: dict[tuple[Any, ...], list[Tensor]] = {}
    for param in params:
        if param.grad is None:
            continue
        grad = mesh.local_grad(param, param.grad)
        grad = grad._values() if grad.is_sparse else grad
        # The largest of nothing is an error to torch, and a process may hold nothing of a small tensor.
        size = norm_of_one(grad, norm_type, dtype=torch.float32) if grad.numel() else grad.new_zeros(())
        found.setdefault(mesh.groups_of(param), []).append(size.to(params[0].device, torch.float32))
    norms = [torch.zeros((), dtype=torch.float32, device=params[0].device)]
    for groups, sizes in found.items():
        norm = norm_of_one(torch.stack(sizes), norm_type)
        for group in groups:
            rows = torch.zeros(dist.get_world_size(group), dtype=torch.float32, device=norm.device)
            rows[dist.get_rank(group)] = norm
            dist.all_reduce(rows, group=group)
            norm = norm_of_one(rows, norm_type)
        norms.append(norm)
    return norm_of_one(torch.stack(norms), norm_type)


def check_clip(clip_norm: float | None, clip_value: float | None, norm_type: float) -> None:
    """Refuse bounds that would stop or reverse every step."""
    for name, value in (("clip_norm", clip_norm), ("clip_value", clip_value), ("norm_type", norm_type)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or value <= 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GuardError(f"{name} is {value!r}. Give a number above 0; clip_norm=math.inf clips nothing.")
    if clip_norm is not None and clip_value is not None:
        raise GuardError(f"clip_norm {clip_norm:g} and clip_value {clip_value:g} are both given. Give one of them.")
