"""Muon's step with torch operations, on every device: whole matrices, gathered from shards where they are cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from floatline.numerics.rounding import random_words
from floatline.optim import mesh, storage
from floatline.optim.kernels.exchange import turn_shards
from floatline.optim.kernels.waves import half_of
from floatline.optim.rules import UpdateRule, momentum_direction, move_along
from floatline.optim.survey import Decision, Entry, fill, state_stream

_STATE = "momentum_buffer"


def apply(
    rule: UpdateRule,
    entries: list[Entry],
    *,
    decision: Decision | None,
    update: str,
    states: str,  # noqa: ARG001
    seed: int,
) -> None:
    """Make one step, or leave everything as it is where the decision says so.

    Numerics:
        float32 weights and states on one process: bit for bit torch.optim.Muon where ns_dtype is "bf16". Otherwise the
        same arithmetic on the float32 numbers that weights and states stand for, and on shards the same bits as on one
        process. The decision is read on the host on a CPU only; elsewhere a step that is not made is computed, and what
        it would have written is not. Checked by tests/optim/test_muon.py.
    """
    applied, factor = None, None
    if decision is not None and _is_read(decision):
        if not bool(decision.applied):
            return
        factor = float(decision.factor)
    elif decision is not None:
        applied, factor = decision.applied, decision.factor
    fill(entries)
    for batch in _batches(entries):
        loaded = [_load(entry, factor, kept=applied is not None) for entry in batch]
        if batch[0].sharded is None:
            for one in loaded:
                rule.update([one.master], [one.grad], {_STATE: [one.buffer]}, [0.0], one.entry.group)
        else:
            directions = [momentum_direction(one.grad, one.buffer, one.entry.group) for one in loaded]
            for one, (direction, scale) in zip(loaded, turn_shards(batch, directions), strict=True):
                whole = one.entry.weight if one.entry.sharded is None else one.entry.sharded
                move_along(one.master, direction, scale, one.entry.group, shape=whole.shape)
        for one in loaded:
            _store(one, applied, update=update, seed=seed)


def _is_read(decision: Decision) -> bool:
    """Whether reading the decision waits for nothing."""
    return decision.applied.is_cpu


def _batches(entries: list[Entry]) -> Iterator[list[Entry]]:
    """Matrices that are worked on together: one, or as many as processes share them, of which each turns one."""
    shared: dict[object, list[Entry]] = {}
    for entry in entries:
        if entry.sharded is None:
            yield [entry]
        else:
            shared.setdefault(mesh.row_group(entry.sharded), []).append(entry)
    for group, members in shared.items():
        size = 1 if group is None else torch.distributed.get_world_size(group)  # pyright: ignore[reportArgumentType]
        # Of similar size in a batch, so that no process waits long for another.
        members.sort(key=lambda entry: (-_whole_numel(entry), entry.stream))
        yield from (members[i : i + size] for i in range(0, len(members), size))


def _whole_numel(entry: Entry) -> int:
    return (entry.weight if entry.sharded is None else entry.sharded).numel()


@dataclass(slots=True)
class _WideMatrix:
    """An entry's numbers in float32: its own tensors where these are float32 and may be changed in place."""

    entry: Entry
    master: Tensor
    grad: Tensor
    buffer: Tensor


def _load(entry: Entry, factor: float | Tensor | None, *, kept: bool) -> _WideMatrix:
    grad = entry.grad.to(torch.float32)
    if factor is not None and not (isinstance(factor, float) and factor == 1.0):
        grad = grad * factor
    extra = next((entry.state[name] for name in storage.EXTRAS.values() if name in entry.state), None)
    master = storage.load_weight(entry.weight.detach(), extra)
    buffer = storage.read_state(entry.state[_STATE], entry.state.get(f"{_STATE}_scale"))
    if kept:
        master, buffer = master.clone(), buffer.clone()
    return _WideMatrix(entry, master, grad, buffer)


def _store(one: _WideMatrix, applied: Tensor | None, *, update: str, seed: int) -> None:
    """Write back what is not in its place yet, and only where the step is made."""
    entry, state = one.entry, one.entry.state
    state["step"] += 1.0 if applied is None else applied
    weight, extra = entry.weight.detach(), next((name for name in storage.EXTRAS.values() if name in state), None)
    if one.master.data_ptr() != weight.data_ptr() or one.master.dtype != weight.dtype:
        words = _words(entry, weight, entry.stream, seed) if update == "stochastic" else None
        new, rest = storage.store_weight(one.master, weight.dtype, update, words)
        weight.copy_(_chosen(new, weight, applied))
        if extra is not None and rest is not None:
            state[extra].copy_(_chosen(rest, state[extra], applied))
    buffer = state[_STATE]
    if one.buffer.data_ptr() == buffer.data_ptr() and one.buffer.dtype == buffer.dtype:
        return
    new_state = {name: torch.empty_like(state[name]) for name in (_STATE, f"{_STATE}_scale") if name in state}
    words = None
    if buffer.dtype != torch.float32:
        words = half_of(_words(entry, None, state_stream(entry.stream), seed), 0)
    storage.write_state(new_state, _STATE, one.buffer, words)
    for name, value in new_state.items():
        state[name].copy_(_chosen(value, state[name], applied))


def _chosen(new: Tensor, old: Tensor, applied: Tensor | None) -> Tensor:
    return new if applied is None else torch.where(applied, new, old)


def _words(entry: Entry, like: Tensor | None, stream: int, seed: int) -> Tensor:
    """A random number for each element, in the weight's order in memory; laid out as a tensor where one is given."""
    step = entry.state["step"]
    words = random_words(
        entry.weight.numel(),
        seed=seed,
        step=int(step) if step.is_cpu else step.to(torch.int64),
        stream=stream,
        start=entry.start,
        device=entry.weight.device,
    )
    if like is None:
        return words
    return words.view(like.shape) if storage.flat_view(like) is None else words.as_strided(like.shape, like.stride())
