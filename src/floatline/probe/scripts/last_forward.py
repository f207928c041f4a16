"""The last forward pass of a script: what is needed to ask about it later, and to run it again."""
# torch shows whether autocast is on anywhere under a private name only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from floatline.precision.rewrites.calls import tensors_in
from floatline.probe.scripts.weight_copies import Weights
from floatline.probe.trace.recorder import GradientRecorder
from floatline.probe.trace.trace import Trace
from floatline.probe.watch.events import ForwardEvent
from floatline.probe.watch.patches import Aside
from floatline.probe.watch.steps import has_bad

# Device, whether autocast is on there, and its dtype.
Autocast: TypeAlias = tuple[str, bool, torch.dtype]


@dataclass(slots=True)
class Forward:
    """A call of a root module.

    Args:
        root: The module.
        args: Its arguments; held, not copied.
        kwargs: Those with a name.
        event: What was noted of it.
        autocast: How it stood.
    """

    root: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    event: ForwardEvent
    autocast: Autocast


def read_autocast(root: nn.Module, usual: dict[int, Autocast]) -> Autocast:
    """How autocast stands for a module.

    Args:
        root: The module.
        usual: How it stands while autocast is off, by the ids of modules; filled.
    """
    known = usual.get(id(root))
    if known is None:
        device = next((p.device.type for p in root.parameters()), "cpu")
        known = usual[id(root)] = (device, False, torch.get_autocast_dtype(device))
    if not torch._C._is_any_autocast_enabled():
        return known
    device = known[0]
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def replay_forward(forward: Forward, model: nn.Module) -> Trace | None:
    """Run a forward pass again and record it; None where all that it gives is finite.

    Random numbers are others than the first time. Buffers and the state of the generators are put back.
    """
    device, enabled, dtype = forward.autocast
    buffers = Weights.copy(list(forward.root.buffers()))
    recorder = GradientRecorder(model, batch=(tensors_in(forward.args, forward.kwargs), ()))
    with torch.random.fork_rng(), recorder, torch.autocast(device, dtype, enabled):
        made = forward.root(*forward.args, **forward.kwargs)
    if buffers is not None:
        buffers.put_back()
    floats = [tensor.detach() for tensor in tensors_in(made) if tensor.is_floating_point()]
    return recorder.trace if any(not bool(tensor.isfinite().all()) for tensor in floats) else None


def has_room(root: nn.Module) -> bool:
    """Whether a GPU can hold the twins of a step, which take twice the bytes of its 16-bit tensors."""
    device = next((p.device for p in root.parameters()), torch.device("cpu"))
    if device.type != "cuda":
        return True
    with Aside():
        free = torch.cuda.mem_get_info(device)[0]
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + reserved > 2 * torch.cuda.max_memory_allocated(device)


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

    def add(self, event: ForwardEvent, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hold a call of a root module: what was noted of it, and its arguments."""
        self.calls.append(Forward(root, args, kwargs, event, read_autocast(root, self._usual)))
        while len(self.calls) > min(_MOST_CALLS, self._most):
            self.calls.popleft()

    def note_bad_inputs(self, step: int) -> None:
        """Look whether the inputs in a step are finite."""
        for forward in self.calls:
            if forward.event.step == step:
                forward.event.bad_inputs = bool(has_bad(forward.args, forward.kwargs))

    def find(self, step: int) -> Forward:
        """The first call in a step, or the last call of all where none is held from there."""
        return next((one for one in self.calls if one.event.step == step), self.calls[-1])
