"""Model fit: whether a model fits FP16 as it is, after a fold, or with some modules in FP32; each is tried."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from floatline.base.json_values import encode_number
from floatline.folding.choice import Obstacle
from floatline.folding.proof import relative_error, run_quietly, run_sixteen
from floatline.folding.rewriting import half_copy
from floatline.folding.scale_fold import Fold, SharedEps, fold
from floatline.precision.islands import Islands

Verdict = Literal["as it is", "after folding", "with an island", "does not fit"]


@dataclass(frozen=True)
class ModelFit:
    """How a model fits FP16.

    Attributes:
        fold: The fold that was tried.
        island: Modules that computed in FP32 in the last trial.
        fp16: Relative error of the outputs in FP16, after the fold and with the island, to FP32's.
        bf16: The same in BF16, of the model as it is: what FP16 has to be as near as.
    """

    fold: Fold
    island: tuple[str, ...]
    fp16: float
    bf16: float

    @property
    def verdict(self) -> Verdict:
        """The least that FP16 needs to be as near to FP32 as BF16 is."""
        if not self.fold.proof.holds or not self.fp16 <= self.bf16:
            return "does not fit"
        if self.island:
            return "with an island"
        return "after folding" if self.fold.rewrite else "as it is"

    @property
    def exponent(self) -> int:
        """The lowest power of two that something was scaled by; 0 where nothing was."""
        return min((group.exponent for group in self.fold.groups), default=0)

    def as_json(self) -> dict[str, Any]:
        """Plain data for programs."""
        return {
            "verdict": self.verdict,
            "exponent": self.exponent,
            "island": list(self.island),
            "fp16": encode_number(self.fp16),
            "fp16_before": encode_number(self.fold.proof.fp16_before),
            "bf16": encode_number(self.bf16),
            "obstacles": [str(obstacle) for obstacle in self.fold.obstacles],
            "fp32": list(self.fold.fp32),
        }


def fit_model(model: nn.Module, inputs: Any, *, margin: float = 4.0, shared_eps: SharedEps | None = None) -> ModelFit:
    """Fold a model, put what is left too large into FP32, and run it in FP16.

    Args:
        model: The model.
        inputs: What ranges are measured on, as for `fold`.
        margin: How many times larger than measured a value may become.
        shared_eps: As for `fold`.
    """
    found = fold(model, inputs, margin=margin, shared_eps=shared_eps)
    island = find_island(found.obstacles)
    if not island or "" in island:  # nothing, or the whole model
        return ModelFit(found, (), found.proof.fp16_after, found.proof.bf16)
    names = [name for name, _ in found.model.named_parameters() if any(_is_in(name, one) for one in island)]
    narrow = half_copy(found.model, torch.float16, (*names, *found.fp32))
    islands = Islands(narrow, island)
    try:
        error = relative_error(run_sixteen(narrow, inputs), run_quietly(found.model, inputs))
    finally:
        islands.remove()
    return ModelFit(found, island, error, found.proof.bf16)


def find_island(obstacles: Iterable[Obstacle]) -> tuple[str, ...]:
    """Modules that hold all that makes or reads a value that is too large: one for each, none inside another."""
    found = {_common(obstacle.modules) for obstacle in obstacles}
    return tuple(sorted(one for one in found if not any(_is_in(one, other) for other in found - {one})))


def _common(modules: Iterable[str]) -> str:
    """The module that all of these are in."""
    paths = [module.split(".") for module in modules]
    shared: list[str] = []
    for words in zip(*paths, strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    return ".".join(shared)


def _is_in(name: str, module: str) -> bool:
    return module == "" or name.startswith(f"{module}.") or name == module
