"""Where every tensor of an optimizer lies: addresses, sizes and blocks, kept on the device between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from floatline.optim.kernels.launches import Launches
from floatline.optim.kernels.triton_kernels import NUM_DERIVED, NUM_HYPER
from floatline.optim.survey import Entry

SURVEY_SPAN = 16384  # elements that one program surveys
_MOST_SCALARS = 16


@dataclass(frozen=True)
class Blocks:
    """The work of one launch: program i takes elements of tensor `tensors[i]` from `offsets[i]` on."""

    tensors: Tensor  # int32
    offsets: Tensor  # int64
    count: int


@dataclass(frozen=True)
class Spans:
    """The survey of the gradients of one dtype, and where it writes what it finds."""

    blocks: Blocks
    sums: Tensor  # float32
    bad: Tensor  # int32


@dataclass(frozen=True)
class Bucket:
    """Tensors that one compiled kernel serves."""

    weight_dtype: torch.dtype
    grad_dtype: torch.dtype
    momentum: bool
    nesterov: bool
    whole_counters: bool  # whether the first element begins a counter: of four words, each for the states of two


class PointerTable:
    """Device-side tables for a list of entries; only gradient addresses and group settings change between steps."""

    def __init__(self, entries: Sequence[Entry], state_names: tuple[str, ...], *, step_block: int) -> None:
        self.step_block = step_block
        self.state_names = state_names
        self.launch = Launches()
        self.device = entries[0].weight.device
        self.num_tensors = len(entries)
        self._groups: list[dict[str, object]] = []
        numbers: dict[int, int] = {}
        for entry in entries:
            if id(entry.group) not in numbers:
                numbers[id(entry.group)] = len(self._groups)
                self._groups.append(entry.group)
        self.groups = self._upload([numbers[id(entry.group)] for entry in entries], torch.int32)
        self.counters = self._upload([entry.state["step"].data_ptr() for entry in entries], torch.int64)
        self._grads = [entry.grad.data_ptr() for entry in entries]
        records = [number for entry in entries for number in _record(entry, state_names)]
        self.table = self._upload(self._grads + records, torch.int64)
        self.derived = torch.empty(self.num_tensors * NUM_DERIVED, dtype=torch.float32, device=self.device)
        self.nothing = torch.zeros((), dtype=torch.bool, device=self.device)
        self.hyper = torch.empty(len(self._groups) * NUM_HYPER, dtype=torch.float64, device=self.device)
        self._settings: list[float] = []
        self._scalars: dict[float, Tensor] = {}
        sizes = [entry.weight.numel() for entry in entries]
        self.steps: dict[Bucket, Blocks] = {}
        buckets = [_bucket(entry) for entry in entries]
        for bucket in dict.fromkeys(buckets):
            members = [i for i, b in enumerate(buckets) if b == bucket]
            self.steps[bucket] = self._blocks(members, sizes, step_block)
        cut: dict[torch.dtype, Blocks] = {}
        for dtype in dict.fromkeys(b.grad_dtype for b in buckets):
            members = [i for i, b in enumerate(buckets) if b.grad_dtype == dtype]
            cut[dtype] = self._blocks(members, sizes, SURVEY_SPAN)
        self.num_spans = sum(blocks.count for blocks in cut.values())
        self.sums = torch.zeros(self.num_spans, dtype=torch.float32, device=self.device)
        self.bad = torch.zeros(self.num_spans, dtype=torch.int32, device=self.device)
        self.surveys: dict[torch.dtype, Spans] = {}
        self.num_spans_of = torch.zeros(self.num_tensors, dtype=torch.int32, device=self.device)
        self.first_span_of = torch.zeros(self.num_tensors, dtype=torch.int32, device=self.device)
        first = 0
        for dtype, blocks in cut.items():
            own = slice(first, first + blocks.count)
            self.surveys[dtype] = Spans(blocks, self.sums[own], self.bad[own])
            counts = torch.bincount(blocks.tensors, minlength=self.num_tensors).to(torch.int32)
            self.num_spans_of += counts
            self.first_span_of += torch.where(counts > 0, first + counts.cumsum(0) - counts, 0).to(torch.int32)
            first += blocks.count

    def refresh(self, addresses: list[int]) -> None:
        """Note where the gradients are now, and what the groups say now; copies only what changed."""
        if addresses != self._grads:
            self._grads = addresses
            self.table[: self.num_tensors].copy_(_pinned(addresses, torch.int64, self.device), non_blocking=True)
        settings: list[float] = []
        on_device: dict[int, Tensor] = {}
        for i, group in enumerate(self._groups):
            row = _settings(group)
            if isinstance(row[0], Tensor):
                on_device[i * NUM_HYPER] = row[0]
                row[0] = 0.0
            settings += row  # type: ignore[arg-type]
        if settings != self._settings:
            self._settings = settings
            self.hyper.copy_(_pinned(settings, torch.float64, self.device), non_blocking=True)
        for place, lr in on_device.items():
            self.hyper[place : place + 1].copy_(lr.detach().reshape(1))

    def scalar(self, value: float | Tensor) -> Tensor:
        """A number where the kernels can read it; a number of the host is written there once for each value."""
        if isinstance(value, Tensor):
            return value.to(self.device, non_blocking=True)
        if value not in self._scalars:
            if len(self._scalars) >= _MOST_SCALARS:
                self._scalars.clear()
            self._scalars[value] = torch.full((), value, dtype=torch.float32, device=self.device)
        return self._scalars[value]

    def _blocks(self, members: list[int], sizes: list[int], block: int) -> Blocks:
        """Cut the member tensors into blocks, on the host in one go."""
        counts = torch.tensor([-(-sizes[i] // block) for i in members], dtype=torch.int64, device="cpu")
        tensors = torch.repeat_interleave(torch.tensor(members, dtype=torch.int32, device="cpu"), counts)
        firsts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        offsets = (torch.arange(len(tensors), device="cpu") - firsts) * block
        return Blocks(tensors.to(self.device), offsets.to(self.device), len(tensors))

    def _upload(self, values: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device="cpu").to(self.device)


def _record(entry: Entry, state_names: tuple[str, ...]) -> list[int]:
    """What the table has of one tensor, but for its gradient; 0 where the tensor has no such part."""

    def address(name: str) -> int:
        tensor = entry.state.get(name)
        return tensor.data_ptr() if tensor is not None else 0

    names = (*state_names, "", "")[:2]
    extra = address("remainder") or address("compensation")
    scales = [address(f"{name}_scale") for name in names]
    states = [address(name) for name in names]
    place = [entry.weight.numel(), entry.stream, entry.start, entry.state["step"].data_ptr()]
    return [entry.weight.data_ptr(), *states, extra, *scales, *place]


def _bucket(entry: Entry) -> Bucket:
    momentum = float(entry.group.get("momentum", 0.0)) != 0.0
    nesterov = bool(entry.group.get("nesterov", False))
    return Bucket(entry.weight.dtype, entry.grad.dtype, momentum, nesterov, entry.start % 8 == 0)


def _settings(group: dict[str, object]) -> list[object]:
    """A group's row of the table: lr, decay, two betas (or momentum and dampening), eps, sign."""
    betas = group.get("betas") or (group.get("momentum", 0.0), group.get("dampening", 0.0))
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.device.type == "cpu":
        lr = float(lr)
    sign = -1.0 if group.get("maximize") else 1.0
    return [lr, group.get("weight_decay", 0.0), *betas, group.get("eps", 0.0), sign, 0.0, 0.0]  # type: ignore[misc]


def _pinned(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A host tensor that can be copied without waiting; torch keeps its memory until the copy is done."""
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
