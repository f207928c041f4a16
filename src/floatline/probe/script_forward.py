"""The last forward pass of a script: what is needed to ask about it later, and to run it again."""

# torch shows whether autocast is on anywhere under a private name only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from floatline.probe.aside import Aside
from floatline.probe.events import Event
from floatline.probe.gradient_errors import GradientRecorder
from floatline.probe.script_weights import Weights
from floatline.probe.trace import Trace

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
    event: Event
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


def tensors_in(*trees: Any) -> list[Tensor]:
    """Every tensor in containers within containers."""
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor)]


def has_room(root: nn.Module) -> bool:
    """Whether a GPU can hold the twins of a step, which take twice the bytes of its 16-bit tensors."""
    device = next((p.device for p in root.parameters()), torch.device("cpu"))
    if device.type != "cuda":
        return True
    with Aside():
        free = torch.cuda.mem_get_info(device)[0]
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + reserved > 2 * torch.cuda.max_memory_allocated(device)
