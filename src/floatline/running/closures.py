"""Closures of optimizers: what is done when one has computed its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


class ToldClosure:
    """A closure that tells each time when it has been called.

    Args:
        closure: The script's own.
        then: Called when it has made its gradients.
    """

    def __init__(self, closure: Callable[[], Any], then: Callable[[], Any]) -> None:
        self._closure, self._then = closure, then

    def __call__(self) -> Any:
        """Call the script's own, and tell."""
        loss = self._closure()
        self._then()
        return loss


def tell_after_closures(
    args: Sequence[Any], kwargs: Mapping[str, Any], then: Callable[[], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of an optimizer's step with closures that tell; None where there is no closure.

    Args:
        args: With the optimizer as the first.
        kwargs: By name.
        then: What they tell.
    """
    if not any(callable(argument) for argument in (*args[1:], *kwargs.values())):
        return None

    def told(argument: Any) -> Any:
        return ToldClosure(argument, then) if callable(argument) else argument

    return (args[0], *map(told, args[1:])), {name: told(argument) for name, argument in kwargs.items()}
