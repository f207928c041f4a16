"""StandIns: copies that take the place of a run's weights for a while, and everything put back afterwards."""

# torch can set the counter of a tensor's writes under a private name only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from floatline.plans.plan import name_all_modules
from floatline.precision.dtypes import NARROW


class StandIns:
    """The tensors of a run as they were, and one working copy of them that takes their place in a replay.

    The tensors keep their identity: only the memory behind them is exchanged. So closures, tied weights, hooks and
    optimizers that hold a parameter see the copy too, and nothing is copied back. Afterwards memory, gradients,
    buffers, flags, plain attributes and hooks of the modules are those from before, also where the replay raised.
    Not covered: objects of other kinds that modules keep, and what a closure keeps for itself. No other thread may
    use the model meanwhile.

    Takes the bytes of the weights and buffers once, and once more from the first replay on.

    Args:
        model: The model itself, not wrapped.
        extra: Further tensors that are trained, such as those of a loss.
        buffers: Values of buffers to start from, by name, where they are no longer what they were.

    Attributes:
        cast_too: Names of FP32 weights and buffers that are given another format as 16-bit ones are.
    """

    def __init__(
        self, model: nn.Module, extra: Iterable[Tensor] = (), *, buffers: Mapping[str, Tensor] | None = None
    ) -> None:
        self._model = model
        self.live: dict[str, Tensor] = dict(model.named_parameters())
        known = {id(tensor) for tensor in self.live.values()}
        for tensor in extra:
            if id(tensor) not in known:
                known.add(id(tensor))
                self.live[f"optimizer[{len(self.live)}]"] = tensor
        self._buffers = {name: b for name, b in model.named_buffers() if id(b) not in known}
        given = buffers or {}
        with torch.no_grad():
            self.captured = {name: tensor.detach().clone() for name, tensor in self.live.items()}
            self.captured_buffers = {name: given.get(name, b).detach().clone() for name, b in self._buffers.items()}
        self.training = {name: module.training for name, module in name_all_modules(model)}
        self.cast_too: frozenset[str] = frozenset()
        self._copies: dict[int, Tensor] = {}

    @contextlib.contextmanager
    def in_place(self, *, narrow_as: torch.dtype | None = None) -> Generator[None]:
        """The copies, with the values that were captured, instead of the run's tensors.

        Args:
            narrow_as: Format of weights and buffers that are 16-bit; None leaves it.
        """
        rows = [(name, tensor, self.captured[name]) for name, tensor in self.live.items()]
        rows += [(name, buffer, self.captured_buffers[name]) for name, buffer in self._buffers.items()]
        known = {id(tensor) for _, tensor, _ in rows}
        loose = [tensor for tensor in _loose_tensors(self._model) if id(tensor) not in known]
        with contextlib.ExitStack() as stack:
            stack.callback(_undo_all([_remember(module) for module in self._model.modules()]))
            for tensor in (*(tensor for _, tensor, _ in rows), *loose):
                # A graph that is under way must not take writing to the copy for writing to what it has saved.
                if not tensor.is_inference():
                    stack.enter_context(_unsafe_preserve_version_counter(tensor))
                stack.callback(_give_back(tensor))
            for name, tensor, values in rows:
                tensor.grad = None
                narrows = values.dtype in NARROW or name in self.cast_too
                tensor.data = self._fill(tensor, values, narrow_as if narrows else None)
            for tensor in loose:
                tensor.grad = None
                tensor.data = tensor.detach().clone()
            for name, module in name_all_modules(self._model):
                if module.training is not (wanted := self.training.get(name, module.training)):
                    module.training = wanted
            yield

    def _fill(self, tensor: Tensor, values: Tensor, wanted: torch.dtype | None) -> Tensor:
        dtype = values.dtype if wanted is None else wanted
        copy = self._copies.get(id(tensor))
        if copy is None or copy.dtype != dtype:
            copy = self._copies[id(tensor)] = torch.empty_like(values, dtype=dtype)
        with torch.no_grad():
            return copy.copy_(values)

    def copy_now(self) -> dict[str, Tensor]:
        """What the tensors hold now, weights and buffers by name."""
        buffers = dict(self._model.named_buffers())  # a module may have put another tensor there
        return {name: tensor.detach().clone() for name, tensor in {**self.live, **buffers}.items()}


def _give_back(tensor: Tensor) -> Callable[[], None]:
    data, grad, requires_grad = tensor.data, tensor.grad, tensor.requires_grad

    def undo() -> None:
        tensor.grad = None  # of another dtype perhaps, which the old memory would not take
        tensor.data = data
        if tensor.is_leaf:
            tensor.requires_grad_(requires_grad)
        tensor.grad = grad

    return undo


def _undo_all(undone: list[Callable[[], None]]) -> Callable[[], None]:
    def undo() -> None:
        for one in undone:
            one()

    return undo


def _remember(module: nn.Module) -> Callable[[], None]:
    """How to put a module's attributes back: which there are, and what lies in its containers."""
    attributes = vars(module)
    own = dict(attributes)
    filled: list[Any] = []
    contents: list[Any] = []  # of each; most are empty tables of hooks
    for value in own.values():
        if isinstance(value, _CONTAINERS):
            filled.append(value)
            contents.append(_content_of(value) if value else ())
        elif type(value) not in _PLAIN and isinstance(value, torch.Generator):
            filled.append(value)
            contents.append(value.get_state())

    def undo() -> None:
        for value, content in zip(filled, contents, strict=True):
            _refill(value, content)
        attributes.clear()
        attributes.update(own)

    return undo


_CONTAINERS = (dict, list, set, deque)
_PLAIN = frozenset((type(None), bool, int, float, str))


def _content_of(value: Any) -> list[Any]:
    return list(cast("dict[Any, Any]", value).items()) if isinstance(value, dict) else list(value)


def _refill(value: Any, content: Any) -> None:
    if isinstance(value, list):
        value[:] = content
    elif not isinstance(value, _CONTAINERS):
        value.set_state(content)
    elif value or content:
        value.clear()
        if isinstance(value, deque):
            value.extend(content)
        else:
            cast("dict[Any, Any] | set[Any]", value).update(content)


def _loose_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Tensors in plain attributes of modules, also in lists, tuples and dicts; each once, without those of a graph."""
    seen: set[int] = set()
    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) in _PLAIN or name.startswith("_"):
                continue
            for tensor in _tensors_in(value):
                if id(tensor) not in seen and tensor.is_leaf and tensor.layout is torch.strided:
                    seen.add(id(tensor))
                    yield tensor


def _tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, dict)):
        items = list(cast("dict[Any, Any]", value).values() if isinstance(value, dict) else cast("list[Any]", value))
        for item in items:
            yield from _tensors_in(item, depth - 1)
