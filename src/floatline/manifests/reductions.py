"""Reductions: what processes sum up gradients in, seen in the sums themselves."""
# torch shows its dispatcher to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from floatline.precision.live_holdings import format_name

Reducer = Literal["ddp", "loop"]
_SUMS = ("allreduce_", "allreduce_coalesced_", "reduce_", "_reduce_scatter_base_", "reduce_scatter_")


class Reductions:
    """Gradients that processes sum up, by who does it and in which format.

    Two kinds of sums are those of gradients for certain, and only these are counted: what is summed up in a process
    group of DDP while it goes backward, by DDP or by any hook of its; and what lies in the memory of a weight's
    gradient, where a loop sums up by itself.

    Attributes:
        num_collectives: How often anything was exchanged.
    """

    def __init__(self) -> None:
        self._groups: set[str] = set()
        self._weights: list[Tensor] = []
        self._places: set[int] | None = None
        self._num: Counter[tuple[Reducer, str]] = Counter()
        self.num_collectives = 0

    def know(self, models: Iterable[nn.Module]) -> None:
        """Take the groups and weights of models in."""
        self._places = None
        for model in models:
            self._weights = [*model.parameters()]
            wrapped = (part for part in model.modules() if isinstance(part, DistributedDataParallel))
            self._groups |= {cast("Any", part).process_group.group_name for part in wrapped}

    def see(self, name: str, args: Sequence[Any]) -> None:
        """A collective is about to run.

        Args:
            name: Such as 'allreduce_'.
            args: Its arguments.
        """
        self.num_collectives += 1
        if name not in _SUMS:
            return
        boxed = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
        group = None if boxed is None else cast("Any", torch.distributed.ProcessGroup).unbox(boxed)
        if group is None or group.size() < 2:
            return
        is_backward = torch._C._current_graph_task_id() != -1
        for tensor in _find_tensors(args):
            if is_backward and group.group_name in self._groups:
                self._num["ddp", format_name(tensor.dtype)] += tensor.numel()
            elif not is_backward and tensor.untyped_storage().data_ptr() in self._find_places():
                self._num["loop", format_name(tensor.dtype)] += tensor.numel()

    def _find_places(self) -> set[int]:
        """Where gradients lie: looked up once, as they stay there until the step."""
        if self._places is None:
            grads = (weight.grad for weight in self._weights)
            dense = (grad for grad in grads if type(grad) is Tensor and grad.layout == torch.strided)
            self._places = {grad.untyped_storage().data_ptr() for grad in dense}
        return self._places

    def format_of(self, who: Reducer) -> str:
        """What most of the gradients are summed up in; '' where nothing was seen."""
        own = Counter({name: num for (one, name), num in self._num.items() if one == who})
        return own.most_common(1)[0][0] if own else ""


def _find_tensors(args: Sequence[Any]) -> Iterator[Tensor]:
    """What goes into a sum: of two tensors the second, as the first is what comes out."""
    given: list[Any] = [arg for arg in args if isinstance(cast("object", arg), (Tensor, list))][-1:]
    while given:
        one = given.pop()
        if isinstance(one, Tensor):
            if one.is_floating_point():
                yield one
        else:
            given += cast("list[Any]", one)
