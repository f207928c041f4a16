"""HeldForwards: the last calls of root modules, with their inputs, in a bounded memory."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import nn

from floatline.probe.events import Event
from floatline.probe.script_forward import Autocast, Forward, read_autocast, tensors_in
from floatline.probe.watch_steps import has_bad

# Bytes of inputs that are held beside the last ones.
_MOST_BYTES = 2**26
# Calls that are held: on a GPU a step is known a step later, and a step may have several.
_MOST_CALLS = 4


class HeldForwards:
    """Holds calls; none of their tensors is copied.

    Attributes:
        calls: The last is the newest.
    """

    def __init__(self) -> None:
        self.calls: deque[Forward] = deque()
        self._most = 1
        self._usual: dict[int, Autocast] = {}  # of root modules, by id

    def weigh(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See how much memory the inputs of a call take."""
        size = sum(tensor.nbytes for tensor in tensors_in(args, kwargs))
        self._most = max(1, _MOST_BYTES // max(size, 1))

    def add(self, event: Event, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hold a call of a root module: what was noted of it, and its arguments."""
        self.calls.append(Forward(root, args, kwargs, event, read_autocast(root, self._usual)))
        while len(self.calls) > min(_MOST_CALLS, self._most):
            self.calls.popleft()

    def note_bad_inputs(self, step: int) -> None:
        """Look whether the inputs in a step are finite."""
        for forward in self.calls:
            if forward.event.step == step:
                forward.event.put("bad_inputs", bool(has_bad(forward.args, forward.kwargs)))

    def find(self, step: int) -> Forward:
        """The first call in a step, or the last call of all where none is held from there."""
        return next((one for one in self.calls if one.event.step == step), self.calls[-1])
