"""Recorder: every operation of one step, with its numbers, its place and its FP32 twin."""

# torch shows its dispatcher to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import gc
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from floatline.numerics.half_on_cpu import unwraps_itself
from floatline.optim.mesh import local_part
from floatline.probe.trace.kernel_checks import KernelChecks
from floatline.probe.trace.measures import Measures, RunningSum, find_sums
from floatline.probe.trace.op_origins import OpOrigin, Whereabouts
from floatline.probe.trace.schemas import TracedCall, count_parts, find_places, schema_of, tensors_of
from floatline.probe.trace.storages import (
    Storages,
    batch_tensors,
    geometry,
    is_whole,
    name_start,
    name_state,
    storage_key,
    weights_of,
)
from floatline.probe.trace.trace import Op, Operand, Trace, Values
from floatline.probe.trace.twins import Attempt, Shadow, Twins
from floatline.probe.trace.zero_products import ZeroProducts
from floatline.probe.watch.patches import Aside

# Elements of all gradients up to which they are compared on the host: no operation must be loaded onto a GPU for them.
_SMALL = 2**18
_LOWEST, _HIGHEST = -200, 1024  # exponents below are counted there: FP32 itself ends at -149
_NUM_FIGURES = 5  # of a gradient, before these counts
_FROZEN_BY_PYTHON = 2000  # objects: 3.12 begins with some 400, and a gc.freeze() beside torch has 100,000 and more
_JOINED = 2**14  # elements of a gradient up to which it is compared with others as one


class Recorder(TorchDispatchMode):
    """Records one step, below autograd and autocast, without changing a bit of it::

        with Recorder(model, batch=(inputs, targets)) as recorder:
            loss = loss_fn(model(*inputs), *targets)
            loss.backward()
            optimizer.step()
        recorder.trace.ops

    Enter it after `HalfOnCPU`, so that it sees the step's operations and not those that HalfOnCPU makes of
    them. An exception of the step passes through; `trace` then holds what ran before it.

    Cost: no tensor of the step is kept alive. Each storage that is not its own twin has a float32 twin while
    it lives (twice the bytes of a 16-bit one), and measuring takes some five float32 copies of one tensor at
    a time. On a GPU the figures of a tensor, under 104 bytes, stay on the device until the end, or a copy of
    a small tensor and its twin: at most 64 MiB of them.

    Numerics:
        See `Twins` and `Measures`. The step's results are bit for bit those without the recorder.
        Checked by tests/probe/trace/test_recorder.py.

    Args:
        model: Gives modules, parameters and buffers their names.
        batch: Inputs and targets; gives batch tensors their roles.
        twins: Whether to compute FP32 twins.
        weights: FP32 values of parameters and buffers, by name, and of batch tensors, by role, for those twins that
            shall not start from the 16-bit value, say because a buffer lost its values when the model was cast.

    Attributes:
        trace: What was recorded; complete after the `with`.
        model: The model.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        batch: tuple[Sequence[Any], Sequence[Any]] = ((), ()),
        twins: bool = True,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.trace = Trace()
        self.model = model
        self._process = os.getpid()
        self._storages = Storages()
        self._measures = Measures()
        self._whereabouts = Whereabouts(model, on_update=self._name_state)
        self._twins = Twins(self._storages) if twins else None
        self._checks = KernelChecks() if twins else None
        self._zero_products = ZeroProducts()
        self._gradients_due = False
        self._given: Mapping[str, Tensor] = {}
        self._is_cut = False
        self._failures: Counter[str] = Counter()
        self._measures.expect(model.parameters())
        with Aside():
            name_start(self._storages, model, batch)
            for _, name, tensor in weights_of(model):
                if self._twins and weights and name in weights:
                    self._twins.start_from(tensor, weights[name])
            for role, tensor in batch_tensors(batch):
                if self._twins and weights and role in weights and tensor.is_floating_point():
                    self._twins.start_from(tensor, weights[role])

    def adopt(self, model: nn.Module) -> None:
        """Name modules, parameters and buffers by a model that was not known when the step began."""
        self.model = model
        self._measures.expect(model.parameters())
        self._whereabouts.name_modules(model)
        name_start(self._storages, model, ((), ()))

    def name_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Name weights that belong to no module of the model."""
        for name, weight in weights.items():
            self._storages.name(weight, f"param:{name}")

    def name_batch(self, inputs: Sequence[Any], targets: Sequence[Any]) -> None:
        """Give the batch its roles while the step runs, but for what the step itself has made.

        `trace.meta["made_inputs"]` holds the operations that made such inputs.
        """
        made: list[int] = []
        for role, tensor in batch_tensors((inputs, targets)):
            known = self._storages.find(tensor)
            if known is None or known.made_by is None:
                self._storages.name(tensor, role)
            elif role.startswith("inputs"):
                made.append(known.made_by)
        self.trace.meta["made_inputs"] = made

    def note_outputs(self, outputs: Mapping[str, Tensor]) -> None:
        """Note what a step without a backward pass ends in: in `trace.gradients`, where harm is looked for."""
        with Aside():
            for name, tensor in outputs.items():
                self.trace.gradients[name] = self._operand(tensor)

    def find_origin(self, tensor: Tensor) -> tuple[int | None, Tensor | None]:
        """The operation that made a tensor, and its FP32 value where that is another; None each where it has none."""
        memory = self._storages.find(tensor)
        twin = self._twins.of(tensor).twin if self._twins and memory is not None else None
        return (None if memory is None else memory.made_by), twin

    def __enter__(self) -> Recorder:
        # A trace is many small objects: Python would look through all that there is for garbage again and again.
        self._freezes = gc.get_freeze_count() < _FROZEN_BY_PYTHON
        if self._freezes:
            gc.freeze()
        self._whereabouts.__enter__()
        super().__enter__()  # pyright: ignore[reportUnknownMemberType]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # pyright: ignore[reportUnknownMemberType]
        self._whereabouts.__exit__()
        try:
            with Aside():
                if self._gradients_due:
                    self._read_gradients()
                self._measures.read()
                zeroed = self._zero_products.read()
                if zeroed:
                    self.trace.meta["zeroed"] = zeroed
        finally:
            if self._freezes:
                gc.unfreeze()
        self.trace.meta["twin_failures"] = dict(self._twins.failures) if self._twins else {}
        self.trace.meta["failures"] = dict(self._failures)
        if self._checks and self._checks.found:
            self.trace.meta["kernels"] = [found.as_json() for found in self._checks.found]
            self.trace.arguments = self._checks.arguments

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: tuple[Any, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run and record one operation; torch calls this."""
        kwargs = kwargs or {}
        if self._is_cut or os.getpid() != self._process:
            return func(*args, **kwargs)  # a worker that loads data was forked meanwhile
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)  # shapes only: nothing to record
        if any(unwraps_itself(kind) for kind in types):
            return NotImplemented  # a tensor subclass unwraps itself first; its plain tensors come here
        schema = schema_of(func)
        if schema.silent or schema.empty:
            return func(*args, **kwargs)
        if schema.view:
            if self._whereabouts.needs_place():
                self._whereabouts.remember(None, self._locate(TracedCall(func, args, kwargs)))
            return func(*args, **kwargs)
        call = TracedCall(func, args, kwargs)
        return self._record(call, self._locate(call))

    def _locate(self, call: TracedCall) -> OpOrigin:
        return self._whereabouts.locate(tracked=any(a.tensor.requires_grad for a in call.tensors))

    def _record(self, call: TracedCall, origin: OpOrigin) -> Any:
        first, num = len(self.trace.ops), count_parts(call)
        ops = [
            Op(
                first + i,
                call.schema.name,
                origin.phase,
                origin.module,
                origin.file,
                origin.line,
                origin.function,
                node=origin.node,
                forward=origin.forward,
                recomputed=origin.recomputed,
            )
            for i in range(num)
        ]
        attempt, sums = self._prepare(ops, call)
        before = self._checks.begin(call) if self._checks and num == 1 else None
        for op in ops:
            self._gradients_due = self._gradients_due or op.phase == "backward"
            if op.phase == "backward" and not op.file:
                self._inherit(op)
        try:
            result = call.run()
        except Exception as error:
            self.trace.ops += ops[:1]
            message = str(error).partition("\n")[0]
            self.trace.meta["exception"] = {"op": first, "type": type(error).__name__, "message": message}
            raise
        # Results in the memory of an argument are views of it, or the argument itself after it was written.
        old = {storage_key(a.tensor) for a in call.tensors if a.name not in call.schema.outs}
        old.discard(None)
        fresh = [None if t is None or storage_key(t) in old else t for t in tensors_of(result)]
        if not call.schema.writes and not any(t is not None for t in fresh):
            self._whereabouts.remember(None, origin)
            return result
        self._whereabouts.remember(first, origin, in_place=bool(call.schema.writes))
        self.trace.ops += ops
        with Aside():
            try:
                self._settle(ops, call, attempt, fresh, sums)
                if self._checks and num == 1:
                    self._checks.finish(before, call, first, fresh)
            except Exception:
                self._failures[call.schema.name] += 1
        return result

    def _prepare(self, ops: list[Op], call: TracedCall) -> tuple[Attempt, list[list[RunningSum | None]]]:
        """What must be read before an operation may write over it. Nothing here may break the step."""
        numbers = call.numbers()
        for i, op in enumerate(ops):
            op.scalars = numbers[i : i + 1] if len(ops) == len(numbers) > 1 else numbers
        with Aside():
            try:
                if ops and ops[0].phase != "backward" and self._gradients_due:
                    self._read_gradients()
                read = [a for a in call.tensors if a.name not in call.schema.outs]
                places = find_places([a.name for a in read], len(ops))
                for operand, place in zip(self._operands([a.tensor for a in read]), places, strict=True):
                    for op in ops if place is None else ops[place : place + 1]:
                        op.inputs.append(operand)
                if len(ops) == 1:
                    self._zero_products.note(ops[0], call)
                sums = find_sums(call) if self._twins else []
                return (self._twins.begin(call) if self._twins else Attempt("none")), sums
            except Exception:
                self._failures[call.schema.name] += 1
                return Attempt("none"), []

    def _settle(
        self,
        ops: list[Op],
        call: TracedCall,
        attempt: Attempt,
        fresh: list[Tensor | None],
        sums: list[list[RunningSum | None]],
    ) -> None:
        """Twins, makers and figures of what an operation gave."""
        if len(ops) == 1 and len(fresh) == 1 and not call.written:
            self._settle_one(ops[0], call, attempt, fresh, sums)
            return
        shadows = [Shadow() for _ in (*fresh, *call.written)]
        if self._twins:
            shadows[: len(fresh)] = self._twins.finish(attempt, call, fresh)
            if attempt.state != "none":
                shadows[len(fresh) :] = [self._twins.of(t) for t in call.written]
        written = [a.name for a in call.tensors if a.name in call.schema.writes - call.schema.outs]
        places = find_places(["" for _ in fresh], len(ops)) + find_places(written, len(ops))
        made: dict[int, list[Tensor]] = {op.index: [] for op in ops}
        changes = self._twins.measure_changes(call, fresh) if self._twins and not call.schema.writes else []
        every = zip_longest((*fresh, *call.written), shadows, places, changes)
        for tensor, shadow, place, changed in every:
            if tensor is None:
                continue
            values = self._measures.measure(tensor, shadow.twin, exact=shadow.exact)
            values.error = values.error if changed is None else changed
            for op in ops if place is None else ops[place : place + 1]:
                op.outputs.append(values)
                made[op.index].append(tensor)
                self._note_maker(op, tensor, values)
        for i, op in enumerate(ops):
            own = sums if len(ops) == 1 else [candidates[i : i + 1] for candidates in sums]
            self._measures.count_stuck(op, own, made[op.index])

    def _settle_one(
        self,
        op: Op,
        call: TracedCall,
        attempt: Attempt,
        fresh: list[Tensor | None],
        sums: list[list[RunningSum | None]],
    ) -> None:
        """The same for an operation that gives one new tensor, as most do."""
        (shadow,) = self._twins.finish(attempt, call, fresh) if self._twins else (Shadow(),)
        changes = self._twins.measure_changes(call, fresh) if self._twins and not call.schema.writes else ()
        tensor = fresh[0]
        if tensor is None:
            return
        values = self._measures.measure(tensor, shadow.twin, exact=shadow.exact)
        for changed in changes:
            values.error = values.error if changed is None else changed
        op.outputs.append(values)
        self._note_maker(op, tensor, values)
        if sums:
            self._measures.count_stuck(op, sums, [tensor])

    def _note_maker(self, op: Op, tensor: Tensor, values: Values) -> None:
        memory = self._storages.open(tensor)
        if memory is None:
            return
        memory.made_by = op.index
        memory.values = {geometry(tensor): values}
        if is_whole(tensor):
            memory.values[tensor.dtype,] = values

    def _inherit(self, op: Op) -> None:
        """Give a sum of gradients, which belongs to no line, the line of the newest gradient in it."""
        made_by = max((o.made_by for o in op.inputs if o.made_by is not None), default=None)
        if made_by is None:
            return
        maker = self.trace.ops[made_by]
        op.file, op.line, op.function, op.module = maker.file, maker.line, maker.function, op.module or maker.module

    def _operands(self, read: list[Tensor]) -> list[Operand]:
        if len(read) == 1:
            return [self._operand(read[0])]
        seen = [(key, geometry(t)) if (key := storage_key(t)) is not None else id(t) for t in read]
        return [self._operand(t, shared=seen.count(view) > 1) for t, view in zip(read, seen, strict=True)]

    def _operand(self, tensor: Tensor, *, shared: bool = False) -> Operand:
        memory = self._storages.open(tensor)
        if memory is None:
            return Operand(self._measure(tensor), shared=shared)
        values = memory.values.get(view := geometry(tensor))
        if values is None:
            # A view of the whole storage has the figures of any other such view.
            whole = memory.values.get((tensor.dtype,)) if is_whole(tensor) else None
            values = self._measures.reshape(whole, tuple(tensor.shape)) if whole else self._measure(tensor)
            memory.values[view] = values
        return Operand(values, memory.made_by, memory.role(int(tensor.storage_offset())), shared)

    def _measure(self, tensor: Tensor) -> Values:
        shadow = self._twins.of(tensor) if self._twins else Shadow()
        return self._measures.measure(tensor, shadow.twin, exact=shadow.exact)

    def cut(self) -> None:
        """What comes until the recorder is left is not recorded."""
        self._is_cut = True

    def give_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Note gradients that no parameter holds, by its name."""
        with Aside():
            self._given = gradients
            self._read_gradients()
            self._given = {}

    def _list_gradients(self) -> dict[str, Tensor]:
        """The gradients that are there, by the names of their parameters."""
        held = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return {name: local_part(gradient) for name, gradient in (self._given or held).items()}

    def _read_gradients(self) -> None:
        """Note the gradients at the end of a backward."""
        self._gradients_due = False
        for name, gradient in self._list_gradients().items():
            self._storages.name(gradient, f"grad:{name}")
            self.trace.gradients[name] = self._operand(gradient)

    def _name_state(self, optimizer: Any) -> None:
        with Aside():
            name_state(self._storages, self.model, optimizer)


class GradientRecorder(Recorder):
    """A recorder whose trace has the gradients of all parameters compared with FP32's, of the same weights and batch.

    `trace.meta["gradients"]` holds: `error`, the norm of the difference over the norm of FP32's, both over all
    parameters (None where one of either is not finite); `lost`, the share of elements that are 0 and are not in
    FP32; `exponents`, how many elements of FP32's gradients lie in [2**k, 2**(k+1)), by k.

    Numerics:
        Sums in float64, over the scaled gradients as backward left them.
        Checked by tests/probe/runs/test_changes.py.
    """

    def _read_gradients(self) -> None:
        super()._read_gradients()
        gradients = self._list_gradients().values()
        gradients = [gradient for gradient in gradients if gradient.layout is torch.strided and gradient.numel()]
        small = sum(gradient.numel() for gradient in gradients) <= _SMALL
        rows: list[Tensor] = []
        joined: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for gradient in gradients:
            shadow = self._twins.of(gradient) if self._twins else Shadow(exact=True)
            own = gradient.detach().to("cpu" if small else gradient.device).flatten().double()
            twin = own if shadow.twin is None else shadow.twin.detach().to(own.device).flatten().double()
            if own.numel() > _JOINED:
                rows.append(_compare(own, twin))
            else:
                joined.setdefault(own.device, []).append((own, twin))
        rows += [_compare(*map(torch.cat, zip(*pairs, strict=True))) for pairs in joined.values()]
        # Read at the end: each gradient by itself would wait for the device.
        read = torch.stack([row.cpu() for row in rows]).sum(0) if rows else torch.zeros(_NUM_FIGURES)
        bad, difference, norm, lost, nonzero, *counts = cast("list[float]", read.tolist())
        difference = math.inf if bad else difference
        error = math.sqrt(difference / norm) if norm else (math.inf if difference else 0.0)
        self.trace.meta["gradients"] = {
            "error": error if math.isfinite(error) else None,
            "lost": lost / max(nonzero, 1),
            "exponents": {str(k): int(count) for k, count in enumerate(counts, _LOWEST) if count},
        }


def _compare(own: Tensor, twin: Tensor) -> Tensor:
    """What is not finite; the squares of the difference and of the twin; what is 0 in one, and all; by exponent."""
    fine = twin.isfinite() & own.isfinite()
    own, twin = torch.where(fine, own, 0.0), torch.where(fine, twin, 0.0)
    counts = [own.numel() - fine.sum(), ((own == 0) & (twin != 0)).sum(), (twin != 0).sum()]
    bad, lost, nonzero = (count.double() for count in counts)
    figures = torch.stack([bad, (own - twin).square().sum(), twin.square().sum(), lost, nonzero])
    powers = (torch.frexp(twin).exponent.double() - 1).clamp(min=_LOWEST)
    powers = torch.where(twin != 0, powers, -math.inf)  # below all, and not counted
    counted = torch.histc(powers, _HIGHEST - _LOWEST + 1, _LOWEST - 0.5, _HIGHEST + 0.5)
    return torch.cat([figures, counted])
