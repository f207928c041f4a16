"""One step, wholly or not at all: the optimizer's update as the judge decides it."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# torch shows a module's own buffers and hooks under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from floatline import optim
from floatline.numerics import foreach
from floatline.optim import mesh
from floatline.optim.kernels import survey_all, torch_backend
from floatline.optim.roster import Roster
from floatline.optim.survey import Decision, Entry, Survey


class Gradients:
    """Looks at the gradients of parameters that some other optimizer trains.

    Args:
        groups: The optimizer's parameter groups.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._groups = groups
        self._state: dict[Tensor, dict[str, Tensor]] = {}
        self._roster: Roster | None = None

    @torch.no_grad()
    def survey(self) -> Survey:
        """Norms and non-finite counts, for every parameter that has a gradient, in order; of shards this process's."""
        params, entries = self._collect()
        if not entries:
            device = self._groups[0]["params"][0].device
            return Survey(torch.zeros(0, device=device), torch.zeros(0, dtype=torch.int32, device=device))
        sparse = any(param.grad is not None and param.grad.is_sparse for param in params)
        found = torch_backend.survey(entries) if sparse else survey_all(entries)
        if self._roster is None:
            return mesh.own_share(found, params)
        self._roster.release()  # and a roster holds plain parameters only: there is no shard to ask for
        return found

    def _collect(self) -> tuple[list[Tensor], list[Entry]]:
        if self._roster is not None and self._roster.refresh(self._groups, self._state):
            return self._roster.params, self._roster.entries
        params: list[Tensor] = []
        idle: list[Tensor] = []
        entries: list[Entry] = []
        plain = True
        for group in self._groups:
            for param in group["params"]:
                grad = param.grad
                if grad is None:
                    idle.append(param)
                    continue
                distributed = mesh.is_distributed(param)
                plain = plain and not distributed and not grad.is_sparse
                weight = mesh.local_part(param.detach())
                grad = _dense(mesh.local_grad(param, grad))
                start = torch.zeros((), dtype=torch.float32, device=weight.device)
                state = self._state.setdefault(param, {"step": start})
                params.append(param)
                # The backend's table wants a learning rate; nothing is stepped from here.
                entries.append(Entry(weight, grad, state, _NO_SETTINGS, 0, 0))
        self._roster = Roster(params, entries, idle, self._groups) if plain else None
        return params, entries if self._roster is None else self._roster.entries


def _dense(grad: Tensor) -> Tensor:
    """What a sparse gradient holds, coalesced: double entries may cancel or overflow only when added up."""
    return grad.coalesce().values() if grad.is_sparse else grad


_NO_SETTINGS: dict[str, Any] = {"lr": 0.0}


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
