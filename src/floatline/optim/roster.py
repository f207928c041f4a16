"""Who takes part in a step: parameters with a gradient and their state, and which of them others have written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from floatline.optim import hyperparameters, mesh, storage
from floatline.optim.mesh import local_part
from floatline.optim.rules import UpdateRule
from floatline.optim.survey import Entry


@dataclass(frozen=True)
class Footprint:
    """Bytes of each part, as counted from the tensors; of this process where parameters are sharded.

    Args:
        parts: Bytes by part: "weights", "gradients", "step", the states, their "_scale"s, "remainder" or
            "compensation", and "copies" of weights that others write before every step.
        num_parameters: How many weights there are.
    """

    parts: dict[str, int]
    num_parameters: int

    @classmethod
    def of(
        cls, params: Iterable[Tensor], state: Mapping[Tensor, Mapping[str, Any]], *, copies: Iterable[Tensor] = ()
    ) -> Footprint:
        """Count the tensors."""
        parts = {"weights": 0, "gradients": 0}
        count = 0
        for param in params:
            weight = local_part(param)
            count += weight.numel()
            parts["weights"] += weight.nbytes
            if param.grad is not None:
                parts["gradients"] += local_part(param.grad).nbytes
            for name, value in state.get(param, {}).items():
                parts[name] = parts.get(name, 0) + local_part(value).nbytes
        for copy in copies:
            parts["copies"] = parts.get("copies", 0) + copy.nbytes
        return cls(parts, count)

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def per_parameter(self) -> dict[str, float]:
        """Bytes of each part for one weight."""
        return {name: size / max(self.num_parameters, 1) for name, size in self.parts.items()}

    def __str__(self) -> str:
        """A table for people."""
        width = max(map(len, self.parts))
        rows = [(name, size) for name, size in self.parts.items() if size]
        lines = [f"{self.num_parameters:,} parameters, {self.total:,} bytes"]
        for name, size in [*rows, ("total", self.total)]:
            lines.append(f"  {name:<{width}}  {size:>15,}  {size / max(self.num_parameters, 1):6.2f} a parameter")
        return "\n".join(lines)


_PLAIN = (nn.Parameter, Tensor)
_NOTHING = torch.empty(0)
# Mapped over lists: the interpreter's own share of a pass over hundreds of tensors is what it would cost otherwise.
_grad, _dtype, _address = attrgetter("grad"), attrgetter("dtype"), Tensor.data_ptr


class Entries(list[Entry]):
    """Entries that stay the same from step to step; a backend may keep what it has built for them here.

    Attributes:
        grads: The gradients of this step, in order. The entries' own are set where `fill` is called.
        addresses: Where these lie.
        laid_out: Whether each is known to lie in memory as its weight does.
        workspace: What a backend keeps.
    """

    def __init__(self, entries: list[Entry]) -> None:
        super().__init__(entries)
        self.grads: list[Tensor] = [entry.grad for entry in entries]
        self.addresses = list(map(_address, self.grads))
        self.workspace: dict[Any, Any] = {}
        self.laid_out = False
        self._filled = True  # whether the entries have these gradients, ...
        self._held = True  # ... or any

    def fill(self) -> None:
        """Give each entry its gradient, for a backend that looks at entries one by one."""
        if self._filled:
            return
        for entry, grad in zip(self, self.grads, strict=True):
            entry.grad = grad
        self._filled = self._held = True

    def take(self, grads: list[Tensor], addresses: list[int]) -> None:
        """Hold the gradients of a new step, or the same ones in another layout."""
        self.grads, self.addresses = grads, addresses
        self._filled = self.laid_out = False

    def release(self) -> None:
        """Let go of the gradients."""
        self.grads = []
        self._filled = False
        if self._held:
            for entry in self:
                entry.grad = _NOTHING
            self._held = False


class Roster:
    """Who takes part in a step. Asking again costs a few passes in C over the parameters instead of a new list.

    Gradients are held during a step only: kept longer, they would take memory while the next ones are computed.

    Args:
        params: Parameters that have a gradient.
        entries: What a backend needs of them, in the same order.
        idle: Parameters that have none.
        groups: The optimizer's groups.
    """

    def __init__(
        self, params: list[Tensor], entries: list[Entry], idle: list[Tensor], groups: list[dict[str, Any]]
    ) -> None:
        self.params = params
        self.entries = Entries(entries)
        self._idle = idle
        self._dtypes = list(map(_dtype, self.entries.grads))
        self._addresses = list(map(_address, params))
        self._members = [(group, group.get("momentum") == 0, list(group["params"])) for group in groups]

    def refresh(self, groups: list[dict[str, Any]], state: Mapping[Tensor, Any]) -> bool:
        """Take the new gradients; False if anything else has changed, and a new roster is needed."""
        if not self._has_members(groups):
            return False
        if self.params and state.get(self.params[0]) is not self.entries[0].state:
            return False
        grads = list(map(_grad, self.params))
        try:
            addresses = list(map(_address, grads))
        except (TypeError, RuntimeError):  # a gradient is None, or sparse: asking first would cost as much as the rest
            return False
        if list(map(_dtype, grads)) != self._dtypes or list(map(_address, self.params)) != self._addresses:
            return False
        if any(param.grad is not None for param in self._idle):
            return False
        self.entries.take(grads, addresses)
        return True

    def _has_members(self, groups: list[dict[str, Any]]) -> bool:
        """Whether the same parameters are in the same groups, and the same groups need states."""
        if len(groups) != len(self._members):
            return False
        for group, (known, stateless, params) in zip(groups, self._members, strict=True):
            if group is not known or (group.get("momentum") == 0) != stateless or len(group["params"]) != len(params):
                return False
            if not all(map(is_, group["params"], params)):
                return False
        return True

    def release(self) -> None:
        """Let go of the gradients."""
        self.entries.release()


def collect(
    groups: list[dict[str, Any]],
    state: Mapping[Tensor, dict[str, Tensor]],
    *,
    rule: UpdateRule,
    update: str,
    states: str,
) -> tuple[list[Tensor], list[Entry], Roster | None]:
    """The parameters that have a gradient, what a backend needs of them, and a roster for the next step.

    Missing states are made. There is no roster for sharded parameters, whose local tensors are new in every step.

    Args:
        groups: The optimizer's groups.
        state: The optimizer's state; gives an empty dict for a new parameter.
        rule: The arithmetic.
        update: How 16-bit weights take their update.
        states: How states are stored.
    """
    params: list[Tensor] = []
    entries: list[Entry] = []
    idle: list[Tensor] = []
    plain = True
    stream = -1
    extra = storage.EXTRAS.get(update, "step")
    for group in groups:
        wide = {"step", *rule.states_for(group)}
        narrow = wide | {extra}
        for param in group["params"]:
            stream += 1
            grad = param.grad
            if grad is None:
                idle.append(param)
                continue
            if grad.layout != torch.strided or not grad.is_floating_point():
                hyperparameters.refuse_grad(param, grad)
            own = state[param]
            if not own.keys() >= (wide if param.dtype == torch.float32 else narrow):
                _complete(own, param, rule.states_for(group), update=update, states=states)
            params.append(param)
            if type(param) in _PLAIN:
                entries.append(Entry(param, grad, own, group, stream, 0))
            else:
                plain = False
                local = {name: mesh.local_part(tensor) for name, tensor in own.items()}
                weight, local_grad = mesh.local_part(param), mesh.local_grad(param, grad)
                entries.append(Entry(weight, local_grad, local, group, stream, mesh.start_of(param), param))
    if not plain:
        return params, entries, None
    roster = Roster(params, entries, idle, groups)
    return params, roster.entries, roster


def _complete(state: dict[str, Tensor], param: Tensor, names: tuple[str, ...], *, update: str, states: str) -> None:
    """Add the parts of a parameter's state that are not there yet."""
    weight = mesh.local_part(param.detach())
    new = {"step": torch.zeros((), dtype=torch.float32, device=weight.device)}
    for name in names:
        if name not in state:
            new |= storage.new_state(weight, name, states)
    new |= storage.new_extra(weight, update)
    for key, tensor in new.items():
        if key not in state:
            state[key] = mesh.like_param(param, key, tensor)


_version = attrgetter("_version")


class Writes:
    """Weights and the extras beside them (remainders or compensations), as the last step left them.

    torch counts the changes of a tensor, and reading the count does not wait for the device. If a weight was changed
    since the last step and its extra was not, then the extra belongs to a weight that is gone: it becomes zero. If
    both were changed, or the extra is another tensor now, then somebody has put both back together: a checkpoint or
    a rollback. They stay as they are.

    A pruning mask writes all elements before every step, and most of them as they were. If their extras became zero
    each time, small updates would be lost. So a weight that was written before two steps in a row is copied after
    the second, and after each step until it is no longer written: then only the extras of elements that differ
    become zero. The copy takes 2 bytes a weight.

    Not seen are writes that torch does not count: through `.data`, by kernels of others, in a replayed CUDA graph, and
    in foreach operations on DTensors. `storage.load_weight` bounds what their extras can do.

    Checked by tests/optim/test_written_weights.py.

    Attributes:
        copies: Copies of the weights that are written before every step.
    """

    def __init__(self) -> None:
        self.copies: dict[Tensor, Tensor] = {}
        self._weights: list[Tensor] = []
        self._extras: list[Tensor] = []
        self._weight_versions: list[int] = []
        self._extra_versions: list[int] = []
        self._plain = True  # no DTensors
        self._found: set[Tensor] = set()  # written since the last step, ...
        self._found_before: set[Tensor] = set()  # ... and since the one before it

    def watch(
        self,
        params: list[Tensor],
        entries: list[Entry],
        state: Mapping[Tensor, Mapping[str, Tensor]],
        *,
        extra: str | None,
    ) -> None:
        """Say who takes part in the next step; what is known of others is kept for when they do again.

        Args:
            params: Parameters that have a gradient.
            entries: What a backend works on. The same list, if it is a roster's, has the same extras.
            state: The optimizer's state.
            extra: Name of the state to watch; None: there is nothing to watch.
        """
        workspace: dict[Any, Any] = getattr(entries, "workspace", {})
        if extra is None or "watched" in workspace:
            return
        workspace["watched"] = True
        known = {
            weight: (beside, versions)
            for weight, beside, *versions in zip(
                self._weights, self._extras, self._weight_versions, self._extra_versions, strict=True
            )
        }
        pairs = {param: state.get(param, {}).get(extra) for param in (*params, *known)}
        self._plain = not any(map(mesh.is_distributed, pairs))
        self._weights, self._extras, self._weight_versions, self._extra_versions = [], [], [], []
        for weight, beside in pairs.items():
            if beside is None or weight.is_inference() or beside.is_inference():  # these have no version
                continue
            old = known.get(weight)
            versions = old[1] if old is not None and old[0] is beside else self._read([weight, beside])
            self._weights.append(weight)
            self._extras.append(beside)
            self._weight_versions.append(versions[0])
            self._extra_versions.append(versions[1])

    @torch.no_grad()
    def settle(self) -> None:
        """Let weights that others have written count as they are; before a step, and before anything is saved."""
        now = self._read(self._weights)
        if now == self._weight_versions or _is_capturing(self._weights):
            return
        extras_now = self._read(self._extras)
        for i, (weight, extra) in enumerate(zip(self._weights, self._extras, strict=True)):
            if now[i] == self._weight_versions[i] or extras_now[i] != self._extra_versions[i]:
                continue
            self._drop(weight, extra)
            self._found.add(weight)
            self._weight_versions[i] = now[i]
            self._extra_versions[i] = self._read([extra])[0]

    @torch.no_grad()
    def remember(self) -> None:
        """Note how a step has left weights and extras."""
        self._weight_versions = self._read(self._weights)
        self._extra_versions = self._read(self._extras)
        if self._found or self._found_before:
            self.copies = {weight: self._copy(weight) for weight in self._found & self._found_before}
            self._found, self._found_before = set(), self._found

    def _drop(self, weight: Tensor, extra: Tensor) -> None:
        """Set the extra to zero, all of it or where the weight differs from its copy."""
        own, beside = mesh.local_part(weight), mesh.local_part(extra)
        copy = self.copies.get(weight)
        if copy is None or (copy.dtype, copy.shape, copy.device) != (own.dtype, own.shape, own.device):
            beside.zero_()
            return
        # Bits, because -0.0 equals 0.0.
        beside.masked_fill_(own.view(torch.int16) != copy.view(torch.int16), 0)
        copy.copy_(own)

    def _copy(self, weight: Tensor) -> Tensor:
        own, copy = mesh.local_part(weight).detach(), self.copies.get(weight)
        return own.clone() if copy is None else copy.copy_(own)

    def _read(self, tensors: list[Tensor]) -> list[int]:
        """The versions; of a DTensor with those of its local part, which some write instead of it."""
        if self._plain:
            return list(map(_version, tensors))
        return [_version(t) + (_version(mesh.local_part(t)) if mesh.is_distributed(t) else 0) for t in tensors]


def _is_capturing(tensors: Iterable[Tensor]) -> bool:
    """Whether what is launched goes into a CUDA graph: zeros written there would be written in every replay."""
    return any(tensor.is_cuda for tensor in tensors) and torch.cuda.is_current_stream_capturing()
