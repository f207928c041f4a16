"""Rewriting: the rewrites of a plan, applied to what torch computes inside one call of a module or function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from floatline.plans.plan import RewriteKind
from floatline.precision.rewrites.calls import MISSED, Call, name_call
from floatline.precision.rewrites.elementwise import note_call
from floatline.precision.rewrites.logarithms import (
    cross_entropy_of_sigmoid,
    log_of_one_plus_exp,
    log_of_sigmoid,
    log_of_softmax,
    ratio_of_exp,
)
from floatline.precision.rewrites.masks import fitting_constant, restore_unless_softmax, restored
from floatline.precision.rewrites.provenance import Origins
from floatline.precision.rewrites.small_eps import eps_in_fp32

Rule = Callable[[Call, Origins], Any]
RULES: dict[RewriteKind, Rule] = {
    "log-sigmoid": log_of_sigmoid,
    "log-softmax": log_of_softmax,
    "softplus": log_of_one_plus_exp,
    "exp-ratio": ratio_of_exp,
    "bce-with-logits": cross_entropy_of_sigmoid,
    "mask-constant": fitting_constant,
    "small-eps": eps_in_fp32,
}


class Rewriting(TorchFunctionMode):
    """What torch computes inside is computed in another form of the same function, where a rule knows one.

    A rule recognises operations by where their operands came from, as in log(sigmoid(x)), however they are written.
    Operands that were written to in between, that hooks or `retain_grad` watch, or that another operation touched
    are not recognised, and computed as the code says.

    Numerics:
        Each rule's docstring states its identity and where it holds. Results have the dtype that the code's would
        have, except a reduced loss, which stays FP32.

    Args:
        kinds: Which rewrites, as in a plan.
    """

    def __init__(self, kinds: Collection[RewriteKind]) -> None:
        super().__init__()
        self._rules = [RULES[kind] for kind in RULES if kind in kinds]
        self._has_masks = "mask-constant" in kinds
        self._origins = Origins()

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[Any], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one function; torch calls this."""
        del types
        call = name_call(func, tuple(args), kwargs or {})
        if call.name == "__get__":
            return call.run()
        if self._has_masks:
            call = restore_unless_softmax(call, self._origins)
        for rule in self._rules:
            result = rule(call, self._origins)
            if result is not MISSED:
                return result
        result = call.run()
        note_call(call, result, self._origins)
        return result

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function with the rewrites."""
        try:
            with self:
                result = function(*args, **kwargs)
            return self._give_back(result)
        finally:
            self._origins.forget()

    def _give_back(self, result: Any) -> Any:
        """What leaves is used by others: with the constants that the code asked for."""
        if not self._has_masks:
            return result

        def restore(value: Any) -> Any:
            found = self._origins.find(value, "filled") if isinstance(value, Tensor) else None
            return value if found is None else restored(value, found)

        return tree_map(restore, result)
