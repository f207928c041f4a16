"""Who takes part in a step: parameters that have a gradient, with their state, remembered from step to step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from floatline.optim import hyperparameters, mesh, storage
from floatline.optim.entries import Entry
from floatline.optim.mesh import local_part
from floatline.optim.rules import UpdateRule


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
                entries.append(Entry(weight, local_grad, local, group, stream, mesh.start_of(param)))
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
