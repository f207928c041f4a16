"""Outputs of a forward pass: found and named, and held against those of FP32. Numbers only."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

OutputKind = Literal["logits", "numbers", "choices"]

# Rows of fewer numbers are no logits of a vocabulary.
_FEWEST_SYMBOLS = 8


@dataclass(frozen=True)
class OutputMatch:
    """How far one output is from FP32's.

    Args:
        name: Of the output.
        kind: 'logits' of tokens; 'choices', which are integers or truth values; or other 'numbers'.
        error: Norm of the difference over that of FP32's; of logits without the mean of each row, which softmax does
            not see; of choices the share that is another. inf where it is not finite.
        cosine: Of the angle between them; NaN of choices, and where one of them is 0 or not finite.
        kl: Of logits, KL(FP32 || this) in nats, the mean over tokens; None of other outputs.
        top1: Of logits, the share of tokens whose largest is FP32's; None of other outputs.
    """

    name: str
    kind: OutputKind
    error: float
    cosine: float = math.nan
    kl: float | None = None
    top1: float | None = None

    @property
    def distance(self) -> float:
        """One number to judge by, which grows in proportion to rounding: the error, or sqrt(2 KL) where that is more.

        Logits may hold a few large numbers that everything else drowns in, and KL sees what is left of them.
        """
        return self.error if self.kl is None else max(self.error, math.sqrt(2 * max(self.kl, 0.0)))


def name_outputs(made: Any) -> dict[str, Tensor]:
    """Tensors in what a model gives, by name: of mappings and dataclasses their keys, of rows their places."""
    found: dict[str, Tensor] = {}
    _collect(made, "", found)
    return found


def _collect(value: Any, name: str, found: dict[str, Tensor]) -> None:
    if isinstance(value, Tensor):
        if not value.is_complex() and value.layout is torch.strided and value.numel():
            found[name or "output"] = value
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[Any, Any]", value).items():
            _collect(item, f"{name}.{key}" if name else str(key), found)
    elif isinstance(value, list | tuple):
        for place, item in enumerate(cast("Sequence[Any]", value)):
            _collect(item, f"{name or 'output'}[{place}]", found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name, None), f"{name}.{field.name}" if name else field.name, found)


def find_logits(model: nn.Module, outputs: Mapping[str, Tensor]) -> frozenset[str]:
    """Names of outputs that are logits of tokens: called so; or without a name, and as wide as a table has rows."""
    sizes = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    return frozenset(
        name
        for name, tensor in outputs.items()
        if tensor.is_floating_point()
        and tensor.dim() > 1
        and tensor.shape[-1] >= _FEWEST_SYMBOLS
        and (
            name.rpartition(".")[2] == "logits"
            or (name.startswith("output") and tensor.dim() > 2 and tensor.shape[-1] in sizes)
        )
    )


def match_output(name: str, own: Tensor, wide: Tensor, *, logits: bool = False, marks: bool = False) -> OutputMatch:
    """Hold an output against FP32's.

    Numerics:
        In float64. -inf in both, as of tokens that are ruled out, is no difference. What is not finite in one of them
        alone makes the error inf. Checked by tests/probe/steps/test_outputs.py.

    Args:
        name: Of the output.
        own: The output.
        wide: The same in FP32.
        logits: Whether its rows are logits of tokens.
        marks: Whether NaN in both is no difference either: it marks what is not valid.
    """
    kind: OutputKind = "choices" if not wide.is_floating_point() else "logits" if logits else "numbers"
    if own.shape != wide.shape:
        return OutputMatch(name, kind, math.inf)
    if kind == "choices":
        return OutputMatch(name, kind, float((own != wide).double().mean()))
    x, y = own.double(), wide.double()
    ruled_out = (y == -math.inf) & (x == -math.inf)
    if marks:
        ruled_out |= (y.isnan() & x.isnan()) | (y.isinf() & (x == y))
    if not bool((x.isfinite() & y.isfinite() | ruled_out).all()):
        return OutputMatch(name, kind, math.inf)
    kl = top1 = None
    if logits:
        kl, top1 = _match_tokens(x, y, ruled_out)
        x, y = _centre(x, ruled_out), _centre(y, ruled_out)
    x, y = x.masked_fill(ruled_out, 0.0), y.masked_fill(ruled_out, 0.0)
    size, norms = _norm(y), _norm(x) * _norm(y)
    difference = _norm(x - y)
    error = difference / size if size else (math.inf if difference else 0.0)
    return OutputMatch(name, kind, error, float((x * y).sum()) / norms if norms else math.nan, kl, top1)


def _norm(tensor: Tensor) -> float:
    return math.sqrt(float(tensor.square().sum()))


def _match_tokens(x: Tensor, y: Tensor, ruled_out: Tensor) -> tuple[float, float]:
    own, wide = x.log_softmax(-1), y.log_softmax(-1)
    terms = (wide.exp() * (wide - own)).masked_fill(ruled_out, 0.0)
    same = x.argmax(-1) == y.argmax(-1)
    return float(terms.sum(-1).mean()), float(same.double().mean())


def _centre(x: Tensor, ruled_out: Tensor) -> Tensor:
    kept = x.masked_fill(ruled_out, 0.0)
    return kept - kept.sum(-1, keepdim=True) / (~ruled_out).sum(-1, keepdim=True).clamp(min=1)
