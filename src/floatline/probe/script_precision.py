"""name_precision: what a loop that was watched trained in."""

from __future__ import annotations

from collections import Counter

import torch

from floatline.probe.records import RunRecord

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def name_precision(record: RunRecord) -> str:
    """'fp16-true' for 16-bit weights, 'fp16-mixed' for autocast or a scaler, else 'fp32'; '' without a model."""
    if record.model is None:
        return ""
    dtypes = Counter(p.dtype for p in record.model.parameters() if p.requires_grad)
    usual = dtypes.most_common(1)[0][0] if dtypes else torch.float32
    if usual in _NAMES:
        return f"{_NAMES[usual]}-true"
    regions = Counter(e.data["dtype"] for e in record.of("autocast") if e.data["enabled"])
    if regions:
        name = regions.most_common(1)[0][0].removeprefix("torch.")
        return {"float16": "fp16-mixed", "bfloat16": "bf16-mixed"}.get(name, f"{name}-mixed")
    return "fp32"
