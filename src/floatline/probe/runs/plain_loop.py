"""PlainLoop: a workload trained over its batches as its plan says, without a guard; the only such loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from floatline import optim
from floatline.numerics.cuda_autocast import cuda_regions
from floatline.plans import Clip, Plan
from floatline.plans.presets import resolve_plan
from floatline.precision.applied_plan import AppliedPlan
from floatline.precision.dtypes import DTYPES
from floatline.precision.islands import cast_weights
from floatline.precision.nested import map_tensors
from floatline.probe.watch.loop import Watch
from floatline.workload import Workload


class PlainLoop:
    """The loss inside autocast, then scale, backward, clip, step and update.

    A plan with FP32 weights and FP16 compute has a GradScaler. With 16-bit weights, the model and the batches are cast,
    there is no scaler, and the optimizer updates as the plan says. The plan's modules and functions in FP32 and its
    rewrites are in force until `close`.

    Attributes:
        plan: What it trains in.
        model: The workload's model.
        optimizer: What updates its weights.
        scaler: The GradScaler; not enabled where the plan has none.
        device: The kind of device that the model is on, such as 'cpu'.

    Args:
        workload: What is trained.
        plan: What to train in; None is the workload's own precision.
    """

    def __init__(self, workload: Workload, plan: Plan | None = None) -> None:
        self.plan = plan = resolve_plan(workload.precision) if plan is None else plan
        self.model = model = workload.model
        whole = plan.weights != "fp32"  # weights and batches in 16 bits, no autocast
        if whole and plan.fp32_modules:
            cast_weights(model, plan)
        elif whole:
            model.to(DTYPES[plan.compute])
        self.optimizer = workload.make_optimizer(model)
        if whole and (plan.update or plan.states):
            self.optimizer = optim.convert(self.optimizer, update=plan.update or "exact", states=plan.states)
        self._applied = AppliedPlan(model, plan, loss_fn=workload.loss_fn)
        self._workload = replace(workload, loss_fn=self._applied.loss_fn or workload.loss_fn)
        self.device = next((p.device.type for p in model.parameters()), "cpu")
        self._mixed = plan.compute != "fp32" and not whole
        self.scaler = _make_scaler(plan, self.device, enabled=plan.compute == "fp16" and not whole)
        model.train()

    def close(self) -> None:
        """Take back what the plan keeps in FP32 or rewrites."""
        self._applied.remove()

    def run_backward(self, step: int, seen: Watch | None = None) -> list[Tensor]:
        """Clear the gradients, and run forward and backward over the batches of a step.

        Args:
            step: Number of the step, from 0.
            seen: Told the targets of each batch.

        Returns:
            The losses, one for each micro-batch.
        """
        plan, losses = self.plan, list[Tensor]()
        self.optimizer.zero_grad(set_to_none=True)
        for inputs, targets in batches_of(self._workload, plan, first_batch(self._workload, plan, step)):
            if seen is not None:
                seen.targets = tuple(targets)
            around = torch.autocast(self.device, DTYPES[plan.compute]) if self._mixed else contextlib.nullcontext()
            with cuda_regions(), around:
                loss = self._workload.compute_loss(inputs, targets)
            self.scaler.scale(loss if plan.accumulate == 1 else loss / plan.accumulate).backward()
            losses.append(loss)
        return losses

    def update(self) -> None:
        """Clip the gradients and step, where the scaler lets it."""
        if self.plan.clip is not None:
            self.scaler.unscale_(self.optimizer)
            _clip(self.model, self.plan.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def train_plainly(workload: Workload, seen: Watch, steps: int) -> None:
    """Train a workload for some steps; the watch is told the targets of each batch."""
    loop = PlainLoop(workload)
    try:
        for step in range(steps):
            loop.run_backward(step, seen)
            loop.update()
    finally:
        loop.close()


def first_batch(workload: Workload, plan: Plan, step: int) -> int:
    """Position of the first batch of a step."""
    return step * plan.accumulate % len(workload.batches)


def batches_of(workload: Workload, plan: Plan, first: int) -> Iterator[Any]:
    """The batches of a step in the plan's format, from the first one's position on."""
    dtype = None if plan.weights == "fp32" else DTYPES[plan.compute]

    def narrow(tensor: Tensor) -> Tensor:
        return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)

    have = workload.batches
    for i in range(plan.accumulate):
        yield map_tensors(narrow, tuple(have[(first + i) % len(have)]))


def _clip(model: nn.Module, clip: Clip) -> None:
    if clip.max_value is not None:
        nn.utils.clip_grad_value_(model.parameters(), clip.max_value)
    elif clip.max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip.max_norm, clip.norm_type)


def _make_scaler(plan: Plan, device: str, *, enabled: bool) -> torch.amp.GradScaler:
    if plan.scaling is None or not enabled:
        return torch.amp.GradScaler(device, enabled=False)
    scaling = plan.scaling
    return torch.amp.GradScaler(
        device,
        init_scale=scaling.init_scale,
        growth_factor=scaling.growth_factor,
        backoff_factor=scaling.backoff_factor,
        growth_interval=scaling.growth_interval,
    )
