"""What a trainer does with a workload's parts: tensors placed where the model is, the optimizer checked, the metric."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn

from floatline import optim
from floatline.errors import GuardError
from floatline.guard.run import Run
from floatline.numerics.moving import send
from floatline.plans import Plan
from floatline.precision.dtypes import DTYPES
from floatline.precision.nested import find_tensors, map_tensors
from floatline.precision.random_state import RandomState
from floatline.workload import Workload


def place(tree: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """The same structure with its tensors on the device, and floating-point ones in the dtype.

    Args:
        tree: A tensor, or lists, tuples, mappings and dataclasses with tensors in them.
        device: Where tensors go; those in pinned memory without waiting.
        dtype: Format of 16- and 32-bit floating-point tensors; None leaves it.
    """

    def move(tensor: Tensor) -> Tensor:
        wanted = dtype if dtype is not None and tensor.dtype in DTYPES.values() else tensor.dtype
        return send(tensor, torch.device(device), wanted)

    return map_tensors(move, tree)


@contextlib.contextmanager
def callable_from_cpu(model: nn.Module, device: torch.device) -> Generator[None]:
    """Inside, a model on another device can be called with tensors on the CPU, and answers on the CPU.

    What evaluates a model was often written where everything was on the CPU: its held-out data are there, and so is
    what it compares them with. A call with a tensor that is not on the CPU is left as it is.

    Numerics:
        Tensors are moved and never cast; the model computes on its device. Checked by tests/training/test_placement.py.

    Args:
        model: Only calls of the model itself are looked at, not those of its parts and its other methods.
        device: Where its weights are.
    """
    if device.type == "cpu":
        yield
        return
    calls: list[bool] = []  # for each call under way, innermost last, whether it came from the CPU

    def bring(_module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        tensors = find_tensors(args, named)
        calls.append(bool(tensors) and all(tensor.device.type == "cpu" for tensor in tensors))
        return (place(args, device), place(named, device)) if calls[-1] else None

    def give_back(_module: nn.Module, _args: tuple[Any, ...], _named: dict[str, Any], output: Any) -> Any:
        return map_tensors(Tensor.cpu, output) if calls.pop() else None

    # Outermost: what else hangs on the model sees the call as it is in training.
    before = model.register_forward_pre_hook(bring, prepend=True, with_kwargs=True)
    after = model.register_forward_hook(give_back, with_kwargs=True, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def take_optimizer(optimizer: Any, plan: Plan) -> torch.optim.Optimizer:
    """The optimizer, with the plan's update; GuardError where it would round updates of 16-bit weights away."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise GuardError(f"make_optimizer gave a {type(optimizer).__name__}. It must give a torch.optim.Optimizer.")
    if plan.weights == "fp32":
        return optimizer
    if plan.update or plan.states:
        return optim.convert(optimizer, update=plan.update or "exact", states=plan.states)
    if isinstance(optimizer, optim.Optimizer):
        return optimizer
    name = type(optimizer).__name__
    advice = f"floatline.optim.{name}" if hasattr(optim, name) else "an optimizer of floatline.optim"
    raise GuardError(
        f"Plan '{plan.name}' has {plan.weights} weights, and {name} rounds small updates of 16-bit weights to nothing. "
        f"Use {advice} in make_optimizer, or a plan with fp32 weights"
        + ("; 'update: exact' in the plan swaps it." if hasattr(optim, name) else ".")
    )


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
