"""Gradients that a loop takes by torch.func: heard from outside its transforms, with the tensors inside of them."""

# torch shows its transforms to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack, temporarily_restore_interpreter_stack
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from floatline.probe.watch.gradient_scales import find_factor_by_hand
from floatline.probe.watch.patches import Patches, holds_numbers, is_compiling

_functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009 (its stubs do not know it)
# Of one tensor a gradient is also taken to attack it, or to sample; weights are several.
_FEWEST = 2


@dataclass
class FunctionalGradient:
    """One call of a function that torch.func.grad or grad_and_value made: also inside vmap, never inside another.

    Args:
        weights: What the gradients are of, by name: below all transforms, as the loop holds them.
        args: What the function is given; below all transforms.
        is_kept: Whether the gradients have a graph of their own: another loss may be made of them.
        gradients: By the same names; below all transforms, where vmap gives a row for each sample. Empty until it ends.
        loss: The function's value, with an element for each sample of vmap; None until it ends.
        factor: What the function multiplied its value by last, such as a loss scale; 1 for nothing.
        again: Gives loss and gradients once more, as long as the weights are what they were; None where that can no
            longer be asked for, as transforms around it have ended.
    """

    weights: dict[str, Tensor]
    args: tuple[Any, ...]
    is_kept: bool
    again: Callable[[], Any] | None
    gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    loss: Tensor | None = None
    factor: float = 1.0


Hearing = Callable[[FunctionalGradient], AbstractContextManager[None]]


def patch_functional_gradients(patches: Patches, hearing: Hearing) -> None:
    """Hear the gradients that are taken on this thread of several tensors at once.

    Args:
        patches: The patch is among these.
        hearing: Gives a context for each call; when it is left, loss and gradients are there. In it, and in what it
            does, no transform is at work, and gradients are not tracked.
    """
    thread, depth = threading.get_ident(), 0

    def wrap(run: Callable[..., Any]) -> Callable[..., Any]:
        def take(func: Any, argnums: Any, has_aux: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal depth
            if depth or threading.get_ident() != thread or is_compiling():
                return run(func, argnums, has_aux, args, kwargs)
            depth += 1
            try:
                around = _functorch.peek_interpreter_stack() is not None
                call = _read(args, argnums, _inside(lambda: run(func, argnums, has_aux, args, kwargs)))
                if len(call.weights) < _FEWEST or not all(map(holds_numbers, call.weights.values())):
                    return run(func, argnums, has_aux, args, kwargs)
                with _between(hearing(call)):
                    result = run(_finding_factor(func, call, has_aux), argnums, has_aux, args, kwargs)
                    call.gradients = _floats(result[0])
                    call.loss = _unwrap(result[1][0] if has_aux else result[1])
                if around:
                    call.again = None
                return result
            finally:
                depth -= 1

        return take

    patches.wrap(eager_transforms, "grad_and_value_impl", wrap)


@contextmanager
def _between(context: AbstractContextManager[None]) -> Generator[None]:
    """Enter and leave a context outside of all transforms, and run what is inside as it is."""
    with _outside():
        context.__enter__()
    try:
        yield
    except BaseException as error:
        with _outside():
            context.__exit__(type(error), error, error.__traceback__)
        raise
    with _outside():
        context.__exit__(None, None, None)


@contextmanager
def _outside() -> Generator[None]:
    """Without transforms and gradients for a while."""
    if _functorch.peek_interpreter_stack() is None:
        with torch.no_grad():
            yield
        return
    with temporarily_clear_interpreter_stack(), torch.no_grad():
        yield


def _inside(run: Callable[[], Any]) -> Callable[[], Any]:
    """What runs later in the transforms that are at work now, and gives its result below all of them."""
    with temporarily_clear_interpreter_stack() as stack:
        pass

    def run_inside() -> Any:
        with temporarily_restore_interpreter_stack(stack):
            return _unwrap_all(run())

    return run_inside


def _finding_factor(func: Callable[..., Any], call: FunctionalGradient, has_aux: bool) -> Callable[..., Any]:
    """The function; inside of the transforms it is seen what its value was multiplied by."""

    def find(*args: Any, **kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        with contextlib.suppress(Exception):
            call.factor = find_factor_by_hand([result[0] if has_aux else result])
        return result

    return find


def _read(args: tuple[Any, ...], argnums: int | tuple[int, ...], again: Callable[[], Any]) -> FunctionalGradient:
    places = (argnums,) if isinstance(argnums, int) else argnums
    asked = [args[place] for place in places if -len(args) <= place < len(args)]
    weights = _floats(asked[0] if len(asked) == 1 else asked)
    kept = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights.values())
    chosen = {place % len(args) for place in places} if args else set[int]()
    others = tuple(_unwrap_all(value) for place, value in enumerate(args) if place not in chosen)
    return FunctionalGradient(weights, others, kept, again)


def _floats(tree: Any) -> dict[str, Tensor]:
    """The tensors with a fraction in a tree, below all transforms, by their places: 'layer.weight', '0.weight'."""
    found: dict[str, Tensor] = {}
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            found[_name(path)] = _unwrap(leaf)
    return found


def _name(path: tuple[Any, ...]) -> str:
    keys = [getattr(part, "key", getattr(part, "idx", getattr(part, "name", None))) for part in path]
    return ".".join(map(str, keys)) if None not in keys else keystr(path)


def _unwrap_all(tree: Any) -> Any:
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([_unwrap(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def _unwrap(tensor: Tensor) -> Tensor:
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor
