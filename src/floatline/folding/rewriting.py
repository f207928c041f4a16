"""Rewriting: a fold put into the weights and epsilons of a model, and what 16 bits make of weights that are rounded."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from floatline.folding.homogeneity import Unknown
from floatline.folding.recorded_graph import Graph, name_modules


@dataclass(frozen=True)
class ScaledPart:
    """Places of a parameter along one of its dimensions, multiplied by two to a power."""

    dim: int
    places: tuple[int, ...]
    exponent: int

    def as_json(self) -> dict[str, Any]:
        """Plain data for programs; places as runs of the first and the last."""
        runs: list[list[int]] = []
        for place in self.places:
            if runs and runs[-1][1] == place - 1:
                runs[-1][1] = place
            else:
                runs.append([place, place])
        return {"dim": self.dim, "places": runs, "exponent": self.exponent}


@dataclass(frozen=True)
class WeightRewrite:
    """What is changed in a model. Names are those of `named_parameters`, and of its modules.

    Attributes:
        weights: Parameters that are multiplied by two to a power.
        shifted: Parameters that are read as c + w, with c and the power: they become 2^power (c + w) - c, rounded.
        eps: Epsilons, as (module, attribute), that are multiplied by two to a power.
        parts: Of fused parameters, the parts that are multiplied by two to a power.
    """

    weights: Mapping[str, int]
    shifted: Mapping[str, tuple[float, int]]
    eps: Mapping[tuple[str, str], int]
    parts: Mapping[str, tuple[ScaledPart, ...]] = field(default_factory=dict[str, "tuple[ScaledPart, ...]"])

    def __bool__(self) -> bool:
        """Whether anything is changed."""
        return bool(self.weights or self.shifted or self.eps or self.parts)


def plan_rewrite(
    graph: Graph, exponents: Mapping[Unknown, int], eps_of: Mapping[Unknown, list[tuple[str, str]]]
) -> WeightRewrite:
    """What the exponents of a graph change in its model.

    Args:
        graph: The graph.
        exponents: Exponents that are not zero.
        eps_of: The epsilons behind an unknown that several modules share.
    """
    weights: dict[str, int] = {}
    shifted: dict[str, tuple[float, int]] = {}
    eps: dict[tuple[str, str], int] = {}
    parts: dict[str, tuple[ScaledPart, ...]] = {}
    for unknown, power in exponents.items():
        if isinstance(unknown, int):
            part = graph.nodes[unknown].part
            if part is not None:
                own = ScaledPart(part.dim, part.places, power)
                parts[part.parameter] = (*parts.get(part.parameter, ()), own)
            elif graph.nodes[unknown].kind == "parameter":
                weights[graph.nodes[unknown].name] = power
        elif unknown in eps_of:
            eps |= dict.fromkeys(eps_of[unknown], power)
        elif isinstance(unknown, tuple) and unknown[0] == "eps":
            eps[unknown[1], unknown[2]] = power
        elif isinstance(unknown, tuple):
            shifted[graph.nodes[unknown[1]].name] = (unknown[2], power)
    for name in list(parts):
        whole = sum(node.part is not None and node.part.parameter == name for node in graph.nodes)
        powers = {part.exponent for part in parts[name]}
        if len(parts[name]) == whole and len(powers) == 1:  # all of it, alike
            weights[name] = powers.pop()
            del parts[name]
    return WeightRewrite(weights, shifted, eps, parts)


@torch.no_grad()
def rewrite_model(model: nn.Module, rewrite: WeightRewrite) -> None:
    """Change the weights and epsilons of a model.

    Numerics:
        Powers of two do not round while results are normal numbers of the weights' format. Shifted weights are
        computed in FP64 and rounded once. Checked by tests/folding/test_rewriting.py.
    """
    parameters = dict(model.named_parameters())
    for name, power in rewrite.weights.items():
        parameters[name].mul_(2.0**power)
    for name, parts in rewrite.parts.items():
        for part in parts:
            index = torch.tensor(part.places, device=parameters[name].device)
            scaled = parameters[name].index_select(part.dim, index) * 2.0**part.exponent
            parameters[name].index_copy_(part.dim, index, scaled)
    for name, (number, power) in rewrite.shifted.items():
        weight = parameters[name]
        weight.copy_((weight.double() + number) * 2.0**power - number)
    for (module, attribute), power in rewrite.eps.items():
        owner = model.get_submodule(module)
        held = getattr(owner, attribute)
        setattr(owner, attribute, (2.0**-23 if held is None else held) * 2.0**power)


def rounded_parameters(model: nn.Module, rewrite: WeightRewrite) -> tuple[str, ...]:
    """Shifted weights that FP16 would round more than it rounds a number: c + w is small where w is not."""
    found: list[str] = []
    parameters = dict(model.named_parameters())
    for name, (number, _) in rewrite.shifted.items():
        exact = parameters[name].detach().double() + number
        error = (parameters[name].detach().half().double() + number - exact).abs()
        if (error > exact.abs() * 2.0**-10).any():
            found.append(name)
    return tuple(found)


def half_copy(model: nn.Module, dtype: torch.dtype, keep: tuple[str, ...] = ()) -> nn.Module:
    """A copy of a model in 16 bits, but for some parameters."""
    copied = copy.deepcopy(model).to(dtype)
    parameters = dict(copied.named_parameters())
    for name in keep:
        parameters[name].data = model.get_parameter(name).detach().clone()
    return copied


def shared_parameters(model: nn.Module) -> set[str]:
    """Parameters that are used in several places, by the first of their names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {several[0] for several in names.values() if len(several) > 1}


@torch.no_grad()
def untie_parameters(model: nn.Module) -> tuple[str, ...]:
    """Give each use of a shared parameter, but for the first, a copy of its own; a config then ties them no more.

    Returns:
        Names of the new parameters.
    """
    seen: set[int] = set()
    made: list[str] = []
    for path, module in name_modules(model):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in seen:
                setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad))
                made.append(f"{path}.{name}")
            seen.add(id(parameter))
    config: Any = getattr(model, "config", None)
    if made and getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = False
    return tuple(made)


def cast_floats(inputs: Any, dtype: torch.dtype) -> Any:
    """Inputs with tensors of real numbers in another format, and all else as it is."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast, inputs)
