"""OwnUpdates: steps that a loop makes without an optimizer of torch, and steps that it leaves out by itself."""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from floatline.probe.watch.events import BY_HAND, ScalerStepEvent, StepEvent
from floatline.probe.watch.gradient_scales import largest_of
from floatline.probe.watch.health import LateHealth, are_losses_lost, judge
from floatline.probe.watch.loop import Watch
from floatline.probe.watch.patches import Aside
from floatline.probe.watch.steps import describe_step

# Weights of which a copy is compared, to see what is written through `.data`, which no version counts.
_MOST_COMPARED = 2**20
# What a loss is multiplied with to keep its gradients in the range of FP16, at least; a smaller factor may be a weight.
_LEAST_SCALE = 2.0**6
# What the lines by which a loop changes its weights are called, where others have an optimizer.
UPDATES = "an update by hand"


class Updates(Optimizer):
    """Stands for the lines by which a loop changes its weights: it is never stepped."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.0})


class OwnUpdates:
    """A step is where weights change. Where no optimizer does it, the loop does: found by what it leaves behind.

    After a backward pass the versions of the weights that no optimizer has stepped are kept, and in detailed steps a
    copy of one of them. Where they differ when the next pass begins, the loop has updated them. Where gradients that
    are not finite are cleared, or come again, and no weight has changed, the loop has left out the step by itself, as a
    scaler does.

    Attributes:
        scales_itself: Whether the loop leaves out steps by itself.

    Args:
        seen: The watch.
    """

    def __init__(self, seen: Watch) -> None:
        self.scales_itself = False
        self._seen = seen
        self._by_hand: Updates | None = None  # the loop updates its weights by itself
        self._was_seen = False  # it has done so
        self._alone = True  # the last step had no update by an optimizer
        self._marks: list[tuple[Tensor, int, int, int]] = []  # a weight, its version, its gradient and that's version
        self._copy: tuple[Tensor, Tensor, Tensor | None] | None = None  # a weight, what it held, its gradient
        self._event: StepEvent | None = None
        self._given: dict[int, Tensor | None] | None = None
        self._finite = True
        self._sums = False  # gradients of several passes are summed up

    def after_backward(self, gradients: dict[int, Tensor | None] | None) -> None:
        """Gradients are there.

        Args:
            gradients: By the ids of weights, where torch.autograd.grad gave them; None: in the weights' own `grad`.
        """
        seen = self._seen
        self._sums = self._sums or bool(self._marks)
        self._given = gradients
        self._copy, self._event, self._finite, self._marks = None, None, True, []
        lost = are_losses_lost(seen.step_losses)
        if not self._alone and not lost:
            return
        leaves = seen.weights.leaves
        if gradients is not None:
            self._marks = [(p, p._version, 0, 0) for key, p in leaves.items() if gradients.get(key) is not None]
        else:
            tensors = [*leaves.values()] if self._by_hand is None else self._by_hand.param_groups[0]["params"]
            self._marks = [(p, p._version, id(p.grad), p.grad._version) for p in tensors if p.grad is not None]
        if not self._marks:
            return
        loose = self._find_loose()
        if self._by_hand is None and not seen.optimizers:
            self._by_hand = self._make_updates(loose)  # who else could update them
        elif self._by_hand is not None and gradients is not None:
            former = [id(p) for p in self._by_hand.param_groups[0]["params"]]
            seen.renew_weights(self._by_hand, loose, former)
        if seen.detailed and loose:
            self._copy = self._copy_one(min(loose, key=Tensor.numel))
        if self._by_hand is not None:
            self._note_step(self._by_hand)
            if seen.listener is not None and not seen.modules.roots and gradients is None:
                seen.listener.end_backward()
        else:
            largest = largest_of(self._gradients())
            with Aside():
                self._finite = largest is None or bool(largest.isfinite().all())

    def settle(self, *, cleared: bool) -> bool:
        """A pass begins, or gradients are cleared, and no optimizer has stepped since the last backward pass.

        Returns:
            Whether a step was made or left out.
        """
        if not self._marks:
            return False
        changed, gone = self._has_changed(), cleared or self._are_gone()
        if changed and self._by_hand is None:
            self._by_hand = self._make_updates(self._find_loose())
            self._note_step(self._by_hand)
        if changed or gone:
            self._marks = []  # else gradients are summed up
        if changed:
            self._was_seen = True
            if self._event is not None and self._is_still_scaled():
                self._event.factors = [self._seen.scaling.by_hand]
        if changed or (gone and self._by_hand is not None):
            self._finish(cleared=cleared)
            return True
        if gone and not self._finite:
            self._note_attempt(applied=False, late=not cleared)
            return True
        return False

    def _are_gone(self) -> bool:
        """Whether the last gradients were cleared, or can be of no use any more."""
        if any(p.grad is None or (id(p.grad), p.grad._version) != (i, v) for p, _, i, v in self._marks):
            return True
        # Some loops clear their gradients between the forward and the backward pass: too late to see a step begin.
        return self.scales_itself and not self._finite and not self._sums

    def note_optimizer_step(self) -> None:
        """An optimizer of torch steps."""
        self._marks, self._alone = [], False
        if self._by_hand is not None and not self._was_seen:  # the optimizer was made before it could be seen
            self._seen.forget_optimizer(self._by_hand)
            self._by_hand = None
        if self.scales_itself:
            self._note_attempt(applied=True)

    def begin_step(self, *, stepped: bool) -> None:
        """A step begins; whether an optimizer or a scaler was called in the last one."""
        self._alone = not stepped or self._by_hand is not None or self.scales_itself

    def _find_loose(self) -> list[Tensor]:
        """Weights with gradients that no optimizer holds."""
        seen = self._seen
        others = [made for made in seen.optimizers.values() if made.optimizer is not self._by_hand]
        held = {id(p) for made in others for p in made.parameters} if seen.num_stepped else set[int]()
        return [p for p, *_ in self._marks if id(p) not in held]

    def _gradients(self) -> list[Tensor]:
        """What the last backward pass gave to the weights."""
        known = self._given
        found = [p.grad if known is None else known.get(id(p)) for p, *_ in self._marks]
        return [gradient for gradient in found if gradient is not None]

    def _has_changed(self) -> bool:
        loose = {id(p) for p in self._find_loose()}
        if any(p._version != version for p, version, *_ in self._marks if id(p) in loose):
            return True
        if self._copy is None:
            return False
        weight, copy, _ = self._copy
        with Aside():
            return weight.shape != copy.shape or not bool(torch.equal(weight.detach(), copy))

    def _copy_one(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
        if weight.numel() > _MOST_COMPARED:
            return None
        gradient = weight.grad if self._given is None else self._given.get(id(weight))
        if self._seen.scaling.by_hand < _LEAST_SCALE:
            gradient = None
        with Aside():
            return weight, weight.detach().clone(), None if gradient is None else gradient.detach().clone()

    def _is_still_scaled(self) -> bool:
        """Whether a weight has moved by a learning rate times a gradient with the loss scale in it.

        Numerics:
            Where all elements moved by the same multiple of their gradient, to 1e-3, that multiple is the rate, or the
            rate over the scale. People write rates of one or two digits: it is taken for the rate itself where it has
            no more, to 5e-4, and the scale times it has more, or is above 1. Of such rates up to 1, over scales from
            2^6 to 2^24, none is mistaken. Checked by tests/probe/watch/test_own_updates.py.
        """
        weight, copy, gradient = self._copy or (None, None, None)
        if weight is None or copy is None or gradient is None:
            return False
        with Aside():
            moved, driven = (copy.double() - weight.detach().double()).flatten(), gradient.double().flatten()
            rates = (moved / driven)[driven.abs() > 0.1 * driven.abs().max()]
            rate = float(rates.median()) if rates.numel() else 0.0
            if not 0.0 < rate < math.inf or float((rates - rate).abs().max()) > 1e-3 * rate:
                return False
        whole = rate * self._seen.scaling.by_hand
        return _has_two_digits(rate) and (whole > 1.0 or not _has_two_digits(whole))

    def _make_updates(self, parameters: list[Tensor]) -> Updates:
        with self._seen.one_call:
            return Updates(parameters)

    def _note_step(self, updates: Updates) -> None:
        """What a light step of an optimizer tells: gradients are looked at before the weights change."""
        seen = self._seen
        made = seen.add_optimizer(updates, seen.locate())
        held = seen.scaling.gradients.find(updates)
        gradients = self._gradients()
        values, health = judge(seen, largest_of(gradients), gradients)
        event = describe_step(seen, updates, made, held, (len(held.parameters), len(gradients)), values)
        event.name, event.region = UPDATES, 0
        self._event = seen.note_cheaply(event, of=event.optimizer)
        if seen.listener is not None:
            seen.listener.see_gradients(updates, self._event, health)
        if not isinstance(health, LateHealth):
            self._finite = math.isfinite(health)

    def _finish(self, *, cleared: bool) -> None:
        """The weights have been updated."""
        seen = self._seen
        seen.num_stepped += 1
        if seen.listener is not None and self._by_hand is not None and self._event is not None:
            seen.listener.see_weights(self._by_hand)
            seen.listener.end_step(late=not cleared)

    def _note_attempt(self, *, applied: bool, late: bool = False) -> None:
        """As a scaler's: a step was made or left out."""
        seen, self.scales_itself = self._seen, True
        event = seen.note(
            ScalerStepEvent(-1, BY_HAND, seen.scaling.by_hand, num_gradients=1, halves=[], applied=applied)
        )
        if seen.listener is not None:
            seen.listener.see_attempt(event, seen.step_losses)
            seen.listener.end_step(late=late)


def _has_two_digits(number: float) -> bool:
    return abs(float(f"{number:.1e}") / number - 1) < 5e-4


class LooseWeights(nn.Module):
    """Stands for a model that is none.

    Args:
        tensors: The weights.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        names = _find_names()
        self._tensors = {names.get(id(tensor), f"weight {i}"): tensor for i, tensor in enumerate(tensors)}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        """The weights and their names."""
        yield from self._tensors.items()


def _find_names() -> dict[int, str]:
    """Names of the tensors among a script's globals, also inside lists and dicts, by id."""
    names: dict[int, str] = {}
    for name, value in list(vars(sys.modules["__main__"]).items()):
        items: list[tuple[str, Any]] = [(name, value)]
        if isinstance(value, dict):
            items = [(f"{name}[{key!r}]", one) for key, one in value.items()]  # pyright: ignore[reportUnknownVariableType]
        elif isinstance(value, (list, tuple)):
            items = [(f"{name}[{i}]", one) for i, one in enumerate(value)]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        for text, one in items:
            if isinstance(one, Tensor):
                names.setdefault(id(one), text)
    return names
