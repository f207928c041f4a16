"""Runs a rule's example on real tensors, in FP64 and in FP16.

The names that an example uses and does not define are given: see `given`. What it computes is in `y`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def given(dtype: torch.dtype) -> dict[str, object]:
    """Free names of examples. Values reach where FP16 breaks: logits to 40, lengths to 0, sums beyond 65504."""
    draw = torch.Generator().manual_seed(0)

    def normal(*size, scale=1.0):
        return (torch.randn(*size, generator=draw, dtype=torch.float64) * scale).half().to(dtype)

    logits = normal(6, 16, scale=10.0)
    logits[0] = torch.linspace(-40, 40, 16).to(dtype)
    return {
        "x": logits,
        "y0": normal(6, 16),
        "z": normal(6, 16),
        "q": normal(2, 4, 8),
        "k": normal(2, 4, 8),
        "p": torch.sigmoid(logits),
        "mask": torch.arange(16).expand(6, 16) % 5 == 4,
        "target": (torch.arange(96).view(6, 16) % 3 == 0).to(dtype),
        "labels": torch.arange(6) % 16,
        "big": normal(6, 4096, scale=60.0),
        "tiny": normal(6, 16, scale=1e-3),
        "zeros": torch.zeros(6, 16, dtype=dtype),
        "rows": normal(6, 8, scale=3.0),
        "columns": normal(5, 8, scale=3.0),
        "n": 16,
    }


@dataclass
class Outcome:
    """What an example computed from the same numbers in both formats."""

    fp64: torch.Tensor
    fp16: torch.Tensor | None

    def fp64_equals(self, other: Outcome) -> bool:
        """Up to the rounding of FP64. Where one is not finite the other may be anything: there is nothing to keep."""
        finite = self.fp64.isfinite() & other.fp64.isfinite()
        return bool(finite.any()) and torch.allclose(self.fp64[finite], other.fp64[finite], rtol=1e-9, atol=1e-12)

    def fp16_error(self) -> float:
        """The largest difference from FP64, relative to 1 + |value|; inf where FP16 gives none or raises."""
        if self.fp16 is None:
            return float("inf")
        known = self.fp64.isfinite() & (self.fp64.abs() < 65504)
        error = (self.fp16.double() - self.fp64).abs() / (1 + self.fp64.abs())
        worst = error[known].nan_to_num(float("inf"), float("inf"), float("inf")).max()
        return float(worst)


def run_example(source: str) -> Outcome:
    """Execute it twice."""
    fp64 = _run(source, torch.float64)
    try:
        fp16 = _run(source, torch.float16)
    except RuntimeError:
        fp16 = None
    return Outcome(fp64, fp16)


def _run(source: str, dtype: torch.dtype) -> torch.Tensor:
    scope = given(dtype)
    if dtype is torch.float64:  # FP64 stands for exact arithmetic: a cast in the example must not be the coarser one
        source = source.replace(".float()", ".double()").replace("float32", "float64")
        source = source.replace(".half()", ".double()").replace("t.float16", "t.float64")
        source = source.replace("torch.float16", "torch.float64")
    exec(compile(source, "example.py", "exec"), scope)  # the project's own examples
    return torch.as_tensor(scope["y"])
