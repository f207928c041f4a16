"""LossLog: the losses of a script as its backward passes begin with them, one for each step, written as JSON lines."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from floatline.probe.watch.functional_gradients import FunctionalGradient, patch_functional_gradients
from floatline.probe.watch.gradient_scales import find_factor_by_hand
from floatline.probe.watch.patches import Aside, Patches
from floatline.running.closures import tell_after_closures

# Losses stay on their device until so many are there, so that the host seldom waits.
_TOGETHER = 16
# Weights that an update is taken of at once.
_FEWEST_TRAINED = 2


# Of so many weights of an optimizer so many numbers are looked at, to see whether they move.
_WATCHED, _NUMBERS = 8, 64


class EnoughSteps(BaseException):
    """Ends a script that has made as many steps as were asked for."""


def find_trained_roots(outputs: Any, inputs: Any, options: Mapping[str, Any]) -> list[Tensor]:
    """What a call of `torch.autograd.grad` goes backward from, where it is for an update of weights; else nothing.

    Penalties and inner loops take a gradient of the gradient, attacks one of a single tensor that they are given.
    """
    if isinstance(inputs, Tensor) or len(inputs) < _FEWEST_TRAINED or options.get("create_graph"):
        return []
    if not all(isinstance(one, Tensor) and one.is_leaf for one in inputs):
        return []
    out: list[Any] = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    return [root for root in out if isinstance(root, Tensor)]


def _copy_some(weight: Tensor) -> Tensor:
    return weight.detach().reshape(-1)[:_NUMBERS].clone()


class LossLog:
    """Hears backward passes and steps, and writes a line for each step of the optimizer that stepped first.

    A loss is the sum of what went backward since the last step of any optimizer: with accumulated batches, of all. An
    optimizer that takes a closure, such as LBFGS, makes one step with each call of it. In a script whose optimizers
    never step while its weights move, or that makes none, every backward pass is a step.
    `torch.autograd.grad` is such a pass, too, where it is for an update of weights.

    Where it measures, lines behind these have the sizes of some weights of each optimizer, as they are where it ends.

    A loss scale that the script multiplies its loss by itself is taken out: it falls in 16 bits, and does not in FP32.
    It begins at a power of two; a factor that does not is a weight, and stays.

    Args:
        path: Of the file.
        most: Steps after which no more is written; None writes all.
        ends: Whether the script is ended then.
        most_far: The same as `most` where losses are on a device that the host would have to wait for.
        measures: Whether weights are measured.
        mark: Steps after which they are measured as well.
    """

    def __init__(
        self,
        path: Path,
        *,
        most: int | None = None,
        ends: bool = True,
        most_far: int | None = None,
        measures: bool = False,
        mark: int | None = None,
    ) -> None:
        self._file, self._most, self._ends = path.open("a", encoding="utf-8"), most, ends
        self._most_far, self._measures, self._mark = most_far, measures, mark
        self._by_hand = True
        self._parts: list[Tensor] = []
        self._passes: list[list[Tensor]] = []  # while no optimizer has stepped: each may be a step by hand
        self._weights: list[tuple[Tensor, Tensor]] = []  # of optimizers, and what some of each was when they were made
        self._sizes: dict[int, Tensor] = {}  # by number of steps
        self._kept: list[tuple[int, Tensor | None, bool]] = []
        self._inner: list[Tensor] = []  # losses of torch.func's gradients that another loss may be made of
        self._first: int | None = None
        self._unscaled: tuple[Tensor | None, Tensor] = (None, torch.zeros((), device="cpu"))
        self._scales_by_hand: bool | None = None
        self._stepped = False
        self._asked: dict[int, list[bool]] = {}  # by optimizer: whether each of its steps was made
        self._began = time.perf_counter()
        self.num_steps = 0
        self.start_seconds: float | None = None  # before the end of the first backward pass

    def patch(self, patches: Patches) -> None:
        """Listen to backward passes."""
        patches.wrap(torch.autograd, "backward", self._hearing)
        patches.wrap(torch.autograd, "grad", self._hearing_grad)
        patch_functional_gradients(patches, self._hearing_functional)
        patches.wrap(Optimizer, "__init__", self._making)

    def _making(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def make(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self._by_hand = self._by_hand and type(optimizer).__module__.startswith("floatline.probe")
            original(optimizer, *args, **kwargs)
            given = (weight for group in optimizer.param_groups for weight in group["params"])
            weights = [weight for weight in given if type(weight) in (Tensor, nn.Parameter) and not weight.is_meta]
            self._weights += [(weight, _copy_some(weight)) for weight in weights[:_WATCHED]]

        return make

    def patch_bare(self, patches: Patches) -> Callable[[], None]:
        """Listen to a script that no plan is put into force in, with its own scaler; gives what ends it."""
        self.patch(patches)
        patches.wrap(torch.amp.GradScaler, "scale", self._scaling)
        patches.wrap(torch.amp.GradScaler, "step", self._scaler_stepping)
        return register_optimizer_step_pre_hook(self._bare_step).remove

    def _scaling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if isinstance(outputs, Tensor) and not self._is_full:
                self._unscaled = (scaled, outputs.detach().to(torch.float32, copy=True))
            return scaled

        return scale

    def _scaler_stepping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._stepped = False
            result = original(scaler, optimizer, *args, **kwargs)
            if not self._stepped:
                self.step(optimizer, False)
            return result

        return step

    @property
    def _is_full(self) -> bool:
        """Whether no loss is wanted any more."""
        return not self._ends and self._most is not None and self.num_steps >= self._most

    def _bare_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._stepped = True
        told = tell_after_closures(args, kwargs, lambda: self.step(optimizer, True))
        if told is None:
            self.step(optimizer, True)
        return told

    def _value_of(self, root: Tensor) -> Tensor:
        scaled, value = self._unscaled
        if root is scaled:
            return value
        factor = find_factor_by_hand([root])
        if self._scales_by_hand is None:
            self._scales_by_hand = factor > 1.0 and math.frexp(factor)[0] == 0.5
        # A copy: a script may go on to add to a loss in place.
        loss = root.detach().to(torch.float32, copy=True)
        return loss / factor if self._scales_by_hand else loss

    def _hearing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            given: list[Any] = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            roots = [root for root in given if isinstance(root, Tensor)]
            if not self._is_full and torch._C._current_graph_task_id() == -1:  # pyright: ignore[reportPrivateUsage]
                self._parts += [self._value_of(root) for root in roots if root.numel() == 1]
            original(tensors, *args, **kwargs)
            self._end_pass()

        return backward

    def _hearing_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            inputs = inputs if isinstance(inputs, Tensor) else tuple(inputs)  # an iterator is read once
            outputs = outputs if isinstance(outputs, Tensor) else tuple(outputs)
            roots = [] if self._is_full else find_trained_roots(outputs, inputs, kwargs)
            self._parts += [self._value_of(root) for root in roots if root.numel() == 1]
            found = original(outputs, inputs, *args, **kwargs)
            if roots:
                self._end_pass()
            return found

        return grad

    @contextlib.contextmanager
    def _hearing_functional(self, call: FunctionalGradient) -> Generator[None]:
        """What torch.func takes. Of gradients with a graph of their own another loss may be made: then it counts."""
        yield
        if self._is_full or call.loss is None or any(weight.grad_fn is not None for weight in call.weights.values()):
            return
        loss = call.loss.detach().to(torch.float32, copy=True).mean()
        if self._scales_by_hand is None:
            self._scales_by_hand = call.factor > 1.0 and math.frexp(call.factor)[0] == 0.5
        loss = loss / call.factor if self._scales_by_hand else loss
        if call.is_kept and not self._by_hand:
            self._inner.append(loss)
            return
        self._parts.append(loss)
        self._end_pass()

    def _end_pass(self) -> None:
        if self.start_seconds is None:
            self.start_seconds = time.perf_counter() - self._began
        if self._first is not None or not self._parts:
            return
        parts, self._parts = self._parts, []
        if self._by_hand:
            self._keep(parts, applied=True)
            return
        self._passes.append(parts)
        if self._most is not None and len(self._passes) > self._most:
            self._take_passes()

    def _take_passes(self) -> None:
        """No optimizer steps: the script updates its weights by hand, if they have moved at all."""
        passes, self._passes = self._passes, []
        if all(torch.equal(_copy_some(weight), before) for weight, before in self._weights):
            return
        self._by_hand = True
        for parts in passes:
            self._keep(parts, applied=True)

    def step(self, optimizer: Optimizer, applied: bool) -> None:
        """An optimizer is about to step, or to leave a step out."""
        parts = [*(part for one in self._passes for part in one), *(self._parts or self._inner)]
        self._parts, self._inner = [], []
        self._passes = []
        self._asked.setdefault(id(optimizer), []).append(applied)
        if self._first is None:
            self._first = id(optimizer)
        if id(optimizer) == self._first:
            self._keep(parts, applied=applied)

    @property
    def search(self) -> list[list[int]]:
        """The steps that each optimizer left out in the first half: what a scaler does that looks for its scale.

        Optimizers are in the order in which they were first asked for a step. What is left out later is no search.
        """
        rows = [asked[: self._most] for asked in self._asked.values()]
        return [[step for step, applied in enumerate(row[: len(row) // 2]) if not applied] for row in rows]

    def _keep(self, parts: list[Tensor], *, applied: bool) -> None:
        full = self._most is not None and self.num_steps >= self._most
        if full or self.num_steps == self._mark:
            self._measure_weights()
        if full:
            if self._ends:
                raise EnoughSteps
            return
        loss = None if not parts else torch.stack([part.reshape(()).to(parts[0].device) for part in parts]).sum()
        if loss is not None and loss.device.type != "cpu" and self._most_far is not None:
            self._most, self._most_far = self._most_far, None
        self._kept.append((self.num_steps, loss, applied))
        self.num_steps += 1
        if len(self._kept) >= _TOGETHER:
            self.flush()

    def _measure_weights(self) -> None:
        if not self._measures or self.num_steps in self._sizes or not self._weights:
            return
        with Aside():
            sizes: list[Tensor] = [torch.linalg.vector_norm(weight, dtype=torch.float32) for weight, _ in self._weights]
            self._sizes[self.num_steps] = torch.stack([size.to(sizes[0].device) for size in sizes])

    def end(self) -> None:
        """The script is over."""
        self._take_passes()
        self._measure_weights()
        self.flush()
        for num_steps, sizes in self._sizes.items():
            self._file.write(json.dumps({"after": num_steps, "sizes": sizes.tolist()}) + "\n")
        self._file.flush()

    def flush(self) -> None:
        """Write what is kept."""
        kept, self._kept = self._kept, []
        for step, loss, applied in kept:
            value = None if loss is None else loss.item()
            self._file.write(json.dumps({"step": step, "loss": value, "applied": applied}) + "\n")
        self._file.flush()
