"""Where an operation comes from: the user's line, the module, the phase of the step."""

# torch shows the running backward to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from floatline.plans.plan import name_all_modules
from floatline.precision.user_frames import NOWHERE, Spot, ends_search, find_outer, find_spot
from floatline.probe.trace.trace import Phase

_CHECKPOINT = str(Path(torch.__file__).parent / "utils" / "checkpoint.py")


@dataclass(frozen=True, slots=True)
class OpOrigin:
    """Where an operation comes from; the fields are those of `Op`."""

    phase: Phase = "outside"
    module: str = ""
    file: str = ""
    line: int = 0
    function: str = ""
    node: str = ""
    forward: int | None = None
    recomputed: bool = False


class Whereabouts:
    """Follows the modules, the optimizers and the backward passes of a step.

    Use it as a context manager around the step. Its hooks are torch's global ones and change nothing.

    Args:
        model: Gives modules their names.
        on_update: Called with each optimizer when its `step` begins.
    """

    def __init__(self, model: nn.Module, *, on_update: Callable[[Any], None]) -> None:
        self._names: dict[int, str] = {}
        self._parameters: dict[int, str] = {}
        self.name_modules(model)
        self._on_update = on_update
        self._stack: list[str] = []
        self._updates = 0
        self._after_backward = False
        # By sequence number of its autograd node, the first operation that ran after the node was made.
        self._made: dict[int, tuple[int | None, OpOrigin]] = {}
        self._hooks: list[Any] = []
        self._known: dict[tuple[Any, ...], OpOrigin] = {}

    def name_modules(self, model: nn.Module) -> None:
        """Give the modules and parameters of a model the names that they have in it."""
        for name, module in name_all_modules(model):
            self._names.setdefault(id(module), name)  # pyright: ignore[reportUnknownArgumentType]
        self._parameters |= {id(p): name for name, p in model.named_parameters()}

    def forget(self) -> None:
        """What ran so far belongs to another step."""
        self._made.clear()
        self._after_backward = False

    def __enter__(self) -> Whereabouts:
        self._hooks = [
            module_hooks.register_module_forward_pre_hook(self._enter_module),
            module_hooks.register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._enter_update),
            register_optimizer_step_post_hook(self._leave_update),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter_module(self, module: nn.Module, _args: Any) -> None:
        self._stack.append(self._names.get(id(module), self._stack[-1] if self._stack else ""))
        if not _in_backward():
            self._after_backward = False

    def _leave_module(self, *_: Any) -> None:
        if self._stack:
            self._stack.pop()

    def _enter_update(self, optimizer: Any, *_: Any) -> None:
        self._updates += 1
        self._on_update(optimizer)

    def _leave_update(self, *_: Any) -> None:
        self._updates = max(0, self._updates - 1)

    def locate(self, *, tracked: bool) -> OpOrigin:
        """Where the operation being dispatched comes from.

        Args:
            tracked: Whether one of its arguments requires a gradient.
        """
        backward = _in_backward()
        spot, checkpointed = _user_spot(backward=backward)
        phase: Phase = "forward" if checkpointed else "backward" if backward else self._phase(tracked=tracked)
        self._after_backward = self._after_backward or backward
        module = self._stack[-1] if self._stack else ""
        if checkpointed:
            return OpOrigin(phase, module, spot.file, spot.line, spot.function, recomputed=True)
        key = (phase, module, spot.file, spot.line, spot.function)
        origin = self._known.get(key)
        if origin is None:
            origin = self._known[key] = OpOrigin(phase, module, spot.file, spot.line, spot.function)
        return self._locate_backward(origin) if backward else origin

    def needs_place(self) -> bool:
        """Whether anybody will ask where a view comes from: autograd made a node for it, or runs itself."""
        return _in_backward() or _sequence_number() - 1 not in self._made

    def remember(self, index: int | None, origin: OpOrigin, *, in_place: bool = False) -> None:
        """Note which operation ran first after the newest autograd node was made; None: a view."""
        number = _sequence_number() - 1
        self._made.setdefault(number, (index, origin))
        if in_place:  # autograd makes its node, then a copy (with a node) of what is to be overwritten
            self._made.setdefault(number - 1, (index, origin))

    def _phase(self, *, tracked: bool) -> Phase:
        if self._stack:
            return "forward"
        if self._updates:
            return "update"
        # Between a backward and the next forward, only what could be trained on is a (second) loss.
        if self._after_backward and not (tracked and torch.is_grad_enabled()):
            return "outside"
        return "forward"

    def _locate_backward(self, origin: OpOrigin) -> OpOrigin:
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return origin
        parameter = self._parameters.get(id(getattr(node, "variable", None)), "")
        if parameter:
            return replace(origin, node="AccumulateGrad", module=parameter.rpartition(".")[0])
        index, made = self._made.get(node._sequence_nr(), (None, origin))
        source = origin if origin.file else made  # a backward that the user wrote has a line of its own
        return OpOrigin("backward", made.module, source.file, source.line, source.function, node.name(), index)


def _sequence_number() -> int:
    """The number that autograd will give to its next node on this thread."""
    return torch._C._autograd._get_sequence_nr()  # pyright: ignore


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _user_spot(*, backward: bool) -> tuple[Spot, bool]:
    """The innermost line of the user's code, and whether checkpointing runs it again.

    In backward the frames end where the engine began: what lies outside has called `backward`.
    """
    frame: FrameType | None = sys._getframe(2)
    if not backward:
        return find_outer(frame), False
    found = NOWHERE
    while frame is not None and not ends_search(frame):
        code = frame.f_code
        if code.co_name == "_engine_run_backward":
            return found, False
        if found.file and code.co_filename == _CHECKPOINT:
            return found, True
        if not found.file:
            found = find_spot(frame)
        frame = frame.f_back
    return found, False
