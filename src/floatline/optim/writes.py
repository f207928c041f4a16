"""Writes from outside: which 16-bit weights somebody else has changed since the last step; version counters tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from floatline.optim import mesh
from floatline.optim.entries import Entry

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
