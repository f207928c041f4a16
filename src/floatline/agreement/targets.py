"""Targets of the command line as sides: a workload's model in the precision that it is meant to run in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils._pytree import tree_map

from floatline.agreement.sides import Around, Given, Side
from floatline.errors import ParityError, TargetError
from floatline.plans import Plan
from floatline.plans.presets import resolve_plan
from floatline.precision.dtypes import DTYPES
from floatline.precision.islands import Islands, cast_weights
from floatline.workload.target import load_target


@dataclass(frozen=True)
class OpenedTarget:
    """A target, ready to run.

    Args:
        text: As the user wrote it.
        model: In the plan's format.
        given: The inputs of one batch.
        plan: What it is meant to run in.
        around: Autocast, where the plan is mixed.
    """

    text: str
    model: nn.Module
    given: Given
    plan: Plan
    around: Around = field(default=contextlib.nullcontext)

    @property
    def side(self) -> Side:
        """The model as a side."""
        return Side.of(self.model, self.around)


def open_target(text: str, *, seed: int = 0, batch: int = 0, plan: str | None = None) -> OpenedTarget:
    """Build a target's workload and put its plan into force.

    Args:
        text: FILE.py, package.module:name or a reference workload.
        seed: Of the target.
        batch: Which of its batches.
        plan: Another plan than its own, by name or YAML file.
    """
    workload = load_target(text).build(seed)
    if not 0 <= batch < len(workload.batches):
        raise ParityError(f"Target '{text}' has no batch {batch}, but {len(workload.batches)}. Count from 0.")
    chosen = resolve_plan(plan if plan is not None else workload.precision)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = workload.model.to(device)
    cast_weights(model, chosen)
    kept = chosen.check_modules(model)
    if kept:
        Islands(model, kept)
    given = Given(tuple(workload.batches[batch][0])).fresh(
        None if chosen.mixed else DTYPES[chosen.weights], tracked=False
    )
    given = _move(given, device)
    around: Around = contextlib.nullcontext
    if chosen.mixed:

        @contextlib.contextmanager
        def autocast() -> Generator[None]:
            with torch.autocast(device, dtype=DTYPES[chosen.compute]):
                yield

        around = autocast
    return OpenedTarget(text, model, given, chosen, around)


@dataclass(frozen=True)
class OpenedCallables:
    """Functions of a file that has `inputs(seed)`, which says what they are called with.

    Args:
        a: The first.
        b: The second; None where there is only one.
        given: The inputs.
    """

    a: Side
    b: Side | None
    given: Given


def open_callables(a: str, b: str | None, *, seed: int = 0) -> OpenedCallables | None:
    """Plain functions of files, where A's file has `inputs`; None where it has none, or A is no name in a file.

    Args:
        a: 'FILE.py:name'.
        b: The same, also of another file; None opens A alone.
        seed: Of the inputs.

    Raises:
        TargetError: There is no such file or function.
    """
    place, _, name = a.rpartition(":")
    if not place or not name.isidentifier():
        return None
    try:
        inputs = load_target(f"{place}:inputs")
    except TargetError:
        return None
    functions = [_function_of(text) for text in (a, b) if text is not None]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = _move(Given.of(inputs.call(seed)), device)
    for function in functions:
        if isinstance(function, nn.Module):
            function.to(device)
    sides = [Side.of(function) for function in functions]
    return OpenedCallables(sides[0], sides[1] if b is not None else None, given)


def _function_of(text: str) -> Callable[..., object]:
    target = load_target(text)
    found = target.builder or target.trainer
    if found is None:
        raise ParityError(f"'{text}' names no function. Give FILE.py:name.")
    return found


def give_weights(a: OpenedTarget, b: OpenedTarget) -> None:
    """Give B the weights and buffers of A: what differs then is the computation.

    Raises:
        ParityError: They have other names or shapes.
    """
    ours, theirs = a.model.state_dict(), b.model.state_dict()
    missing = sorted(ours.keys() ^ theirs.keys())
    if missing:
        whose = "A" if missing[0] in ours else "B"
        raise ParityError(
            f"Only {whose} has '{missing[0]}': the models must have weights of the same names. Give both the same."
        )
    for name, value in ours.items():
        if theirs[name].shape != value.shape:
            raise ParityError(
                f"'{name}' is {tuple(value.shape)} in A and {tuple(theirs[name].shape)} in B. Build both alike."
            )
        with torch.no_grad():
            theirs[name].copy_(value)


def _move(given: Given, device: str) -> Given:
    def move(value: object) -> object:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    args, kwargs = tree_map(move, (given.args, dict(given.kwargs)))
    return Given(args, kwargs)
