"""Fold: the residual stream and other values of a network scaled by powers of two that its outputs do not see."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from floatline.base.files import write_whole
from floatline.base.json_values import encode_number
from floatline.errors import FoldError
from floatline.folding.choice import FoldedGroup, Obstacle, choose_exponents
from floatline.folding.exponents import Exponents
from floatline.folding.fused_weights import split_fused
from floatline.folding.homogeneity import Relation, relate
from floatline.folding.proof import Proof, call_model, draw_inputs, prove_fold
from floatline.folding.recorded_graph import Graph, mark_sixteen, record_graph
from floatline.folding.rewriting import (
    WeightRewrite,
    cast_floats,
    half_copy,
    plan_rewrite,
    rewrite_model,
    rounded_parameters,
    shared_parameters,
    untie_parameters,
)
from floatline.numerics.half_on_cpu import HalfOnCPU

# The setting that each (module, attribute) takes its epsilon from; one that is not here cannot be changed.
SharedEps = Mapping[tuple[str, str], Hashable]


@dataclass(frozen=True)
class Fold:
    """A model folded, with what was changed, what could not be, and the proof.

    Attributes:
        model: The folded model, in FP32; the one that was given is as it was.
        rewrite: What differs between the two.
        groups: What was scaled, by which power of two, and because of which value.
        obstacles: Values too large for FP16 that no scale helps.
        fp32: Parameters that FP16 would spoil, to be kept in FP32: they are added to a constant.
        untied: Parameters that were made by untying.
        margin: How many times larger than measured values may become.
        proof: Both models run on the same inputs.
    """

    model: nn.Module
    rewrite: WeightRewrite
    groups: tuple[FoldedGroup, ...]
    obstacles: tuple[Obstacle, ...]
    fp32: tuple[str, ...]
    untied: tuple[str, ...]
    margin: float
    proof: Proof

    @property
    def verdict(self) -> Literal["as it is", "folded", "in the way", "not proven"]:
        """Whether the model fits FP16 as it is, after the fold, not yet, or the fold is not the same function."""
        if not self.proof.holds:
            return "not proven"
        if self.obstacles:
            return "in the way"
        return "folded" if self.rewrite else "as it is"

    def save(self, path: str | Path) -> None:
        """Write the folded weights to a safetensors file, in FP32; shared weights are written once."""
        from safetensors.torch import save_model

        save_model(self.model, str(path))

    def save_folder(self, out: str | Path) -> None:
        """Write the folded weights to a new folder, with what was done as fold.json; epsilons are in that file alone.

        Raises:
            FoldError: The folder cannot be made, or what is read back is something else.
        """
        from safetensors.torch import load_model  # pyright: ignore[reportUnknownVariableType]

        try:
            Path(out).mkdir(parents=True)
        except OSError as error:
            raise FoldError(f"'{out}' cannot be written: {error}. Name a new folder.") from None
        path = Path(out, "model.safetensors")
        self.save(path)
        read: nn.Module = copy.deepcopy(self.model)
        for parameter in read.parameters():
            parameter.data.zero_()
        load_model(read, path)
        own = self.model.state_dict()
        if not all(torch.equal(tensor, own[name]) for name, tensor in read.state_dict().items()):
            raise FoldError(f"What is read back from '{path}' is not what was written. Do not use it.")
        write_whole(Path(out, "fold.json"), json.dumps(self.as_json(), indent=2, allow_nan=False))

    def as_json(self) -> dict[str, Any]:
        """Plain data for programs."""
        numbers = vars(self.proof).items()
        proof = {name: encode_number(value) if isinstance(value, float) else value for name, value in numbers}
        return {
            "verdict": self.verdict,
            "margin": self.margin,
            "groups": [vars(group) for group in self.groups],
            "obstacles": [vars(obstacle) for obstacle in self.obstacles],
            "weights": dict(self.rewrite.weights),
            "parts": {name: [one.as_json() for one in parts] for name, parts in self.rewrite.parts.items()},
            "shifted": {name: {"added_to": c, "exponent": power} for name, (c, power) in self.rewrite.shifted.items()},
            "eps": [
                {"module": module, "attribute": name, "exponent": power}
                for (module, name), power in self.rewrite.eps.items()
            ],
            "fp32": list(self.fp32),
            "untied": list(self.untied),
            "proof": proof | {"holds": self.proof.holds},
        }


def fold(
    model: nn.Module,
    inputs: Any,
    *,
    margin: float = 4.0,
    untie: bool = False,
    shared_eps: SharedEps | None = None,
    trials: int = 3,
) -> Fold:
    """Scale what is too large for FP16 by powers of two, in the weights, so that the model computes the same function.

    The model is run once on the inputs in FP32, and every operation is noted with what it reads and writes. What may be
    scaled follows from that: norms do not see the scale of what they read, sums need one scale, a product adds the
    exponents of its factors, and an operation such as softmax or silu must be given its argument as it is. Only groups
    of values that are too large are scaled.

    Numerics:
        Powers of two do not round: outputs in FP32 are the same bit for bit, epsilons included, and the proof checks it
        on random inputs. Weights that the model adds to a constant (Gemma's 1 + w) are rounded once.
        Checked by tests/folding/.

    Args:
        model: A model in FP32, or in 16 bits: it is copied and widened, without rounding.
        inputs: What it is run on: a mapping of arguments, a tuple of them, or one. Ranges are measured here.
        margin: How many times larger than measured a value may become before FP16 overflows.
        untie: Whether weights that are used in several places (an embedding that is the head too) become several.
        shared_eps: Where epsilons can be changed only by settings, what each comes from: those of one setting stay
            equal, and those of none stay as they are. By default each module has its own.
        trials: Random inputs that the proof runs both models on.

    Raises:
        FoldError: The model does not run in FP32 or in 16 bits on these inputs.
    """
    if not margin >= 1:
        raise FoldError(f"margin is {margin}: a value may become so many times larger. Give 1 or more.")
    base = copy.deepcopy(model).float().eval()
    inputs = cast_floats(inputs, torch.float32)
    untied = untie_parameters(base) if untie else ()
    graph = measure_graph(base, inputs)
    if not graph.outputs:
        raise FoldError("The model gives no tensor of real numbers, so nothing can be compared. Return its outputs.")
    rewrite, groups, obstacles = _decide(graph, margin, shared_eps)
    shared = shared_parameters(base)
    hint = "; it is used in several places, and untying gives each its own"
    obstacles = tuple(replace(one, why=one.why + hint) if one.place in shared else one for one in obstacles)
    folded = copy.deepcopy(base)
    rewrite_model(folded, rewrite)
    keep = rounded_parameters(folded, rewrite)
    proof = prove_fold(
        base,
        folded,
        inputs,
        draw=_drawing(graph, inputs),
        keep=keep,
        rounded=bool(rewrite.shifted),
        trials=trials,
    )
    return Fold(folded, rewrite, groups, obstacles, keep, untied, margin, proof)


def measure_graph(model: nn.Module, inputs: Any) -> Graph:
    """What a model in FP32 reads and writes, with the values marked that would be in 16 bits.

    Raises:
        FoldError: It does not run.
    """
    graph = _record(model, inputs, "FP32")
    # BF16 has FP16's places and FP32's range: nothing overflows, and no model clamps there.
    narrow = half_copy(model, torch.bfloat16)
    with HalfOnCPU():
        low = _record(narrow, cast_floats(inputs, torch.bfloat16), "16 bits")
    mark_sixteen(graph, low)
    return split_fused(graph, model)


def _record(model: nn.Module, inputs: Any, precision: str) -> Graph:
    try:
        return record_graph(model, lambda one: call_model(one, inputs), inputs)
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        raise FoldError(
            f"The model does not run in {precision} on these inputs: {type(error).__name__}: {said}"
        ) from error


def _decide(
    graph: Graph, margin: float, shared: SharedEps | None
) -> tuple[WeightRewrite, tuple[FoldedGroup, ...], tuple[Obstacle, ...]]:
    def size(unknown: Hashable) -> float:
        return graph.nodes[unknown].largest if isinstance(unknown, int) else 0.0

    def setting(module: str, name: str) -> Hashable:
        own = ("eps", module, name)
        return own if shared is None else shared.get((module, name), own)

    relations = relate(graph, setting)
    for module, names in graph.eps.items():
        why = f"the epsilon of {module} stands in no setting of the config"
        relations += [Relation({setting(module, name): 1}, why) for name in names if not _is_free(shared, module, name)]
    exponents = Exponents(
        relations,
        may_follow=lambda unknown: not isinstance(unknown, int) or graph.nodes[unknown].of_weights,
        size=size,
    )
    choice = choose_exponents(graph, exponents, margin=margin)
    owners: dict[Hashable, list[tuple[str, str]]] = {}
    for place, unknown in (shared or {}).items():
        owners.setdefault(unknown, []).append(place)
    return plan_rewrite(graph, choice.exponents, owners), choice.groups, choice.obstacles


def _is_free(shared: SharedEps | None, module: str, name: str) -> bool:
    return shared is None or (module, name) in shared


def _drawing(graph: Graph, inputs: Any) -> Callable[[torch.Generator], Any]:
    names = {node.name: number for number, node in enumerate(graph.nodes) if node.kind == "input"}
    places = {number: names.get(f"input {number}") for number in range(len(tree_leaves(inputs)))}
    rows = {
        number: graph.vocabularies[home]
        for number, home in places.items()
        if home is not None and home in graph.vocabularies
    }
    return lambda generator: draw_inputs(inputs, rows, generator)
