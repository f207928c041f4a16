"""The optimizer phase on CUDA and ROCm: three launches, whatever the number of tensors, and no host sync."""

from __future__ import annotations

from typing import Any, cast

import torch
import triton.language as tl
from torch import Tensor

from floatline.optim.entries import Entry
from floatline.optim.kernels import torch_backend, triton_kernels
from floatline.optim.kernels.pointer_table import SURVEY_BLOCK, PointerTable
from floatline.optim.rules import Rule
from floatline.optim.storage import flat_view
from floatline.optim.survey import Decision, Survey

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_KERNELS = cast("Any", triton_kernels)  # Triton's decorator leaves no signature that a type checker could follow
_CHUNK = 1024
# Elements that one program updates, and its warps: the fastest on an NVIDIA H200. An 8-bit state's block is 256.
_BLOCKS = {"fp32": 512, "bf16": 512, "int8": 256}
_WARPS = {"fp32": 2, "bf16": 4, "int8": 1}


def takes(entries: list[Entry]) -> bool:
    """Whether the kernels can walk over all of these: on one device, without gaps in memory."""
    workspace = _workspace(entries)
    if "takes" not in workspace:
        device = entries[0].weight.device
        dense = (entry.weight.device == device and flat_view(entry.weight) is not None for entry in entries)
        workspace["takes"] = all(dense)
    return workspace["takes"]


def survey(entries: list[Entry]) -> Survey:
    """Sum of squares and non-finite count of each gradient, in one launch for each gradient dtype."""
    if not takes(entries):
        return torch_backend.survey(entries)
    table = _table(_aligned(entries), (), "fp32")
    _launch_survey(table)
    sums = torch.zeros(len(entries), dtype=torch.float32, device=table.device)
    bad = torch.zeros(len(entries), dtype=torch.int32, device=table.device)
    first = 0
    for blocks in table.surveys.values():
        tensors = blocks.tensors.to(torch.int64)
        sums.index_add_(0, tensors, table.sums[first : first + blocks.count])
        bad.index_add_(0, tensors, table.bad[first : first + blocks.count])
        first += blocks.count
    return Survey(sums, bad)


def apply(rule: Rule, entries: list[Entry], *, decision: Decision | None, update: str, states: str, seed: int) -> None:
    """Make the step where the decision says so: one launch to derive, one for each kind of tensor to update.

    Numerics:
        The arithmetic of the torch backend, in float32 with fused multiply-adds: an AdamW step differs from it
        by at most 3 units in the last place of the master. Random choices use the same words.
        Checked by tests/optim/test_triton.py.
    """
    if not takes(entries):
        torch_backend.apply(rule, entries, decision=decision, update=update, states=states, seed=seed)
        return
    table = _table(_aligned(entries), rule.state_names, states)
    applied = None
    if decision is None:
        _launch_decide(table, rule, mode="always")
    else:
        applied = decision.applied
        _launch_decide(table, rule, mode="given", applied=applied, factor=decision.factor)
    _launch_step(table, rule, applied=applied, update=update, states=states, seed=seed)


def survey_and_apply(
    rule: Rule,
    entries: list[Entry],
    *,
    scale: float | Tensor | None,
    clip_norm: float | Tensor | None,
    skip: bool | Tensor | None,
    update: str,
    states: str,
    seed: int,
) -> Decision:
    """Survey, decide and step in three launches: what `survey`, `decide` and `apply` do one after the other."""
    table = _table(_aligned(entries), rule.state_names, states)
    _launch_survey(table)
    applied = torch.empty((), dtype=torch.bool, device=table.device)
    factor, norm = torch.empty(2, dtype=torch.float32, device=table.device).unbind()
    _launch_decide(
        table,
        rule,
        mode="survey",
        scale=table.scalar(1.0 if scale is None else scale),
        clip_norm=None if clip_norm is None else table.scalar(clip_norm),
        skip=None if skip is None else table.scalar(skip),
        applied=applied,
        factor=factor,
        norm=norm,
    )
    _launch_step(table, rule, applied=applied, update=update, states=states, seed=seed)
    return Decision(applied, factor, norm)


def _workspace(entries: list[Entry]) -> dict[Any, Any]:
    """Where things are kept for entries that stay the same; for others, a place that is forgotten."""
    return getattr(entries, "workspace", {})


def _aligned(entries: list[Entry]) -> list[Entry]:
    """Lay a gradient out in memory as its weight is: the kernels walk both with one index."""
    workspace = _workspace(entries)
    if "contiguous" not in workspace:
        workspace["contiguous"] = all(entry.weight.is_contiguous() for entry in entries)
    if workspace["contiguous"]:
        for entry in entries:
            if not entry.grad.is_contiguous():
                entry.grad = entry.grad.contiguous()
        return entries
    for entry in entries:
        if entry.grad.stride() != entry.weight.stride():
            entry.grad = torch.empty_like(entry.weight, dtype=entry.grad.dtype).copy_(entry.grad)
    return entries


def _table(entries: list[Entry], state_names: tuple[str, ...], states: str) -> PointerTable:
    """The table of these entries: made once where they stay the same, and refreshed."""
    workspace = _workspace(entries)
    table = workspace.get(state_names)
    if table is None:
        table = workspace[state_names] = PointerTable(entries, state_names, step_block=_BLOCKS[states])
    table.refresh([entry.grad for entry in entries])
    return table


def _launch_survey(table: PointerTable) -> None:
    first = 0
    for dtype, blocks in table.surveys.items():
        if blocks.count:
            _KERNELS.survey_kernel[(blocks.count,)](
                table.table, blocks.tensors, blocks.offsets, table.sums[first:], table.bad[first:], table.num_tensors,
                BLOCK=SURVEY_BLOCK, GRAD_TYPE=_TYPES[dtype], num_warps=4,
            )  # fmt: skip
        first += blocks.count


def _launch_decide(
    table: PointerTable,
    rule: Rule,
    *,
    mode: str,
    scale: Tensor | None = None,
    clip_norm: Tensor | None = None,
    skip: Tensor | None = None,
    applied: Tensor | None = None,
    factor: Tensor | None = None,
    norm: Tensor | None = None,
) -> None:
    unused = table.derived  # any address will do where the mode does not read it
    _KERNELS.decide_kernel[(1,)](
        table.sums, table.bad, table.num_survey_blocks,
        unused if scale is None else scale, unused if clip_norm is None else clip_norm,
        table.nothing if skip is None else skip,
        table.nothing if applied is None else applied, unused if factor is None else factor,
        unused if norm is None else norm,
        table.groups, table.hyper, table.counters, table.derived, table.num_tensors,
        RULE=rule.name, MODE=mode, HAS_CLIP=clip_norm is not None, CHUNK=_CHUNK, num_warps=8,
    )  # fmt: skip


def _launch_step(
    table: PointerTable, rule: Rule, *, applied: Tensor | None, update: str, states: str, seed: int
) -> None:
    for bucket, blocks in table.steps.items():
        if not blocks.count:
            continue
        _KERNELS.step_kernel[(blocks.count,)](
            table.table, blocks.tensors, blocks.offsets, table.derived,
            table.nothing if applied is None else applied, table.streams, table.starts, table.counters, seed,
            table.num_tensors, BLOCK=table.step_block, RULE=rule.name, DECIDED=applied is not None, UPDATE=update,
            STATES=states, MOMENTUM=bucket.momentum, NESTEROV=bucket.nesterov,
            WEIGHT_TYPE=_TYPES[bucket.weight_dtype], GRAD_TYPE=_TYPES[bucket.grad_dtype],
            num_warps=_WARPS[states], enable_fp_fusion=False,
        )  # fmt: skip
