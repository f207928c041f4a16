"""Memory of one training step by part, under each plan: what is counted, and what is measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from floatline.checkup.forward import ForwardPass, run_forward
from floatline.errors import TargetError
from floatline.plans import Plan
from floatline.workload import Workload

PARTS = ("weights", "master", "gradients", "states", "copies", "activations")
# Up to here the optimizer may be stepped on real tensors where it cannot be on tensors without data.
_MOST_REAL = 50_000_000


@dataclass(frozen=True)
class MemoryParts:
    """Bytes of one training step; None where a part is not known.

    Args:
        weights: Parameters and buffers.
        master: The bits that 16-bit weights drop and an exact master keeps.
        gradients: Of the trained parameters.
        states: Of the optimizer.
        copies: 16-bit copies of FP32 weights, made by autocast.
        activations: What backward needs, for the first batch.
    """

    weights: int
    master: int
    gradients: int
    states: int | None
    copies: int | None
    activations: int | None

    @property
    def total(self) -> int | None:
        """The sum; None where a part is not known."""
        known = [size for size in (getattr(self, part) for part in PARTS) if size is not None]
        return sum(known) if len(known) == len(PARTS) else None

    def as_json(self) -> dict[str, int | None]:
        """Plain data for reports."""
        return {**{part: getattr(self, part) for part in PARTS}, "total": self.total}


@dataclass(frozen=True)
class Memory:
    """Memory under several plans.

    Args:
        parts: Plan name to bytes by part.
        how: Part to how its number was found.
        passes: Plan name to its watched forward pass, where it ran.
        problems: Plan name to why its forward pass failed.
    """

    parts: dict[str, MemoryParts]
    how: dict[str, str]
    passes: dict[str, ForwardPass]
    problems: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """Plain data for reports."""
        return {
            "unit": "bytes",
            "plans": {name: parts.as_json() for name, parts in self.parts.items()},
            "how": self.how,
            "problems": self.problems,
        }


def estimate_memory(workload: Workload, plans: Iterable[Plan], *, optimizer: Optimizer, like_cuda: bool) -> Memory:
    """Bytes of one training step by part, for each plan.

    Args:
        workload: What is trained. Its model is not touched.
        plans: The plans to compare.
        optimizer: Its optimizer, fresh; it is stepped on stand-ins, and left as it was.
        like_cuda: Whether autocast follows CUDA's lists, as for a GPU.
    """
    states = _count_states(optimizer)
    parts: dict[str, MemoryParts] = {}
    passes: dict[str, ForwardPass] = {}
    problems: dict[str, str] = {}
    by_size: dict[tuple[bool, bool], ForwardPass] = {}
    for plan in plans:
        # fp16 and bf16 take the same bytes: one pass does for both.
        size = (plan.weights == "fp32", plan.compute == "fp32")
        done = by_size.get(size) or _try_forward(workload, plan, like_cuda=like_cuda)
        if isinstance(done, ForwardPass):
            passes[plan.name] = by_size[size] = done
        else:
            problems[plan.name] = done
        parts[plan.name] = _parts_of(workload.model, plan, states, passes.get(plan.name))
    how = "simulated without data" if any(done.simulated for done in passes.values()) else "run"
    how += " on the CPU" + (" with CUDA's autocast lists; fused attention keeps less" if like_cuda else "")
    return Memory(parts, _explain_parts(type(optimizer).__name__, how), passes, problems)


def _try_forward(workload: Workload, plan: Plan, *, like_cuda: bool) -> ForwardPass | str:
    try:
        return run_forward(workload, plan, like_cuda=like_cuda)
    except Exception as error:
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def make_optimizer(workload: Workload) -> Optimizer:
    """The workload's optimizer; what its code raises becomes one line."""
    try:
        optimizer = cast("object", workload.make_optimizer(workload.model))
    except Exception as error:
        raise TargetError(f"make_optimizer failed: {type(error).__name__}: {error}. Run it alone.") from error
    if not isinstance(optimizer, Optimizer):
        raise TargetError(
            f"make_optimizer returned a {type(optimizer).__name__}. It must return a torch.optim.Optimizer."
        )
    return optimizer


def _parts_of(model: nn.Module, plan: Plan, states: int | None, done: ForwardPass | None) -> MemoryParts:
    kept = plan.check_modules(model)
    weights = master = gradients = 0
    for name, tensor in _stored_tensors(model):
        trained = tensor.requires_grad
        size = _bytes_under(plan, name, tensor, trained=trained, kept=kept)
        weights += tensor.numel() * size
        if not trained:
            continue
        gradients += tensor.numel() * size
        master += tensor.numel() * plan.master_bytes if size == 2 else 0
    return MemoryParts(
        weights=weights,
        master=master,
        gradients=gradients,
        states=None if states is None else round(states * plan.states_share),
        copies=done.copies if done else None,
        activations=done.saved if done else None,
    )


def _stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _bytes_under(plan: Plan, name: str, tensor: Tensor, *, trained: bool, kept: list[str]) -> int:
    if not tensor.is_floating_point():
        return tensor.element_size()
    if any(name.startswith(module + ".") for module in kept):
        return 4
    # A mixed plan needs FP32 for what is trained; a frozen base stays as it was loaded.
    if plan.mixed and not trained:
        return tensor.element_size()
    return 4 if plan.weights == "fp32" else 2


def _count_states(optimizer: Optimizer) -> int | None:
    # Fused kernels know no tensors without data, and some optimizers want a closure.
    with contextlib.suppress(Exception):
        return _step_stand_ins(optimizer, "meta")
    with contextlib.suppress(Exception):
        return _step_stand_ins(optimizer, "cpu")
    return None


def _step_stand_ins(optimizer: Optimizer, device: str) -> int:
    """Step once on FP32 tensors of the same shapes, and add up what the optimizer then holds."""
    groups = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
    if device == "cpu" and sum(p.numel() for group in groups for p in group) > _MOST_REAL:
        raise MemoryError("too large to step for real")
    state: dict[Any, dict[str, Any]] = {}
    stand_ins: list[list[nn.Parameter]] = []
    for group in groups:
        row: list[nn.Parameter] = []
        for parameter in group:
            stand_in = nn.Parameter(torch.zeros(parameter.shape, device=device))
            stand_in.grad = torch.zeros(parameter.shape, device=device)
            # Some optimizers, Adagrad for one, make their state when they are made.
            held: dict[str, Any] = optimizer.state.get(parameter, {})
            state[stand_in] = {
                key: torch.zeros(value.shape, device=device)
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim()
                else value
                for key, value in held.items()
            }
            row.append(stand_in)
        stand_ins.append(row)
    kept_groups = [group["params"] for group in optimizer.param_groups]
    kept_state = dict(optimizer.state)
    try:
        for group, row in zip(optimizer.param_groups, stand_ins, strict=True):
            group["params"] = row
        optimizer.state.clear()
        optimizer.state.update({key: value for key, value in state.items() if value})
        optimizer.step()
        held_now = tree_leaves([list(values.values()) for values in optimizer.state.values()])
        return sum(x.numel() * x.element_size() for x in held_now if isinstance(x, Tensor))
    finally:
        for group, parameters in zip(optimizer.param_groups, kept_groups, strict=True):
            group["params"] = parameters
        optimizer.state.clear()
        optimizer.state.update(kept_state)


def _explain_parts(optimizer: str, how: str) -> dict[str, str]:
    return {
        "weights": "counted: parameters and buffers; under a mixed plan frozen ones stay as loaded",
        "master": "counted: 2 bytes a trained 16-bit weight, for an optimizer with an exact FP32 master; "
        "torch's own have none, and the updates 'stochastic' and 'nearest' need none",
        "gradients": "counted: one for each trained weight, in its dtype",
        "states": f"counted: what {optimizer} holds after one step on FP32 weights, "
        "less where the plan stores moments in 16 or 8 bits",
        "copies": "measured: 16-bit weights that autocast makes in one forward pass",
        "activations": f"measured: what backward needs of the first batch's forward pass, {how}",
    }
