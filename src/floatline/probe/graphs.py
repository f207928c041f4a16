"""The autograd graph behind a loss: the loss scale in it, and the tensors it gives gradients to."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from floatline.probe.aside import Aside

_TAG = "floatline_scale"
_GRADIENT_TAG = "floatline_scaled_gradient"
# A scaled loss is divided by the number of micro-batches, or summed with others; hardly more.
_NEAR = 64
_PRODUCTS = frozenset(("MulBackward0", "DivBackward0"))
# No weight of a loss is meant by a larger number.
_LEAST_SCALE = 7.9


def mark_scaled(tensor: Tensor, scale: float) -> None:
    """Remember that a tensor, and what is made of it, is multiplied by a loss scale."""
    setattr(tensor, _TAG, scale)
    node: Any = tensor.grad_fn
    if node is not None:
        node.metadata[_TAG] = scale


def find_factor(tensors: Iterable[Any]) -> float:
    """The loss scale in these tensors or just below them; 1 where there is none."""
    present = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    for tensor in present:
        if hasattr(tensor, _TAG):
            return getattr(tensor, _TAG)
    for number, node in enumerate(_walk(present)):
        if _TAG in node.metadata:
            return node.metadata[_TAG]
        if number == _NEAR:
            break
    return 1.0


def find_factor_by_hand(outputs: Sequence[Any]) -> float:
    """The number that a loss was multiplied by last, as in `(loss * 2**16).backward()`; 1 where there is none."""
    node: Any = outputs[0].grad_fn if len(outputs) == 1 and isinstance(outputs[0], Tensor) else None
    for _ in range(3):  # a division by the number of micro-batches may come after it
        if node is None or node.name() not in _PRODUCTS:
            return 1.0
        other = getattr(node, "_saved_other", None)
        if isinstance(other, Tensor) and other.is_cpu and other.numel() == 1 and not other.requires_grad:
            with Aside():
                number = float(other)
            factor = 1 / number if number and node.name().startswith("Div") else number
            if factor > _LEAST_SCALE:
                return factor
        node = next((following for following, _ in node.next_functions if following is not None), None)
    return 1.0


def mark_scaled_gradients(tensors: Iterable[Any], scale: float) -> None:
    """Remember that tensors are gradients with a loss scale in them, which a loss may be made of."""
    for tensor in tensors:
        node: Any = getattr(tensor, "grad_fn", None)
        if node is not None:
            node.metadata[_GRADIENT_TAG] = scale


def find_scaled_gradient(outputs: Iterable[Any]) -> float:
    """The loss scale of gradients that the outputs are made of, where nothing divides by it on the way; else 1."""
    scale, factors = 1.0, set[float]()
    for node in _walk((o for o in outputs if isinstance(o, Tensor)), stop=_GRADIENT_TAG):
        scale = max(scale, node.metadata.get(_GRADIENT_TAG, 1.0))
        factors |= set(_read_factors(node))
    divided = any(abs(factor * scale**power - 1) < 1e-3 for factor in factors for power in (1, 2))
    return 1.0 if divided else scale


def _read_factors(node: Any) -> Iterator[float]:
    """Single numbers that a node multiplies by, as it keeps them for its backward pass."""
    divides = "Div" in node.name()
    if _GRADIENT_TAG in node.metadata or not (divides or "Mul" in node.name()):
        return
    for name in dir(node):
        if not name.startswith("_saved_"):
            continue
        try:
            with Aside():
                value = getattr(node, name)
                value = float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
        except RuntimeError:  # freed by an earlier backward pass
            continue
        if isinstance(value, float) and value:
            yield 1 / value if divides else value


def find_leaves(outputs: Iterable[Any]) -> list[Tensor]:
    """Every tensor that a backward pass from the outputs adds a gradient to."""
    return [node.variable for node in _walk(o for o in outputs if isinstance(o, Tensor)) if hasattr(node, "variable")]


def _walk(tensors: Iterable[Tensor], *, stop: str = "") -> Iterator[Any]:
    """The nodes, nearest first; not what lies behind one that has the tag `stop`."""
    queue: deque[Any] = deque(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None)
    known = {id(node) for node in queue}
    kept: list[Any] = []  # a node's id is its own only while Python holds it
    while queue:
        node = queue.popleft()
        kept.append(node)
        yield node
        if stop and stop in node.metadata:
            continue
        for following, _ in node.next_functions:
            if following is not None and id(following) not in known:
                known.add(id(following))
                queue.append(following)
