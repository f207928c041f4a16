"""The metric of a model in training: in FP32, in evaluation mode, and as if nobody had looked."""

from __future__ import annotations

import copy

import torch
from torch import nn

from floatline import optim
from floatline.guard.run import Run
from floatline.precision.random_state import RandomState
from floatline.training.placement import callable_from_cpu, place
from floatline.workload import Workload


@torch.no_grad()
def measure_metric(workload: Workload, run: Run, *, master: bool = True) -> float:
    """The workload's metric, or its mean loss over the batches, now. Training goes on from it bit for bit.

    Numerics:
        FP32 weights are evaluated as they are. 16-bit ones are evaluated in FP32, on a copy: the exact master where
        the optimizer has one, or the 16-bit values themselves. The mean is taken in float64.

    Args:
        workload: What is trained.
        run: The guarded run; what its plan keeps in FP32 or rewrites is out of the way while the model is evaluated.
        master: False evaluates 16-bit weights as the values they have, also where a master exists.
    """
    random = RandomState.now()
    try:
        with run.applied.paused():
            return _measure(workload, run, master=master)
    finally:
        random.restore()


def _measure(workload: Workload, run: Run, *, master: bool) -> float:
    model = workload.model
    if any(param.dtype in (torch.float16, torch.bfloat16) for param in model.parameters()):
        model = copy.deepcopy(model).float()
        if master and isinstance(run.optimizer, optim.Optimizer):
            model.load_state_dict(run.optimizer.master_state_dict(workload.model))
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        if workload.evaluate is not None:
            with callable_from_cpu(model, run.device):
                return float(workload.evaluate(model))
        return _mean_loss(workload, model, run.device)
    finally:
        for module, training in modes:
            module.training = training


def _mean_loss(workload: Workload, model: nn.Module, device: torch.device) -> float:
    losses = [
        workload.loss_fn(model(*place(inputs, device, torch.float32)), *place(targets, device))
        for inputs, targets in workload.batches
    ]
    return float(torch.stack(losses).double().mean())
