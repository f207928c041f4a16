"""The optimizer phase with torch operations, and on a CPU with compiled ones; for every device without a backend."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from floatline.errors import OptimizerError
from floatline.numerics import foreach
from floatline.numerics.split import widen_many
from floatline.optim import storage
from floatline.optim.kernels.compiled_steps import step_compiled
from floatline.optim.kernels.waves import Wave, WavePart, cut_into_waves, half_of
from floatline.optim.rules import UpdateRule
from floatline.optim.survey import Decision, Entry, Survey, fill, state_stream


def survey(entries: list[Entry]) -> Survey:
    """Sum of squares and number of non-finite values of each gradient, in the entries' order."""
    fill(entries)
    grads = [entry.grad for entry in entries]
    norms = foreach.norm(grads, 2, dtype=torch.float32)
    sums = torch.stack(norms).square_()
    # A finite sum has no non-finite term; reading it costs nothing on a CPU and saves a second pass.
    if sums.is_cpu and bool(sums.isfinite().all()):
        return Survey(sums, torch.zeros_like(sums, dtype=torch.int32))
    counts = torch.stack([grad.isfinite().logical_not_().sum() for grad in grads])
    return Survey(sums, counts.to(torch.int32))


def apply(
    rule: UpdateRule, entries: list[Entry], *, decision: Decision | None, update: str, states: str, seed: int
) -> None:
    """Make one step, or leave everything as it is where the decision says so; reads the decision on the host.

    Numerics:
        float32 weights and states, gradients as they are: bit for bit torch.optim with foreach on the same
        device. Otherwise the same arithmetic on the float32 numbers that weights and states stand for.
    """
    factor = 1.0
    if decision is not None:
        if not bool(decision.applied):
            return
        factor = float(decision.factor)
    fill(entries)
    counters = [entry.state["step"] for entry in entries]
    foreach.add_(counters, torch.ones((), dtype=torch.float32, device=counters[0].device))
    steps = cast("list[float]", torch.stack(counters).tolist())
    whole: dict[int, list[tuple[Entry, float]]] = {}
    buckets: dict[tuple[Any, ...], list[WavePart]] = {}
    for entry, step in zip(entries, steps, strict=True):
        kind = (id(entry.group), entry.weight.dtype, entry.grad.dtype)
        if states == "fp32" and kind[1:] == (torch.float32, torch.float32):
            whole.setdefault(kind[0], []).append((entry, step))
        else:
            buckets.setdefault(kind, []).append(WavePart(entry, step, _flatten(entry)))
    for pairs in whole.values():
        _update_whole(rule, pairs, factor)
    for parts in buckets.values():
        if not step_compiled(rule, parts, factor, update=update, states=states):
            for wave in cut_into_waves(parts, padded=states == "int8"):
                _update_wave(rule, wave, factor=factor, update=update, seed=seed)
        for part in parts:
            # A weight with gaps in memory was worked on as a copy.
            if part.flat["weight"].data_ptr() != part.entry.weight.data_ptr():
                part.entry.weight.copy_(part.flat["weight"].view(part.entry.weight.shape))


def _update_whole(rule: UpdateRule, pairs: list[tuple[Entry, float]], factor: float) -> None:
    """float32 needs no storage in between: the rule works on the tensors as they are."""
    group = pairs[0][0].group
    states = {name: [entry.state[name] for entry, _ in pairs] for name in rule.states_for(group)}
    weights, grads = [entry.weight for entry, _ in pairs], [entry.grad for entry, _ in pairs]
    if factor != 1.0:
        grads = list(foreach.mul(grads, factor))
    rule.update(weights, grads, states, [step for _, step in pairs], group)


def _update_wave(rule: UpdateRule, wave: Wave, *, factor: float, update: str, seed: int) -> None:
    """Load, update, store."""
    first = wave.slices[0].part
    group, dtype = first.entry.group, first.entry.weight.dtype
    names = rule.states_for(group)
    extra = next((name for name in storage.EXTRAS.values() if name in first.flat), None)

    grads = widen_many(wave.gather("grad"))
    if factor != 1.0:
        grads = grads * factor
    master = None
    if dtype != torch.float32:
        master = storage.load_weight(wave.gather("weight"), None if extra is None else wave.gather(extra))
    kept = {name: _load_state(wave, name) for name in names}
    rule.update(
        wave.views("weight") if master is None else wave.cut(master),
        wave.cut(grads),
        {name: wave.views(name) if flat is None else wave.cut(flat) for name, flat in kept.items()},
        [s.part.step for s in wave.slices],
        group,
    )

    if master is not None:
        words = wave.random_words(seed, [s.part.entry.stream for s in wave.slices]) if update == "stochastic" else None
        weight, rest = storage.store_weight(master, dtype, update, words)
        wave.scatter("weight", weight)
        if extra is not None and rest is not None:
            wave.scatter(extra, rest)
    narrow = {name: flat for name, flat in kept.items() if flat is not None}
    if not narrow:
        return
    words = wave.state_words(seed, [state_stream(s.part.entry.stream) for s in wave.slices])
    for index, (name, flat) in enumerate(narrow.items()):
        stored, scale = storage.store_state(flat, first.flat[name].dtype, half_of(words, index))
        wave.scatter(name, stored)
        if scale is not None:
            wave.scatter_scales(name, scale)


def _load_state(wave: Wave, name: str) -> Tensor | None:
    """The state as new float32 numbers, or None where it is float32 and can be changed in place."""
    flat = wave.slices[0].part.flat
    if flat[name].dtype == torch.float32:
        return None
    return storage.load_state(wave.gather(name), wave.gather_scales(name) if f"{name}_scale" in flat else None)


def _flatten(entry: Entry) -> dict[str, Tensor]:
    """The entry's tensors as flat ones, in one order: the weight's in memory where it has one."""
    weight, grad = entry.weight, entry.grad
    if weight.is_contiguous():
        flat = {name: tensor.view(-1) for name, tensor in entry.state.items() if name != "step"}
        flat["weight"], flat["grad"] = weight.view(-1), grad.reshape(-1)
        return flat
    in_order = storage.flat_view(weight)
    stride = torch.empty(weight.shape, device="meta").stride() if in_order is None else weight.stride()
    flat = {"weight": weight.reshape(-1) if in_order is None else in_order}
    for name, tensor in entry.state.items():
        if name.endswith("_scale"):
            flat[name] = tensor
        elif name != "step":
            if tensor.stride() != stride:
                raise OptimizerError(
                    f"State {name!r} has strides {tensor.stride()} and its weight {stride}. "
                    "Choose the memory format before the first step, or load a checkpoint after changing it."
                )
            flat[name] = tensor.as_strided((tensor.numel(),), (1,))
    if grad.stride() != stride:
        grad = torch.empty_strided(weight.shape, stride, dtype=grad.dtype, device=grad.device).copy_(grad)
    flat["grad"] = grad.as_strided((grad.numel(),), (1,))
    return flat
