"""ExactUpdates: 16-bit weights of a script's own optimizers take every update, however small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import Optimizer

from floatline.optim import Optimizer as OwnOptimizer
from floatline.optim import convert
from floatline.optim.rules import UpdateName


class ExactUpdates:
    """Makes the steps of torch's optimizers by those of `floatline.optim`, with the script's own learning rates.

    The script keeps its optimizer: its groups are read before each step, and what it saves and loads is the state of
    the one that makes the steps.

    Args:
        update: How 16-bit weights take updates.
        hide: Lets an optimizer find no gradients until its step is over.
    """

    def __init__(self, update: UpdateName, hide: Callable[[Optimizer], None]) -> None:
        self._update: UpdateName = update
        self._hide = hide
        self._twins: dict[int, OwnOptimizer] = {}

    def step(self, optimizer: Optimizer) -> None:
        """Make the step that an optimizer is about to make."""
        if isinstance(optimizer, OwnOptimizer):
            return
        twin = self._twin_of(optimizer)
        for own, group in zip(twin.param_groups, optimizer.param_groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params" and key in own})
        twin.step()
        self._hide(optimizer)

    def _twin_of(self, optimizer: Optimizer) -> OwnOptimizer:
        twin = self._twins.get(id(optimizer))
        if twin is None:
            twin = self._twins[id(optimizer)] = convert(optimizer, update=self._update)
            optimizer.register_state_dict_post_hook(lambda _, state: {**state, "state": twin.state_dict()["state"]})
            optimizer.register_load_state_dict_pre_hook(lambda _, state: _load(twin, state))
        return twin


def _load(twin: OwnOptimizer, state: dict[str, Any]) -> None:
    twin.load_state_dict({**twin.state_dict(), "state": state["state"]})
