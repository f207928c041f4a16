"""The gradients of any optimizer, surveyed as those of floatline's own are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from floatline.optim import mesh
from floatline.optim.kernels import survey_all, torch_backend
from floatline.optim.roster import Roster
from floatline.optim.survey import Entry, Survey


class Gradients:
    """Looks at the gradients of parameters that some other optimizer trains.

    Args:
        groups: The optimizer's parameter groups.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._groups = groups
        self._state: dict[Tensor, dict[str, Tensor]] = {}
        self._roster: Roster | None = None

    @torch.no_grad()
    def survey(self) -> Survey:
        """Norms and non-finite counts, for every parameter that has a gradient, in order; of shards this process's."""
        params, entries = self._collect()
        if not entries:
            device = self._groups[0]["params"][0].device
            return Survey(torch.zeros(0, device=device), torch.zeros(0, dtype=torch.int32, device=device))
        sparse = any(param.grad is not None and param.grad.is_sparse for param in params)
        found = torch_backend.survey(entries) if sparse else survey_all(entries)
        if self._roster is None:
            return mesh.own_share(found, params)
        self._roster.release()  # and a roster holds plain parameters only: there is no shard to ask for
        return found

    def _collect(self) -> tuple[list[Tensor], list[Entry]]:
        if self._roster is not None and self._roster.refresh(self._groups, self._state):
            return self._roster.params, self._roster.entries
        params: list[Tensor] = []
        idle: list[Tensor] = []
        entries: list[Entry] = []
        plain = True
        for group in self._groups:
            for param in group["params"]:
                grad = param.grad
                if grad is None:
                    idle.append(param)
                    continue
                distributed = mesh.is_distributed(param)
                plain = plain and not distributed and not grad.is_sparse
                weight = mesh.local_part(param.detach())
                grad = _dense(mesh.local_grad(param, grad))
                start = torch.zeros((), dtype=torch.float32, device=weight.device)
                state = self._state.setdefault(param, {"step": start})
                params.append(param)
                # The backend's table wants a learning rate; nothing is stepped from here.
                entries.append(Entry(weight, grad, state, _NO_SETTINGS, 0, 0))
        self._roster = Roster(params, entries, idle, self._groups) if plain else None
        return params, entries if self._roster is None else self._roster.entries


def _dense(grad: Tensor) -> Tensor:
    """What a sparse gradient holds, coalesced: double entries may cancel or overflow only when added up."""
    return grad.coalesce().values() if grad.is_sparse else grad


_NO_SETTINGS: dict[str, Any] = {"lr": 0.0}
