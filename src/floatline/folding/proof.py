"""Proof: a folded model against the one it was made of, in FP32 on random inputs and in 16 bits against FP32."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from floatline.folding.rewriting import cast_floats, half_copy
from floatline.numerics.half_on_cpu import HalfOnCPU

# What shifted weights, which are rounded once, may change in FP32: a hundred roundings.
ROUNDED = 100 * 2.0**-24


@dataclass(frozen=True)
class Proof:
    """How near outputs are.

    Attributes:
        trials: Random inputs that both models were run on in FP32.
        equal: Of them, how many gave the same outputs bit for bit.
        difference: The largest relative difference among them.
        tolerance: What it may be: zero, or where weights were rounded, a few roundings of FP32.
        fp16_before: Relative error of the outputs in FP16 before the fold, to FP32's; inf where they are not finite.
        fp16_after: The same after the fold.
        bf16: The same in BF16, before the fold.
    """

    trials: int
    equal: int
    difference: float
    tolerance: float
    fp16_before: float
    fp16_after: float
    bf16: float

    @property
    def holds(self) -> bool:
        """Whether the folded model is the same function."""
        return self.difference <= self.tolerance


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Run a model on a mapping of arguments, a tuple of them, or one."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def draw_inputs(inputs: Any, vocabularies: Mapping[int, int], generator: torch.Generator) -> Any:
    """Random inputs of the same kind: tokens of the vocabulary, normal numbers; masks and positions as they are.

    Args:
        inputs: What the model was given.
        vocabularies: How many tokens there are, by the number of the input among all.
        generator: Source of randomness, on the CPU.
    """
    numbers = iter(range(len(tree_leaves(inputs))))

    def draw(leaf: Any) -> Any:
        number = next(numbers)
        if number in vocabularies:
            return torch.randint(vocabularies[number], leaf.shape, generator=generator, device=generator.device).to(
                leaf
            )
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.numel() < 2:
            return leaf
        values = torch.randn(leaf.shape, generator=generator, device=generator.device).to(leaf)
        return values * leaf.std() + leaf.mean()

    return tree_map(draw, inputs)


def prove_fold(
    model: nn.Module,
    folded: nn.Module,
    inputs: Any,
    *,
    draw: Callable[[torch.Generator], Any],
    keep: tuple[str, ...],
    rounded: bool,
    trials: int,
) -> Proof:
    """Run both models and compare.

    Numerics:
        Errors are ‖y - y32‖ / ‖y32‖ over all outputs, in FP64. On a CPU 16 bits are computed as a tensor core does.
    """
    generator = torch.Generator().manual_seed(0)
    differences: list[float] = []
    for _ in range(trials):
        drawn = draw(generator)
        differences.append(relative_error(run_quietly(folded, drawn), run_quietly(model, drawn)))
    exact = run_quietly(model, inputs)

    def measure(one: nn.Module, dtype: torch.dtype, kept: tuple[str, ...] = ()) -> float:
        return relative_error(run_sixteen(half_copy(one, dtype, kept), inputs), exact)

    return Proof(
        trials,
        equal=differences.count(0.0),
        difference=max(differences),
        tolerance=ROUNDED if rounded else 0.0,
        fp16_before=measure(model, torch.float16),
        fp16_after=measure(folded, torch.float16, keep),
        bf16=measure(model, torch.bfloat16),
    )


def run_sixteen(model: nn.Module, inputs: Any) -> list[Tensor]:
    """Outputs of a model that is in 16 bits, with its inputs in the format of its parameters."""
    first = next(one for one in model.parameters() if one.dtype is not torch.float32)
    with HalfOnCPU() if first.device.type == "cpu" else nullcontext():
        return run_quietly(model, cast_floats(inputs, first.dtype))


def run_quietly(model: nn.Module, inputs: Any) -> list[Tensor]:
    """The real-valued outputs of a model, without gradients."""
    with torch.no_grad():
        leaves = tree_leaves(call_model(model, inputs))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def relative_error(found: list[Tensor], exact: list[Tensor]) -> float:
    """‖found - exact‖ / ‖exact‖; zero only where they are equal bit for bit, inf where one is not finite."""
    if all(torch.equal(a, b) for a, b in zip(found, exact, strict=True)):
        return 0.0
    difference = sum((a.double() - b.double()).square().sum().item() for a, b in zip(found, exact, strict=True))
    size = sum(b.double().square().sum().item() for b in exact)
    error = math.sqrt(difference / size) if size and math.isfinite(difference) else math.inf
    return error if math.isfinite(error) else math.inf
