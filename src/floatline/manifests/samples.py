"""Samples of tensors, taken in place: what a step, a decay or a sum left as it was."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from floatline.manifests.rows import SumRow, UpdateRow
from floatline.optim.mesh import local_grad
from floatline.precision.dtypes import NARROW
from floatline.precision.live_holdings import EXTRAS, NamedWeight, format_name
from floatline.probe.scripts.weight_digest import is_measured, sample
from floatline.probe.watch.patches import Aside

# Shares are those of samples of up to 2**16 elements: off by less than 0.8 % of one, 4 standard deviations.
_DECOUPLED = ("AdamW", "Lion", "Muon")


@dataclass
class _Before:
    """A weight before its step.

    Args:
        weight: Its name and group.
        parameter: The tensor that the optimizer updates.
        values: A sample of it.
        extras: Samples of what the optimizer keeps of it besides.
        moves: Which elements are to move.
        decays: Which weight decay is to shrink; None where there is none.
        decay_lost: Which of them it cannot; None where that is seen in the step itself.
        group: The parameter group.
    """

    weight: NamedWeight
    parameter: Tensor
    values: Tensor
    extras: list[Tensor]
    moves: Tensor
    decays: Tensor | None
    decay_lost: Tensor | None
    group: dict[str, Any]


class StepSamples:
    """Samples of the weights of an optimizer before its step, and what the step left as it was.

    Numerics:
        An update is lost where the gradient is finite and not zero, the learning rate is above zero, and every bit of
        the weight, and of what the optimizer keeps of it besides, is after the step what it was before. A decay is lost
        where the product that the optimizer makes rounds to what it was made of; where weight and decay are one
        operation, as in fused optimizers, where the weight stays. Checked by tests/manifests/test_samples.py.

    Args:
        optimizer: The optimizer, which is about to step.
        owners: The weight that each of its tensors is, or is the master copy of, by id.
    """

    def __init__(self, optimizer: Optimizer, owners: dict[int, NamedWeight]) -> None:
        self._optimizer = optimizer
        with Aside():
            self._before = [
                self._take(parameter, group, owners.get(id(parameter)))
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.grad is not None and not parameter.grad.is_sparse and is_measured(parameter)
            ]

    def _take(self, parameter: Tensor, group: dict[str, Any], owner: NamedWeight | None) -> _Before:
        weight = owner or NamedWeight("", "body", parameter)
        values = sample(parameter).clone()
        gradient = sample(local_grad(parameter, parameter.grad)) if parameter.grad is not None else values
        rate, decay = float(group.get("lr", 0.0)), float(group.get("weight_decay", 0.0))
        moves = gradient.isfinite() & (gradient != 0) if rate else torch.zeros_like(gradient, dtype=torch.bool)
        decays = values != 0 if rate * decay else None
        lost = None if decays is None else self._find_lost_decay(values, gradient, rate, decay, group)
        return _Before(weight, parameter, values, self._extras(parameter), moves, decays, lost, group)

    def _find_lost_decay(
        self, values: Tensor, gradient: Tensor, rate: float, decay: float, group: dict[str, Any]
    ) -> Tensor | None:
        kind = type(self._optimizer)
        if group.get("fused") or not kind.__module__.startswith("torch.optim"):
            return None
        if group.get("decoupled_weight_decay") or kind.__name__.startswith(_DECOUPLED):
            return values * (1 - rate * decay) == values
        return gradient.add(values, alpha=decay) == gradient

    def _extras(self, parameter: Tensor) -> list[Tensor]:
        state: dict[str, Any] = self._optimizer.state.get(parameter, {})
        found = [value for name, value in state.items() if name in EXTRAS and isinstance(value, Tensor)]
        return [sample(value).clone() for value in found]

    def compare(self) -> list[UpdateRow]:
        """What became of the updates, by layer group and format; the step has been made."""
        counts: list[Tensor] = []
        with Aside():
            for before in self._before:
                same = sample(before.parameter) == before.values
                now = self._extras(before.parameter)
                if len(now) == len(before.extras):
                    for new, old in zip(now, before.extras, strict=True):
                        same = same & (new == old)
                elif now:  # made in this step: what they hold now is what the weight could not
                    same = same & torch.stack([extra == 0 for extra in now]).all(0)
                decays = before.decays if before.decays is not None else torch.zeros_like(same)
                lost = same if before.decay_lost is None else before.decay_lost
                flags = (before.moves, before.moves & same, decays, decays & lost)
                counts.append(torch.stack([flag.sum() for flag in flags]).cpu())
        return [*self._add_up([count.tolist() for count in counts])]

    def _add_up(self, counts: list[list[int]]) -> Iterator[UpdateRow]:
        found: dict[tuple[str, str], list[tuple[_Before, list[int]]]] = {}
        for before, numbers in zip(self._before, counts, strict=True):
            key = before.weight.group, format_name(before.parameter.dtype)
            found.setdefault(key, []).append((before, numbers))
        for (group, name), own in found.items():
            sums = [sum(numbers[place] for _, numbers in own) for place in range(4)]
            worst = max(own, key=lambda one: one[1][1] / max(one[1][0], 1))[0]
            rate, decay = (max(float(b.group.get(key, 0.0)) for b, _ in own) for key in ("lr", "weight_decay"))
            yield UpdateRow(group, name, *sums, rate=rate, decay=decay, example=worst.weight.name)


class GradientSums:
    """Gradients of 16-bit weights as they arrive, added up in FP32 beside what autograd adds up.

    Numerics:
        Lost is the sum of |FP32 sum - what the weight's gradient holds|, over a sample, against the sum of |FP32 sum|.
        A gradient that was taken away, as ZeRO's second stage does, begins again.

    Args:
        weights: The weights; those in FP32 are left alone.
    """

    def __init__(self, weights: list[Tensor]) -> None:
        self._own = [w for w in weights if w.dtype in NARROW and w.requires_grad and w.is_leaf and is_measured(w)]
        self._sums: dict[int, Tensor] = {}
        self._held: dict[int, Tensor] = {}
        self._passes: dict[int, int] = {}
        self._hooks: list[Any] = []
        for weight in self._own:
            self._hooks.append(weight.register_hook(self._arriving(weight)))
            self._hooks.append(weight.register_post_accumulate_grad_hook(self._accumulated))

    def _arriving(self, weight: Tensor) -> Any:
        key = id(weight)

        def add(gradient: Tensor) -> None:
            with Aside():
                values = sample(gradient).float()
                if weight.grad is None:
                    self._passes.pop(key, None)
                    self._held.pop(key, None)
                self._passes[key] = self._passes.get(key, 0) + 1
                self._sums[key] = values.clone() if self._passes[key] == 1 else self._sums[key].add_(values)

        return add

    def _accumulated(self, weight: Tensor) -> None:
        if weight.grad is not None and self._passes.get(id(weight), 0) > 1:
            with Aside():
                self._held[id(weight)] = sample(weight.grad).clone()

    def end(self) -> list[SumRow]:
        """Listen no longer; what was lost, by format, where there was more than one pass."""
        for hook in self._hooks:
            hook.remove()
        found: dict[str, tuple[int, float, float]] = {}
        with Aside():
            for weight in self._own:
                held, total = self._held.get(id(weight)), self._sums.get(id(weight))
                if held is None or total is None or held.shape != total.shape:
                    continue
                size, lost = float(total.abs().sum()), float((total - held.float()).abs().sum())
                if not math.isfinite(size + lost):
                    continue
                passes, *sums = found.get(format_name(weight.dtype), (0, 0.0, 0.0))
                passes = max(passes, self._passes[id(weight)])
                found[format_name(weight.dtype)] = (passes, sums[0] + size, sums[1] + lost)
        return [SumRow(name, *numbers) for name, numbers in found.items()]


@dataclass
class _OwnSum:
    """A tensor that a loop adds to, and the FP32 sum of the same.

    Args:
        target: The tensor.
        total: The FP32 sum, of a sample.
        held: What the tensor held after the last addition.
        num: How many were added.
        begun: Whether it began as a copy of the first of them.
        last: Number of the backward pass that the last of them came after, where it is made out of place.
    """

    target: Tensor
    total: Tensor
    held: Tensor
    num: int = 0
    begun: bool = False
    last: int = 0


class OwnSums:
    """Gradients that a loop adds up by itself in 16 bits, in place and outside of autograd, with FP32 sums beside.

    Looked at are additions after a backward pass to tensors that have the shape of a weight, are none, and have no
    gradient of their own. Sums that are made out of place count only where each follows a backward pass of its own:
    what is computed of one gradient is no sum of several.

    Numerics:
        As in `GradientSums`; a tensor that was changed in between begins again.
    """

    NAMES = ("add_", "_foreach_add_")

    def __init__(self) -> None:
        self._sums: dict[int, _OwnSum] = {}
        self._shapes: set[tuple[int, ...]] = set()
        self._weights: set[int] = set()

    def know(self, models: Iterable[nn.Module]) -> None:
        """Take the weights of models in."""
        weights = [weight for model in models for weight in model.parameters()]
        self._shapes |= {tuple(weight.shape) for weight in weights}
        self._weights |= {id(weight) for weight in weights}

    def adding(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an addition in place, and what it adds beside it."""
        targets, others = (cast("list[Any]", one if isinstance(one, list) else [one]) for one in args[:2])
        alpha = float(kwargs.get("alpha", 1))
        own = [pair for pair in zip(targets, others, strict=False) if self._is_sum(*pair)]
        with Aside():
            seen = [self._begin(target) for target, _ in own]
        out = function(*args, **kwargs)
        with Aside():
            for one, (target, other) in zip(seen, own, strict=True):
                one.total += alpha * sample(other).float()
                one.held, one.num = sample(target).clone(), one.num + 1
        return out

    def added(self, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any], last: int) -> None:
        """An addition out of place was made.

        Args:
            out: What came out.
            args: What was added.
            kwargs: And by how much.
            last: Number of the last backward pass.
        """
        if len(args) < 2 or not self._is_sum(*args[:2]) or out.dtype not in NARROW:
            return
        with Aside():
            one, other = args[:2] if id(args[1]) not in self._sums else (args[1], args[0])
            old = self._sums.get(id(one))
            if old is None or old.target is not one:
                old = _OwnSum(one, sample(one).float(), sample(one))
            else:
                self._sums.pop(id(one))
            total = old.total + float(kwargs.get("alpha", 1)) * sample(other).float()
            num = old.num + (old.last != last)
            self._sums[id(out)] = _OwnSum(out, total, sample(out).clone(), num, old.begun, last)

    def _is_sum(self, target: Any, other: Any) -> bool:
        return (
            isinstance(target, Tensor)
            and isinstance(other, Tensor)
            and target.dtype in NARROW
            and target.shape == other.shape
            and tuple(target.shape) in self._shapes
            and id(target) not in self._weights
            and not target.requires_grad
            and is_measured(target)
        )

    def _begin(self, target: Tensor) -> _OwnSum:
        values, old = sample(target), self._sums.get(id(target))
        if old is None or old.target is not target or not torch.equal(old.held, values):
            begun = bool(values.any())
            old = self._sums[id(target)] = _OwnSum(target, values.float().clone(), values, begun=begun)
        return old

    def end(self) -> list[SumRow]:
        """What was lost so far, by format, of sums of several."""
        found: dict[str, tuple[int, float, float]] = {}
        with Aside():
            for one in self._sums.values():
                size, lost = float(one.total.abs().sum()), float((one.total - one.held.float()).abs().sum())
                if one.num < 2 or not math.isfinite(size + lost):
                    continue
                name = format_name(one.target.dtype)
                num, total, away = found.get(name, (0, 0.0, 0.0))
                found[name] = max(num, one.num + one.begun), total + size, away + lost
        self._sums = {}
        return [SumRow(name, *numbers) for name, numbers in found.items()]
