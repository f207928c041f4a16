"""States that decay: by how much, and how many of their values a decay leaves as they are."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from floatline.manifests.rows import StateRow
from floatline.precision.dtypes import NARROW
from floatline.precision.live_holdings import format_name
from floatline.probe.scripts.weight_digest import is_measured, sample
from floatline.probe.watch.patches import Aside

# States that are multiplied by a setting in every step: the key of their group, and the place in it.
_DECAYS: dict[str, tuple[str, int | None]] = {
    "exp_avg": ("betas", 0),
    "exp_avg_sq": ("betas", 1),
    "square_avg": ("alpha", None),
    "momentum_buffer": ("momentum", None),
}
# What keeps a decay that its arguments have; by what the others decay is what they are called with.
_PASSING = ("add", "add_", "sub", "sub_", "addcmul", "addcmul_", "copy_", "_to_copy", "clone")
_SCALING = ("mul", "mul_", "_foreach_mul", "_foreach_mul_")
_MIXING = ("lerp", "lerp_", "_foreach_lerp", "_foreach_lerp_")


class SeenDecays(TorchDispatchMode):
    """Sees by what an optimizer multiplies what it keeps, whatever that is called, in place or not, widened or not."""

    def __init__(self) -> None:
        super().__init__()
        self._factors: dict[int, tuple[Any, float]] = {}

    def factor_of(self, state: Tensor) -> float | None:
        """By what a tensor has been multiplied; None where that was not seen."""
        seen = self._factors.get(id(state))
        return None if seen is None or seen[0]() is not state else seen[1]

    def __torch_dispatch__(  # pyright: ignore[reportImplicitOverride, reportIncompatibleMethodOverride]
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation, and note it; torch calls this."""
        del types
        name = func.overloadpacket.__name__
        given = args[1:2] if name == "copy_" else args[:2]
        before = [factor for arg in given if (factor := self._find(arg)) is not None] if name in _PASSING else []
        out = func(*args, **(kwargs or {}))
        if name in _SCALING and len(args) > 1 and isinstance(args[1], float):
            self._note(out, args[0], args[1])
        elif name in _MIXING and len(args) > 2 and isinstance(args[2], float):
            self._note(out, args[0], 1 - args[2])
        elif before:
            self._note(out, out, max(before))
        return out

    def _find(self, one: Any) -> float | None:
        return self.factor_of(one) if isinstance(one, Tensor) else None

    def _note(self, out: Any, first: Any, factor: float) -> None:
        given = first if out is None else out  # in place, of several
        for one in cast("list[Any]", given if isinstance(given, list | tuple) else [given]):
            if isinstance(one, Tensor):
                self._factors[id(one)] = weakref.ref(one), factor


def find_stuck_states(optimizer: Optimizer, seen: SeenDecays | None = None) -> list[StateRow]:
    """States that decay, and how many of their values the decay leaves as they are.

    Numerics:
        A value v stays where v times the decay, in the state's own format, rounds to v. A decay that takes more than a
        spacing at 1 off moves every normal number: such states are not counted, and none in FP32 is. Nor are those of
        floatline's optimizers, which are rounded at random, so that their mean decays.

    Args:
        optimizer: It has stepped.
        seen: What it did in that step, where its states have names of their own.
    """
    if type(optimizer).__module__.startswith("floatline.optim"):
        return []
    found: dict[tuple[str, str, float], list[Tensor]] = {}
    with Aside():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for name, state, decay in _find_decays(optimizer, parameter, group, seen):
                    values = sample(state)
                    held = values != 0
                    stuck = held & (values * decay == values)
                    key = name, format_name(state.dtype), decay
                    found.setdefault(key, []).append(torch.stack([held.sum(), stuck.sum()]).cpu())
    rows: list[StateRow] = []
    for key, counts in found.items():
        total = torch.stack(counts).sum(0)
        rows.append(StateRow(*key, int(total[0]), int(total[1])))
    return rows


def _find_decays(
    optimizer: Optimizer, parameter: Tensor, group: dict[str, Any], seen: SeenDecays | None
) -> Iterator[tuple[str, Tensor, float]]:
    state: dict[str, Any] = optimizer.state.get(parameter, {})
    for name, value in state.items():
        if not isinstance(value, Tensor) or not is_measured(value) or value.dtype not in NARROW:
            continue
        setting, place = _DECAYS.get(name, ("", None))
        given = group.get(setting)
        decay = (seen.factor_of(value) if seen else None) if given is None else given if place is None else given[place]
        if decay is not None and 0 < float(decay) < 1 and 1 - decay < torch.finfo(value.dtype).eps:
            yield name, value, float(decay)
