"""ExactUpdates: 16-bit weights of a script's own optimizers take every update, however small."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import Optimizer

from floatline.errors import OptimizerError, PlanError
from floatline.optim import Optimizer as OwnOptimizer
from floatline.optim import convert
from floatline.plans import Plan
from floatline.probe.watch.patches import Patches

_Call = Callable[..., Any]


class ExactUpdates:
    """Makes the steps of torch's optimizers by those of `floatline.optim`, with the script's own learning rates.

    The script keeps its optimizer: its groups are read before each step, and what it saves and loads is the state of
    the one that makes the steps, whether a step was made before or not.

    Numerics:
        Weights and states have the bits of the optimizer that `floatline.optim.convert` gives. A run that goes on from
        what the script saved has those of one that was not interrupted.
        Checked by tests/running/test_exact_updates.py.

    Args:
        plan: How 16-bit weights take updates, exactly where it does not say, and how moments are stored.
        hide: Lets an optimizer find no gradients until its step is over.
    """

    def __init__(self, plan: Plan, hide: Callable[[Optimizer], None]) -> None:
        self._plan, self._hide = plan, hide
        self._twins: weakref.WeakKeyDictionary[Optimizer, OwnOptimizer] = weakref.WeakKeyDictionary()
        # States that were loaded before the first step: torch would cast them to the weights' format.
        self._loaded: weakref.WeakKeyDictionary[Optimizer, dict[str, Any]] = weakref.WeakKeyDictionary()

    def patch(self, patches: Patches) -> None:
        """Let scripts save and load the states of what makes the steps."""
        patches.wrap(Optimizer, "state_dict", self._saving)
        patches.wrap(Optimizer, "load_state_dict", self._loading)

    def step(self, optimizer: Optimizer) -> None:
        """Make the step that an optimizer is about to make.

        Raises:
            PlanError: There is none that makes its steps.
        """
        if isinstance(optimizer, OwnOptimizer):
            return
        twin = self._twin_of(optimizer)
        for group in optimizer.param_groups[len(twin.param_groups) :]:
            twin.add_param_group({key: value for key, value in group.items() if key in ("params", *twin.defaults)})
        for own, group in zip(twin.param_groups, optimizer.param_groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params" and key in own})
        twin.step()
        self._hide(optimizer)

    def _twin_of(self, optimizer: Optimizer) -> OwnOptimizer:
        twin = self._twins.get(optimizer)
        if twin is not None:
            return twin
        try:
            twin = convert(optimizer, update=self._plan.update or "exact", states=self._plan.states)
        except OptimizerError as error:
            raise PlanError(f"Plan '{self._plan.name}' has 16-bit weights: {error}") from None
        # Hooks behind a step hear of the script's own.
        twin._optimizer_step_post_hooks = OrderedDict()  # pyright: ignore[reportPrivateUsage]
        self._twins[optimizer] = twin
        loaded = self._loaded.pop(optimizer, None)
        if loaded is not None:
            _load(twin, loaded)
        return twin

    def _saving(self, original: _Call) -> _Call:
        def state_dict(optimizer: Optimizer) -> dict[str, Any]:
            saved = original(optimizer)
            twin = self._twins.get(optimizer)
            if twin is not None:
                return {**saved, "state": twin.state_dict()["state"]}
            loaded = self._loaded.get(optimizer)
            return saved if loaded is None else {**saved, "state": loaded}

        return state_dict

    def _loading(self, original: _Call) -> _Call:
        def load_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
            if isinstance(optimizer, OwnOptimizer):
                original(optimizer, state_dict)
                return
            original(optimizer, {**state_dict, "state": {}})
            twin, state = self._twins.get(optimizer), copy.deepcopy(state_dict["state"])
            if twin is not None:
                _load(twin, state)
            else:
                self._loaded[optimizer] = state

        return load_state_dict


def _load(twin: OwnOptimizer, state: dict[str, Any]) -> None:
    twin.load_state_dict({**twin.state_dict(), "state": state})
