"""Twins: the FP32 value that every tensor of a step would have, had the step been computed in FP32."""

# torch shows its dispatcher to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from floatline.probe.trace.schemas import Schema, TracedCall, has_twin, tensors_of
from floatline.probe.trace.storages import StorageFacts, Storages
from floatline.probe.trace.twin_rules import (
    CHOICES,
    OPAQUE,
    REBASED,
    RULES,
    Wide,
    does_not_round,
    dtype_of_twin,
    full_float32,
    widened,
)


@dataclass(slots=True)
class Shadow:
    """The twin of one output: a tensor of its own, itself (`exact`), or none."""

    twin: Tensor | None = None
    exact: bool = False


@dataclass(slots=True)
class Attempt:
    """How far the twin of an operation has come.

    Args:
        state: "later": it runs after the operation; "exact": the operation gives what FP32 gives;
            "own": its results are the twin's by decree (random numbers); "done"; "none": there is no twin.
        results: The tensors that the twin gave.
    """

    state: Literal["later", "exact", "own", "done", "none"]
    results: list[Tensor | None] = field(default_factory=list["Tensor | None"])


class Twins:
    """Runs every operation a second time on FP32 twins.

    A tensor without a twin of its own is its own twin: what a step starts from (weights, batch), and what
    float32 operations make of it. So a step in FP32 has no twins and costs nothing here.
    Twins lie element for element beside their storages, so views and in-place operations need no care.
    Random numbers, integers, indices and masks are those of the step; how many of them FP32 would choose otherwise is
    told by `measure_changes`. What reaches Python (`.item()`) is the step's, too.

    Numerics:
        float16, bfloat16 and float8 become float32, other dtypes stay. TF32 is off for twins.
        Attention is computed from its definition in float32. Checked by tests/probe/trace/test_twins.py.

    Attributes:
        failures: How often the twin of an operation could not be computed; its outputs have none, and
            what follows starts again from the step's own values.
    """

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self.failures: Counter[str] = Counter()

    def of(self, tensor: Tensor) -> Shadow:
        """The twin of a tensor that lies in memory."""
        if not has_twin(tensor):
            return Shadow()
        twin = self._own(tensor)
        return Shadow(twin, exact=twin is None)

    def start_from(self, tensor: Tensor, value: Tensor) -> None:
        """Give a tensor another FP32 value than its own to start from."""
        if not has_twin(tensor) or value.shape != tensor.shape:
            return
        memory = self._storages.open(tensor)
        alike = tensor.is_contiguous() and tensor.nbytes == _bytes(tensor) and value.is_contiguous()
        if memory is not None and memory.twin is None and alike and value.dtype == dtype_of_twin(tensor.dtype):
            # The value itself, which the step must not write to.
            memory.twin, memory.dtype = value.detach().clone().view(-1), tensor.dtype
            self._storages.grew(4 * value.numel())
        else:
            self._view(self._materialize(tensor), tensor).copy_(value)

    def begin(self, call: TracedCall) -> Attempt:
        """Run the twin of an operation that writes to its arguments: before it, while they are as they were."""
        if not call.schema.writes:
            return Attempt("later")
        if self._stays_exact(call, call.floats):
            return Attempt("exact")
        if _is_foreign(call.schema) or call.schema.random:
            return Attempt("own" if call.schema.random else "none")
        try:
            for tensor in call.written:
                if has_twin(tensor):
                    self._materialize(tensor)
        except Exception:
            return self._fail(call)
        return self._attempt(call, ())

    def finish(self, attempt: Attempt, call: TracedCall, outputs: Sequence[Tensor | None]) -> list[Shadow]:
        """The twins of what an operation gave, kept for what follows."""
        if attempt.state == "later":
            attempt = self._run(call, outputs)
        if attempt.state in ("own", "none"):
            self._drop([a.tensor for a in call.tensors if a.name in call.schema.writes])
        if attempt.state != "done":
            own = attempt.state != "none"
            return [Shadow(exact=own and t is not None and has_twin(t)) for t in outputs]
        dropped = {*REBASED.get(call.schema.base, ()), *call.schema.outs}
        self._drop([a.tensor for a in call.tensors if a.name in dropped])
        try:
            return [self._keep(t, twin) for t, twin in zip(outputs, attempt.results, strict=True)]
        except Exception:
            self._fail(call)
            return [Shadow() for _ in outputs]

    def measure_changes(self, call: TracedCall, outputs: Sequence[Tensor | None]) -> list[float | None]:
        """Of each integer or boolean output, the share of elements that FP32 would choose otherwise; None elsewhere."""
        none: list[float | None] = [None for _ in outputs]
        if call.schema.base not in CHOICES:
            return none
        chosen = [t is not None and not has_twin(t) for t in outputs]
        if not any(chosen) or not any(map(self._has_own, call.floats)):
            return none
        try:
            twins = tensors_of(self._call(call, outputs))
        except Exception:
            self._fail(call)
            return none
        pairs = zip(outputs, twins, chosen, strict=True)
        return [_share_of_others(a, b) if own and a is not None and b is not None else None for a, b, own in pairs]

    def _run(self, call: TracedCall, outputs: Sequence[Tensor | None]) -> Attempt:
        made = [t for t in outputs if t is not None and has_twin(t)]
        if not made or self._stays_exact(call, made):
            return Attempt("exact")
        if _is_foreign(call.schema):
            return Attempt("none")
        if call.schema.random and call.schema.base not in RULES:
            return Attempt("own")
        return self._attempt(call, outputs)

    def _attempt(self, call: TracedCall, outputs: Sequence[Tensor | None]) -> Attempt:
        try:
            return Attempt("done", tensors_of(self._call(call, outputs)))
        except Exception:
            return self._fail(call)

    def _fail(self, call: TracedCall) -> Attempt:
        self.failures[call.schema.name] += 1
        return Attempt("none")

    def _drop(self, tensors: Sequence[Tensor]) -> None:
        """Let tensors be their own twins from here on."""
        for tensor in tensors:
            memory = self._storages.find(tensor)
            if memory is None or memory.twin is None:
                continue
            twin = _twin_for(memory, tensor)
            if twin is not None and tensor.numel() * tensor.element_size() < _bytes(tensor):
                self._view(twin, tensor).copy_(tensor)  # the rest of the storage keeps its twin
            else:
                memory.twin = None

    def _stays_exact(self, call: TracedCall, made: Sequence[Tensor]) -> bool:
        """Whether an operation gives in its own dtypes what it gives in FP32."""
        if any(map(self._has_own, call.floats)):
            return False
        return does_not_round(call, {t.dtype for t in made})

    def _call(self, call: TracedCall, outputs: Sequence[Tensor | None]) -> Any:
        schema = call.schema

        def widen(name: str, tensor: Tensor) -> Tensor:
            if not schema.writes:
                return self._widen(tensor, written=False, out=False)
            return self._widen(tensor, written=name in schema.writes, out=name in schema.outs)

        args, kwargs = widened(call, widen)
        rule = RULES.get(schema.base)
        multiplies = not schema.pointwise and any(t.is_cuda for t in call.floats)
        with full_float32() if multiplies else nullcontext():
            return rule(Wide(call.func, args, kwargs, outputs)) if rule else call.func(*args, **kwargs)

    def _widen(self, tensor: Tensor, *, written: bool, out: bool) -> Tensor:
        if out:
            return torch.empty(0, dtype=dtype_of_twin(tensor.dtype), device=tensor.device)
        if not has_twin(tensor):
            return tensor.clone() if written else tensor
        twin = self._own(tensor)
        if twin is not None:
            return twin
        return tensor.to(dtype_of_twin(tensor.dtype))

    def _has_own(self, tensor: Tensor) -> bool:
        memory = self._storages.find(tensor)
        return memory is not None and memory.twin is not None and _twin_for(memory, tensor) is not None

    def _own(self, tensor: Tensor) -> Tensor | None:
        memory = self._storages.find(tensor)
        twin = None if memory is None else _twin_for(memory, tensor)
        return None if twin is None else self._view(twin, tensor)

    @staticmethod
    def _view(base: Tensor, tensor: Tensor) -> Tensor:
        alike = base.shape == tensor.shape and base.stride() == tensor.stride() and not tensor.storage_offset()
        if alike and not (tensor.is_conj() or tensor.is_neg()):
            return base  # most tensors show their storage as it was made
        view = base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        view = view.conj() if tensor.is_conj() else view
        return torch.ops.aten._neg_view.default(view) if tensor.is_neg() else view

    def _materialize(self, tensor: Tensor) -> Tensor:
        """The twin of the whole storage of a tensor, made from its values where there is none."""
        memory = self._storages.open(tensor)
        if memory is None:
            raise TypeError(f"A {tensor.layout} tensor has no storage to lay a twin beside.")
        twin = _twin_for(memory, tensor)
        if twin is None:
            flat = tensor.as_strided((_bytes(tensor) // tensor.element_size(),), (1,), 0)
            twin = flat.to(dtype_of_twin(tensor.dtype), copy=True)
            memory.twin, memory.dtype = twin, tensor.dtype
            self._storages.grew(4 * twin.numel())
        return twin

    def _keep(self, tensor: Tensor | None, twin: Tensor | None) -> Shadow:
        if tensor is None or twin is None or not has_twin(tensor):
            return Shadow()
        if tensor.shape != twin.shape:
            raise ValueError("The twin has another shape than its tensor. Report the operation.")
        memory = self._storages.open(tensor)
        if memory is None:
            return Shadow()
        size = _bytes(tensor) // tensor.element_size()
        alike = tensor.stride() == twin.stride() and not tensor.storage_offset() and not twin.storage_offset()
        if _twin_for(memory, tensor) is None and alike and size == tensor.numel() and has_twin(twin):
            # A tensor of its own, or memory of the step would be written through it.
            memory.twin, memory.dtype = twin, tensor.dtype
            self._storages.grew(4 * size)
            return Shadow(twin)
        view = self._view(self._materialize(tensor), tensor)
        view.copy_(twin)
        return Shadow(view)


def _share_of_others(own: Tensor, twin: Tensor) -> float:
    """The share of elements that differ; of lists of other lengths, how much longer one is."""
    if own.shape != twin.shape:
        return abs(own.numel() - twin.numel()) / max(own.numel(), twin.numel(), 1)
    return float((own != twin).float().mean()) if own.numel() else 0.0


def _is_foreign(schema: Schema) -> bool:
    """Whether an operation may do more than calculate: kernels of others, collectives."""
    return not schema.name.startswith("aten.") or schema.base in OPAQUE


def _twin_for(memory: StorageFacts, tensor: Tensor) -> Tensor | None:
    """The twin of a memory, where it has the dtype and the size that a tensor in it has."""
    twin = memory.twin
    if twin is None or memory.dtype is None:
        return None
    if memory.dtype != tensor.dtype:
        if memory.dtype.to_real() != tensor.dtype.to_real():
            return None
        twin = twin.view(twin.dtype.to_complex() if tensor.is_complex() else twin.dtype.to_real())
    return twin if twin.numel() * tensor.element_size() == _bytes(tensor) else None


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
