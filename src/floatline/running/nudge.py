"""Nudge: weights of a script moved a little, once: how far its training goes apart by that alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter  # pyright: ignore[reportPrivateUsage]

from floatline.probe.watch.patches import Patches
from floatline.running.loss_log import find_trained_roots

_SEED = 17


class Nudge:
    """Multiplies every weight by nearly 1 after the first backward pass that reaches it.

    The numbers are drawn from a generator of its own, so that those of the script are as they were.

    Args:
        share: The most that a number is moved by, of its size.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._done: dict[int, Tensor] = {}  # kept alive, so that no other takes the same id
        self._generator = torch.Generator().manual_seed(_SEED)

    def patch(self, patches: Patches) -> None:
        """Listen to backward passes."""
        patches.wrap(torch.autograd, "backward", self._hearing)
        patches.wrap(torch.autograd, "grad", self._hearing_grad)

    def _hearing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            roots: list[Any] = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            leaves = [leaf for leaf in _find_leaves(roots) if id(leaf) not in self._done]
            original(tensors, *args, **kwargs)
            for leaf in leaves:
                self._move(leaf)

        return backward

    def _hearing_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            inputs = inputs if isinstance(inputs, Tensor) else tuple(inputs)  # an iterator is read once
            outputs = outputs if isinstance(outputs, Tensor) else tuple(outputs)
            into = inputs if find_trained_roots(outputs, inputs, kwargs) else ()
            leaves = [leaf for leaf in into if id(leaf) not in self._done]
            found = original(outputs, inputs, *args, **kwargs)
            for leaf in leaves:
                self._move(leaf)
            return found

        return grad

    def _move(self, leaf: Tensor) -> None:
        self._done[id(leaf)] = leaf
        if not leaf.is_floating_point():
            return
        drawn = torch.rand(leaf.shape, generator=self._generator, device="cpu")
        drawn.mul_(2 * self._share).add_(1 - self._share)
        # A graph that the script keeps for a second pass stays valid.
        with torch.no_grad(), _unsafe_preserve_version_counter(leaf):
            leaf.mul_(drawn.to(leaf.device, leaf.dtype))


def _find_leaves(roots: list[Any]) -> Iterator[Tensor]:
    """The leaves that a backward pass from these would reach."""
    nodes = [root.grad_fn for root in roots if isinstance(root, Tensor) and root.grad_fn is not None]
    seen: set[Any] = set(nodes)
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
