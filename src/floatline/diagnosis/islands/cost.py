"""measure_cost: what an island gives up in time and memory, measured on replays of a captured step."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from floatline.precision.fp32_call import tf32_products
from floatline.probe.steps.captured_step import CapturedStep


@dataclass(frozen=True)
class IslandCost:
    """A step with an island, against the same step without.

    Args:
        modules: The island.
        seconds: Median time of forward and backward with it.
        seconds_without: The same without.
        time_ratio: Median of the ratios within a round.
        memory: Bytes with it.
        memory_without: Bytes without.
        memory_kind: 'peak' is what the CUDA allocator held at most above what it held before; 'saved' is what
            autograd keeps for the backward pass, counted by tensor, where there is no allocator to ask.
        rounds: How many pairs were timed.
        tf32: Whether the island's products used TF32.
    """

    modules: tuple[str, ...]
    seconds: float
    seconds_without: float
    time_ratio: float
    memory: int
    memory_without: int
    memory_kind: Literal["peak", "saved"]
    rounds: int
    tf32: bool = False

    @property
    def memory_ratio(self) -> float:
        """Bytes with the island over bytes without."""
        return self.memory / self.memory_without if self.memory_without else 1.0

    def __str__(self) -> str:
        """'the step takes 1.02 of its time and 1.04 of its memory (peak)'."""
        what = "peak memory" if self.memory_kind == "peak" else "tensors saved for backward, counted"
        how = "FP32 with TF32 products" if self.tf32 else "FP32"
        return (
            f"{', '.join(self.modules)} in {how}: forward and backward take {self.time_ratio:.2f} of their time, "
            f"{self.memory_ratio:.2f} of their memory ({what})"
        )


def measure_cost(step: CapturedStep, modules: Sequence[str], *, tf32: bool = False, rounds: int = 7) -> IslandCost:
    """Time and memory of a step with modules in FP32, against the same step without; the two take turns.

    The optimizer's update is not in it: it is the same in both; nor is what a replay needs around it. A model that is
    compiled is timed as eager code. On a CPU the times are those of 16-bit products that are imitated there, and say
    nothing about a GPU.

    Args:
        step: The step; it may fail.
        modules: The island.
        tf32: Let its products use TF32.
        rounds: Pairs of replays, after one of each that does not count.
    """
    device = step.device
    times: dict[bool, list[float]] = {False: [], True: []}
    bytes_held: dict[bool, int] = {}
    for number in range(rounds + 1):
        for own in (False, True):
            islands = tuple(modules) if own else ()
            with tf32_products() if own and tf32 else contextlib.nullcontext():
                if not number:
                    bytes_held[own] = _measure_memory(step, islands)
                    continue
                times[own].append(step.replay(islands=islands).compute_seconds)
    return IslandCost(
        modules=tuple(modules),
        seconds=statistics.median(times[True]),
        seconds_without=statistics.median(times[False]),
        time_ratio=statistics.median(own / bare for own, bare in zip(times[True], times[False], strict=True)),
        memory=bytes_held[True],
        memory_without=bytes_held[False],
        memory_kind="peak" if device.type == "cuda" else "saved",
        rounds=rounds,
        tf32=tf32,
    )


def _measure_memory(step: CapturedStep, islands: tuple[str, ...]) -> int:
    if step.device.type != "cuda":
        return _count_saved(step, islands)
    step.replay(islands=islands)  # makes the copies of the weights, which stay
    torch.cuda.synchronize(step.device)
    before = torch.cuda.memory_allocated(step.device)
    torch.cuda.reset_peak_memory_stats(step.device)
    step.replay(islands=islands)
    return torch.cuda.max_memory_allocated(step.device) - before


def _count_saved(step: CapturedStep, islands: tuple[str, ...]) -> int:
    """Bytes that autograd keeps for backward, each storage once, the weights themselves left out."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in step.state.captured.values()}
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        is_weight = isinstance(tensor, torch.nn.Parameter) or storage.data_ptr() in weights
        if not is_weight:
            # The tensor is held, so that no other takes its address while the step runs.
            kept[storage.data_ptr()] = storage.nbytes(), tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step.replay(islands=islands)
    return sum(size for size, _ in kept.values())
