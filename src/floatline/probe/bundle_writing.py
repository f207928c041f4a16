"""What goes into a replay bundle: a captured step as tensors and plain values."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from floatline.findings import Finding
from floatline.probe.bundle_files import DATA, STATE, pack, write_files
from floatline.probe.step_origin import Origin

if TYPE_CHECKING:
    from floatline.probe.captured_step import Step


def write_step(step: Step, folder: Path, *, with_data: bool, findings: Sequence[Finding] = ()) -> Path:
    """Write a captured step; `Step.save` is the way to it."""
    tensors = {f"model.{name}": tensor for name, tensor in step.state.captured.items()}
    tensors |= {f"buffer.{name}": tensor for name, tensor in step.state.captured_buffers.items()}
    random_tensors, random_state = step.random_state.as_parts()
    optimizer, states = _pack_optimizer(step.optimizer)
    batches, data = pack(list(step.batches), "batch") if with_data else (None, {})
    fields = {
        **describe_origin("build", step.origin, findings),
        "plan": step.plan.model_dump(mode="json"),
        "scale": step.scale,
        "checked": step.checked,
        "half_on_cpu": step.half_on_cpu,
        "training": step.state.training,
        "autocast": step.autocast.as_json(),
        "random": random_state,
        "optimizer": optimizer,
        "batches": batches,
    }
    parts = {STATE: {**tensors, **random_tensors, **states}}
    return write_files(folder, fields, {**parts, DATA: data} if with_data else parts)


def describe_origin(kind: str, origin: Origin, findings: Sequence[Finding]) -> dict[str, Any]:
    """The fields that every bundle has."""
    return {
        "kind": kind,
        "origin": {**asdict(origin), "islands": list(origin.islands)},
        "findings": [finding.as_json() for finding in findings],
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {"python": platform.python_version(), "torch": str(torch.__version__), "device": device}


def _pack_optimizer(optimizer: torch.optim.Optimizer | None) -> tuple[Any, dict[str, Tensor]]:
    if optimizer is None:
        return None, {}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = cast("dict[Tensor, dict[str, Any]]", optimizer.state)
    tree = {
        "class": type(optimizer).__name__,
        "state": [dict(state[p]) if p in state else {} for p in params],
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
    }
    return pack(tree, "optimizer")
