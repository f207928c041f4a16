"""Who takes part in a step: parameters that have a gradient, with their state, remembered from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from floatline.optim import hyperparameters, mesh, storage
from floatline.optim.entries import Entry
from floatline.optim.rules import Rule

_PLAIN = (nn.Parameter, Tensor)
_NOTHING = torch.empty(0)


class Entries(list[Entry]):
    """Entries that stay the same from step to step; a backend may keep what it has built for them here."""

    def __init__(self, entries: list[Entry]) -> None:
        super().__init__(entries)
        self.workspace: dict[Any, Any] = {}


class Roster:
    """Who takes part in a step. Asking again costs a few comparisons for each parameter instead of a new list.

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
        self._dtypes = [entry.grad.dtype for entry in entries]
        self._layouts = [entry.grad.layout for entry in entries]
        self._addresses = [param.data_ptr() for param in params]
        self._members = _members(groups)

    def refresh(self, groups: list[dict[str, Any]], state: Mapping[Tensor, Any]) -> bool:
        """Take the new gradients; False if anything else has changed, and a new roster is needed."""
        if self._members != _members(groups):
            return False
        if self.params and state.get(self.params[0]) is not self.entries[0].state:
            return False
        grads = [param.grad for param in self.params]
        try:
            same = [g.dtype for g in grads] == self._dtypes and [g.layout for g in grads] == self._layouts  # pyright: ignore[reportOptionalMemberAccess]
        except AttributeError:  # one of them is None: asking for that first would cost as much as the rest
            return False
        if not same:
            return False
        for entry, grad in zip(self.entries, cast("list[Tensor]", grads), strict=True):
            entry.grad = grad
        if any(param.grad is not None for param in self._idle):
            return False
        return [param.data_ptr() for param in self.params] == self._addresses

    def release(self) -> None:
        """Let go of the gradients."""
        for entry in self.entries:
            entry.grad = _NOTHING


def collect(
    groups: list[dict[str, Any]], state: Mapping[Tensor, dict[str, Tensor]], *, rule: Rule, update: str, states: str
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


def _members(groups: list[dict[str, Any]]) -> list[Any]:
    """Which parameters are in which group, and which groups need states."""
    return [(id(group), group.get("momentum") == 0, *map(id, group["params"])) for group in groups]
