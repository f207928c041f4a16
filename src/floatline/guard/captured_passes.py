"""CapturedPasses: forward and backward of a guarded step as a CUDA graph, one for each shape of batches."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from floatline.errors import GuardError
from floatline.guard.diary import say
from floatline.guard.policy import Policy
from floatline.guard.run import Run
from floatline.guard.step.buffers import untouched
from floatline.optim.mesh import num_processes
from floatline.precision.micro_batches import Loss, LossSum, autocast_of
from floatline.precision.random_state import RandomState
from floatline.precision.wrappers import unwrap

# Steps of one shape that are run as they are before one is captured: kernels are compiled and chosen in them.
WARM = 3
# Shapes that are captured; steps of others are run as they are.
MOST = 8
# A captured loss may be off that of compute_loss by so much of it: sums of threads come in another order.
OFF = 0.01

Batches = tuple[Any, ...]
_Passes = Callable[[Run, Callable[[Any], Loss], Batches], LossSum]
_PLAIN = (Tensor, nn.Parameter)
_training = attrgetter("training")


def check_captures(device: torch.device, model: nn.Module, policy: Policy, *, group: dist.ProcessGroup | None) -> None:
    """GuardError where passes cannot be captured."""
    if device.type != "cuda":
        raise GuardError(f"graph=True captures CUDA graphs, and the weights are on {device}. Leave it out.")
    if num_processes(group) > 1 or unwrap(model) is not model:
        raise GuardError("graph=True captures the passes of one process, and this model is wrapped. Leave it out.")
    if policy.skip_outliers:
        raise GuardError("graph=True and skip_outliers=True: what a batch holds is looked at in its forward pass.")


@dataclass(frozen=True, eq=False)
class _Same:
    """An object that equals nothing but itself, and lives as long as what was captured with it."""

    held: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


@dataclass
class _Graph:
    """One captured pass.

    Args:
        graph: What is replayed.
        inputs: Tensors that it reads its batches from.
        total: Losses that it writes.
        grads: Gradients that it writes, by parameter.
        replays: How often it was.
    """

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    total: LossSum
    grads: list[tuple[Tensor, Tensor]]
    replays: int = 0


class CapturedPasses:
    """Runs forward and backward, and from the fourth step of a shape on replays them as one CUDA graph.

    A graph does on the device what was captured, and nothing of Python: what `compute_loss` reads from Python in each
    step must be in its batches. In the 1st, 2nd, 4th, 8th, ... replay the loss is computed once more without the graph;
    where it is another one the graph is given up, and said to have been wrong.

    Args:
        run: What is guarded.
        plainly: Forward and backward of every micro-batch, without a graph.
    """

    def __init__(self, run: Run, plainly: _Passes) -> None:
        self._run = run
        self._plainly = plainly
        self._stream = torch.cuda.Stream(run.device)
        self._pool = torch.cuda.graph_pool_handle()
        self._seen: dict[Any, int] = {}
        self._graphs: dict[Any, _Graph] = {}
        self._refused: set[Any] = set()
        self._modules = list(run.model.modules())
        self._is_told = False

    def __call__(self, compute_loss: Callable[[Any], Loss], batches: Batches) -> LossSum:
        """Losses of all micro-batches; gradients are where backward leaves them."""
        leaves, form = _flatten(batches)
        key = self._key(compute_loss, leaves, form)
        found = self._graphs.get(key)
        if found is None and not self._is_due(key):
            return self._on_stream(compute_loss, batches)
        if found is None:
            found = self._graphs[key] = self._capture(compute_loss, leaves, form)
        else:
            _fill(found.inputs, leaves)
        found.replays += 1
        before = RandomState.now() if found.replays & (found.replays - 1) == 0 else None
        found.graph.replay()
        for param, grad in found.grads:
            param.grad = grad
        total = replace(found.total, loss=cast(Tensor, found.total.loss).clone())
        if before is not None:
            self._hold_against(compute_loss, batches, total, before=before, key=key)
        return total

    def _key(self, compute_loss: Callable[[Any], Loss], leaves: list[Any], form: TreeSpec) -> Any:
        """What a captured pass holds for."""
        run = self._run
        shapes = tuple(map(_form_of, leaves))
        modes = tuple(map(_training, self._modules))
        return (
            _identity(compute_loss), shapes, form, modes, _Same(run.plan), tuple(run.islands.names),
            _Same(run.judge.scale),
        )  # fmt: skip

    def _is_due(self, key: Any) -> bool:
        """Whether this shape has been run often enough to be captured."""
        if key in self._refused:
            return False
        if key not in self._seen and len(self._seen) >= MOST:
            if not self._is_told:
                self._is_told = True
                message = (
                    f"graph=True captures {MOST} kinds of steps; steps of others are run without a graph. A step is of "
                    "another kind by the shapes of its batches, by numbers in them, and by what compute_loss holds"
                )
                self._run.diary.note("note", message)
                say(message)
            return False
        self._seen[key] = self._seen.get(key, 0) + 1
        return self._seen[key] > WARM

    def _on_stream(self, compute_loss: Callable[[Any], Loss], batches: Batches) -> LossSum:
        """As it is, on the stream of the captures: what autograd keeps of a parameter remembers its stream."""
        with self._beside():
            return self._plainly(self._run, compute_loss, batches)

    @contextlib.contextmanager
    def _beside(self) -> Generator[None]:
        current = torch.cuda.current_stream(self._run.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def _capture(self, compute_loss: Callable[[Any], Loss], leaves: list[Any], form: TreeSpec) -> _Graph:
        device = self._run.device
        held = [x.detach().to(device, copy=True).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
                for x in leaves]  # fmt: skip
        batches = cast(Batches, tree_unflatten(held, form))
        graph, numbers = torch.cuda.CUDAGraph(), _generator(device)
        drawn = numbers.clone_state()
        try:
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                total = self._plainly(self._run, _with_tensor_weights(compute_loss), batches)
        except GuardError:
            numbers.graphsafe_set_state(drawn)
            raise
        except Exception as error:
            numbers.graphsafe_set_state(drawn)  # torch leaves it as within a capture, where nothing else may draw
            raise GuardError(
                f"graph=True cannot capture this step: {_first_line(error)} Nothing in compute_loss may wait for the "
                "GPU or read a number from it, such as item() or a mask that selects. Change that, or leave graph out."
            ) from error
        params = (param for group in self._run.optimizer.param_groups for param in group["params"])
        grads = [(param, param.grad) for param in params if param.grad is not None]
        return _Graph(graph, [x for x in held if isinstance(x, Tensor)], total, grads)

    def _hold_against(
        self,
        compute_loss: Callable[[Any], Loss],
        batches: Batches,
        total: LossSum,
        *,
        before: RandomState,
        key: Any,
    ) -> None:
        """Compare a captured loss with that of compute_loss; waits for the device."""
        run, plain = self._run, LossSum()
        with before.replayed(), torch.no_grad(), untouched(run.model):
            for batch in batches:
                with autocast_of(run.plan, run.device):
                    value = compute_loss(batch)
                loss, weight = value if isinstance(value, tuple) else (value, None)
                plain.add(loss.reshape(()), weight)
        found, expected = float(total.mean), float(plain.mean)
        if abs(found - expected) <= OFF * abs(expected) or not (math.isfinite(found) and math.isfinite(expected)):
            return
        replays = self._graphs.pop(key).replays
        self._refused.add(key)
        message = (
            f"the loss of a captured step is {found:g} and that of compute_loss {expected:g}: it reads something that "
            f"changes from step to step and is in no batch. The last {replays} steps of this shape were made as "
            "captured; from here on they are run without a graph"
        )
        run.diary.note("note", message)
        say(message)


def _identity(compute_loss: Callable[[Any], Loss]) -> tuple[Any, ...]:
    """What a function computes with: a lambda that is written in each step is the same one with the same cells."""
    if isinstance(compute_loss, MethodType):  # made again whenever it is asked for
        return _Same(compute_loss.__self__), *_identity(compute_loss.__func__)
    if not isinstance(compute_loss, FunctionType):
        return (_Same(compute_loss),)
    cells = [cell.cell_contents for cell in compute_loss.__closure__ or ()]
    return (_Same(compute_loss.__code__), *map(_Same, cells), *map(_Same, compute_loss.__defaults__ or ()))


def _form_of(leaf: Any) -> tuple[Any, ...]:
    """What a captured pass knows of a part of its batch: all of it but the numbers of a tensor."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
    return cast("type[Any]", type(leaf)), leaf


def _flatten(batches: Batches) -> tuple[list[Any], TreeSpec]:
    leaves, form = tree_flatten(batches)
    for leaf in leaves:
        if type(leaf) not in _PLAIN and not isinstance(leaf, int | float | str | bytes | None):
            raise GuardError(
                f"graph=True: a batch holds a {type(leaf).__name__}, of which nobody knows what changes in it. "
                "Give tensors, in lists, tuples and dicts."
            )
    return leaves, form


def _fill(inputs: list[Tensor], leaves: list[Any]) -> None:
    with torch.no_grad():
        for own, given in zip(inputs, (x for x in leaves if isinstance(x, Tensor)), strict=True):
            own.copy_(given, non_blocking=True)


def _with_tensor_weights(compute_loss: Callable[[Any], Loss]) -> Callable[[Any], Loss]:
    """A number of Python, or one that the host holds, would be captured as it is now."""

    def checked(batch: Any) -> Loss:
        value = compute_loss(batch)
        if isinstance(value, tuple) and not (isinstance(value[1], Tensor) and value[1].is_cuda):
            raise GuardError("graph=True: the weight of a micro-batch is no tensor on the GPU. Give it as one.")
        return value

    return checked


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index]


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".") + "."
