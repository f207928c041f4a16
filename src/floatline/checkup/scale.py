"""A model on many GPUs under FSDP2, on paper: bytes that each process holds and moves, and the least time. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from floatline.checkup.shapes import ModelSize, ParameterShape
from floatline.errors import PlanError
from floatline.hardware.rates import PER_NODE, Rates
from floatline.plans import Plan

SCALE_HOW = {
    "weights": "rows of every parameter cut as FSDP2 cuts them; of the process that holds most",
    "master": "2 bytes a trained 16-bit weight, for an optimizer with an exact FP32 master",
    "gradients": "one for each trained weight that the process holds, in its dtype",
    "states": "as the optimizer holds them for the weights of this process",
    "gathered": "whole parameters of the root and of two blocks, gradients of the root and of one, while they are used",
    "activations": "what backward needs of this process's batch",
}


@dataclass(frozen=True)
class Scale:
    """What one process of many holds, moves and needs for a step.

    Args:
        model: What is trained.
        plan: The plan's name.
        world: How many processes share it.
        parts: Bytes by part of the process that holds most.
        traffic: Bytes that a process receives in a step, by collective and dtype; it sends as many.
        seconds: The least time of each kind of work at the data sheet's rates; empty where these are not known.
        rates: Whose rates.
    """

    model: ModelSize
    plan: str
    world: int
    parts: dict[str, int]
    traffic: dict[str, int]
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    rates: Rates | None = None

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def least_seconds(self) -> float | None:
        """The least time of a step: communication may hide behind computing, the optimizer comes after both."""
        if not self.seconds:
            return None
        return max(self.seconds["compute"], self.seconds["communication"]) + self.seconds["optimizer"]

    def as_json(self) -> dict[str, Any]:
        """Plain data for reports."""
        return {
            "model": self.model.name,
            "parameters": self.model.num_parameters,
            "plan": self.plan,
            "world": self.world,
            "tokens": self.model.tokens,
            "unit": "bytes of one process",
            "parts": {**self.parts, "total": self.total},
            "traffic": self.traffic,
            "seconds": {**self.seconds, "least": self.least_seconds} if self.seconds else None,
            "rates": self.rates.title if self.rates else None,
            "how": SCALE_HOW,
        }


def scale_up(model: ModelSize, plan: Plan, *, world: int, rates: Rates | None = None) -> Scale:
    """Bytes and least time of one process under FSDP2: each block and the root sharded over all processes.

    Numerics:
        Parameters are cut by rows: a process holds ceil(rows / world) of each at most. Parameters travel in the plan's
        compute dtype, forward and again backward (the root's once); gradients are reduced in the weights' dtype.
        weights, master, gradients, states and traffic are exact for FSDP2's defaults, activations for the reference
        block. Checked by tests/checkup/test_scale.py against live objects and collectives of two processes; no run on
        several GPUs was made.

    Args:
        model: What is trained, with the batch of one process.
        plan: Dtypes of weights and compute.
        world: How many processes.
        rates: Of the GPU; None tells no time.
    """
    if world < 1:
        raise PlanError(f"world is {world}. Use the number of processes, 1 or more.")
    stored = 4 if plan.weights == "fp32" else 2
    moved = 4 if plan.compute == "fp32" else 2
    everything = [*model.root, *(shape for block in model.blocks for shape in block)]
    held = _share(everything, world)
    trained = _share((shape for shape in everything if shape.trained), world)
    largest = max((sum(map(_numel, block)) for block in model.blocks), default=0)
    root = sum(map(_numel, model.root))
    parts = {
        "weights": held * stored,
        "master": trained * plan.master_bytes,
        "gradients": trained * stored,
        "states": round(trained * model.state_bytes * plan.states_share),
        "gathered": (2 * root + 3 * largest) * moved if world > 1 else 0,
        "activations": model.activations,
    }
    blocks_share = sum(_share(block, world) for block in model.blocks)
    root_share = _share(model.root, world)
    traffic = {
        f"all-gather forward, {plan.compute}": (world - 1) * (root_share + blocks_share) * moved,
        f"all-gather backward, {plan.compute}": (world - 1) * blocks_share * moved,
        f"reduce-scatter, {plan.weights}": (world - 1) * trained * stored,
    }
    seconds: dict[str, float] = {}
    if rates is not None:
        seconds = {
            "compute": model.operations / (rates.full if plan.compute == "fp32" else rates.half),
            "communication": sum(traffic.values())
            / (rates.link if world <= PER_NODE else min(rates.link, rates.network)),
            "optimizer": _optimizer_bytes(parts) / rates.memory,
        }
    return Scale(model, plan.name, world, parts, traffic, seconds, rates)


def _optimizer_bytes(parts: dict[str, int]) -> int:
    """Gradients are read; weights, master and states are read and written."""
    return parts["gradients"] + 2 * (parts["weights"] + parts["master"] + parts["states"])


def _numel(shape: ParameterShape) -> int:
    return shape.rows * shape.columns


def _share(shapes: Iterable[ParameterShape], world: int) -> int:
    """Elements that the first process holds: FSDP2 cuts rows as torch.chunk does, and pads what travels to it."""
    return sum(-(-shape.rows // world) * shape.columns for shape in shapes)
