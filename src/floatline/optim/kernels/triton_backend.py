"""The optimizer phase on CUDA and ROCm: three launches, whatever the number of tensors, and no host sync."""

from __future__ import annotations

from typing import Any, cast

import torch
import triton.language as tl
from torch import Tensor

from floatline.optim.kernels import torch_backend, triton_kernels
from floatline.optim.kernels.launches import FEW_REGISTERS, kind_of
from floatline.optim.kernels.pointer_table import SURVEY_SPAN, PointerTable
from floatline.optim.roster import Entries
from floatline.optim.rules import UpdateRule
from floatline.optim.storage import flat_view
from floatline.optim.survey import Decision, Entry, Survey, fill

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_KERNELS = cast("Any", triton_kernels)  # Triton's decorator leaves no signature that a type checker could follow
_SURVEY_BLOCK = 2048
_CHUNK = 4096  # sums that `decide` adds at a time
_TENSORS = 512  # tensors that it derives settings for at a time
# Elements that one program updates, and its warps: the fastest on an NVIDIA H200. An 8-bit state's block is 256, and
# within one warp nothing waits at a barrier.
_BLOCK = 256
_WARPS = 1


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
    table = _table(entries, None)
    _launch_survey(table)
    sums = torch.empty(len(entries), dtype=torch.float32, device=table.device)
    bad = torch.empty(len(entries), dtype=torch.int32, device=table.device)
    table.launch(
        _KERNELS.gather_kernel,
        table.num_tensors,
        (table.sums, table.bad, table.first_span_of, table.num_spans_of, sums, bad),
        {"CHUNK": 256},
        key="gather",
        num_warps=1,
    )
    return Survey(sums, bad)


def apply(
    rule: UpdateRule, entries: list[Entry], *, decision: Decision | None, update: str, states: str, seed: int
) -> None:
    """Make the step where the decision says so: one launch to derive, one for each kind of tensor to update.

    Numerics:
        The arithmetic of the torch backend, in float32 with fused multiply-adds: an AdamW step differs from it
        by at most 3 units in the last place of the master. Random choices use the same words. With states of 8 or
        16 bits, root and quotient are the GPU's fast ones, right to a few units in their last place.
        Checked by tests/optim/test_triton.py.
    """
    if not takes(entries):
        torch_backend.apply(rule, entries, decision=decision, update=update, states=states, seed=seed)
        return
    table = _table(entries, rule.state_names)
    applied = None
    if decision is None:
        _launch_decide(table, rule, mode="always")
    else:
        applied = decision.applied
        _launch_decide(table, rule, mode="given", applied=applied, factor=decision.factor)
    _launch_step(table, rule, applied=applied, update=update, states=states, seed=seed)


def survey_and_apply(
    rule: UpdateRule,
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
    table = _table(entries, rule.state_names)
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


def _addresses(entries: list[Entry]) -> list[int]:
    """Where the gradients lie, each laid out in memory as its weight is: the kernels walk both with one index."""
    if not isinstance(entries, Entries):
        for entry in entries:
            entry.grad = _laid_out(entry.grad, entry.weight)
        return [entry.grad.data_ptr() for entry in entries]
    if entries.laid_out:
        return entries.addresses
    workspace = entries.workspace
    if "contiguous" not in workspace:
        workspace["contiguous"] = all(entry.weight.is_contiguous() for entry in entries)
    if not (workspace["contiguous"] and all(map(Tensor.is_contiguous, entries.grads))):
        grads = [_laid_out(grad, entry.weight) for grad, entry in zip(entries.grads, entries, strict=True)]
        entries.take(grads, [grad.data_ptr() for grad in grads])
    entries.laid_out = True
    return entries.addresses


def _laid_out(grad: Tensor, weight: Tensor) -> Tensor:
    if weight.is_contiguous():
        return grad.contiguous()
    if grad.stride() == weight.stride():
        return grad
    return torch.empty_like(weight, dtype=grad.dtype).copy_(grad)


def _table(entries: list[Entry], state_names: tuple[str, ...] | None) -> PointerTable:
    """The table of these entries, with their states unless that is None: made once where they stay the same."""
    addresses = _addresses(entries)
    workspace = _workspace(entries)
    table = workspace.get("table")
    if table is None or (state_names is not None and table.state_names != state_names):
        fill(entries)
        table = workspace["table"] = PointerTable(entries, state_names or (), step_block=_BLOCK)
    table.refresh(addresses)
    return table


def _launch_survey(table: PointerTable) -> None:
    for dtype, spans in table.surveys.items():
        if spans.blocks.count:
            table.launch(
                _KERNELS.survey_kernel,
                spans.blocks.count,
                (table.table, spans.blocks.tensors, spans.blocks.offsets, spans.sums, spans.bad, table.num_tensors),
                {"SPAN": SURVEY_SPAN, "BLOCK": _SURVEY_BLOCK, "GRAD_TYPE": _TYPES[dtype]},
                key=dtype,
                num_warps=4,
            )


def _launch_decide(
    table: PointerTable,
    rule: UpdateRule,
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
    given = (
        unused if scale is None else scale,
        unused if clip_norm is None else clip_norm,
        table.nothing if skip is None else skip,
        table.nothing if applied is None else applied,
        unused if factor is None else factor,
        unused if norm is None else norm,
    )
    constants = {"RULE": rule.name, "MODE": mode, "HAS_CLIP": clip_norm is not None, "CHUNK": _CHUNK}
    table.launch(
        _KERNELS.decide_kernel,
        1,
        (
            table.sums,
            table.num_spans,
            *given,
            table.groups,
            table.hyper,
            table.counters,
            table.derived,
            table.num_tensors,
        ),
        {**constants, "TENSORS": _TENSORS},
        key=(rule.name, mode, clip_norm is None, *map(kind_of, given)),
        num_warps=8,
    )


def _launch_step(
    table: PointerTable, rule: UpdateRule, *, applied: Tensor | None, update: str, states: str, seed: int
) -> None:
    flag = table.nothing if applied is None else applied
    for bucket, blocks in table.steps.items():
        if not blocks.count:
            continue
        constants = {
            "BLOCK": table.step_block,
            "PIECE": table.step_block if states == "int8" else 32 * _WARPS,
            "RULE": rule.name,
            "DECIDED": applied is not None,
            "UPDATE": update,
            "STATES": states,
            "MOMENTUM": bucket.momentum,
            "NESTEROV": bucket.nesterov,
            "WEIGHT_TYPE": _TYPES[bucket.weight_dtype],
            "GRAD_TYPE": _TYPES[bucket.grad_dtype],
            "WHOLE": bucket.whole_counters,
        }
        table.launch(
            _KERNELS.step_kernel,
            blocks.count,
            (table.table, blocks.tensors, blocks.offsets, table.derived, flag, seed, table.num_tensors),
            constants,
            key=(bucket, rule.name, applied is None, update, states, seed, kind_of(flag)),
            num_warps=_WARPS,
            enable_fp_fusion=False,
            **(FEW_REGISTERS if states == "int8" else {}),
        )  # fmt: skip
