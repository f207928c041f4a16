"""The parameters of a model, told apart by dtype, training and what a format would make of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from floatline.formats import Format, find_format
from floatline.numerics.ranges import measure_ranges

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NARROW = (torch.float16, torch.bfloat16)


def find_parameters(model: nn.Module, dtype: torch.dtype, *, trainable_only: bool = False) -> dict[str, nn.Parameter]:
    """The parameters of that dtype by qualified name; tied ones once."""
    return {
        name: parameter
        for name, parameter in floating_parameters(model)
        if parameter.dtype == dtype and (parameter.requires_grad or not trainable_only)
    }


def floating_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Name and parameter of all that hold floating-point numbers; tied ones once."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            yield name, parameter


def find_overflow(model: nn.Module, to: Format | str) -> dict[str, int]:
    """How many weights of each parameter would leave the format's range, where any would.

    Numerics:
        Counts finite weights that nearest rounding would make infinite (for fp16 from 65520 on).
    """
    fmt = find_format(to)
    counts: dict[str, int] = {}
    for name, parameter in floating_parameters(model):
        if not parameter.numel():
            continue
        low, high = parameter.detach().aminmax()
        # The extremes are cheap to read; only a tensor that leaves the range, or holds NaN, is counted.
        if high.isnan() or max(-low.item(), high.item()) >= fmt.overflow_at:
            counts[name] = measure_ranges(parameter, fmt).against(fmt).overflow
    return {name: count for name, count in counts.items() if count}
