"""The kinds of rewrites, each by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import libcst as cst

from floatline.fixes import borders, expressions, guards, loops, statements, statistics
from floatline.fixes.spanning import (
    buffers,
    checkpoints,
    frameworks,
    functions,
    masks,
    new_scaler,
    own_scales,
    passes,
    precisions,
    regions,
    scalers,
    weights,
)
from floatline.fixes.spanning.edits import SpanRewrite
from floatline.fixes.statements import NewStatements

StatementRewrite = Callable[[cst.SimpleStatementLine, cst.CSTNode, expressions.FixContext], "NewStatements | None"]
FixKind = Literal[
    "log-sigmoid", "log-softmax", "softplus", "log-sum-exp", "exp-ratio", "bce-with-logits", "mask-constant",
    "small-eps", "float-operands", "unscale-before-clip", "step-through-scaler", "bare-parameter",
    "update-after-step", "amp-by-device", "trainable-in-fp32", "fp32-setting",
    "vector-norm", "two-pass-variance", "sum-dtype", "float-and-back", "fp32-cast", "fp32-weights", "fp32-island",
    "float-input", "input-dtype", "source-dtype", "write-dtype", "product-dtype", "double-where", "mean-of-some",
    "no-clamp", "schedule-after-step", "unscaled-penalty", "mixed-precision", "scaler-with-autocast", "scale-back-off",
    "unscale-once", "scaler-state", "buffer-keeps-dtype", "fp32-loop", "fp32-first", "mask-sum", "add-scaler",
    "autocast-forward", "divide-by-scale", "clip-in-framework", "backward-in-framework", "trainer-precision",
    "one-scaler", "small-mask", "fp32-state", "scale-backward",
    "unscale-by-scaler", "clear-always", "unscale-all", "fp32-function", "fp32-eps",
]  # fmt: skip
EXPRESSIONS: dict[FixKind, expressions.Rewrite] = {
    "log-sigmoid": expressions.log_sigmoid,
    "log-softmax": expressions.log_softmax,
    "softplus": expressions.softplus,
    "log-sum-exp": expressions.log_sum_exp,
    "exp-ratio": expressions.exp_ratio,
    "bce-with-logits": expressions.bce_with_logits,
    "mask-constant": expressions.mask_constant,
    "small-eps": expressions.small_eps,
    "float-operands": expressions.float_operands,
    "amp-by-device": loops.amp_by_device,
    "vector-norm": statistics.vector_norm,
    "two-pass-variance": statistics.two_pass_variance,
    "sum-dtype": statistics.sum_dtype,
    "float-and-back": borders.float_and_back,
    "fp32-cast": borders.fp32_cast,
    "fp32-state": borders.fp32_state,
    "fp32-weights": borders.fp32_weights,
    "float-input": borders.float_input,
    "input-dtype": borders.input_dtype,
    "source-dtype": borders.source_dtype,
    "product-dtype": borders.product_dtype,
    "double-where": guards.double_where,
    "mean-of-some": guards.mean_of_some,
    "no-clamp": guards.no_clamp,
    "fp32-eps": guards.fp32_eps,
    "unscaled-penalty": loops.unscaled_penalty,
}
# What looks at nothing but its own expression: at no other statement.
ALONE: frozenset[FixKind] = frozenset({"amp-by-device"})
STATEMENTS: dict[FixKind, StatementRewrite] = {
    "unscale-before-clip": statements.unscale_before_clip,
    "step-through-scaler": statements.step_through_scaler,
    "bare-parameter": statements.bare_parameter,
    "update-after-step": loops.update_after_step,
    "trainable-in-fp32": loops.trainable_in_fp32,
    "fp32-island": borders.fp32_island,
    "write-dtype": borders.write_dtype,
    "schedule-after-step": loops.schedule_after_step,
}
# What looks at the whole file and changes several of its statements: each is for a line that a finding has named.
SPANS: dict[FixKind, SpanRewrite] = {
    "mixed-precision": precisions.mixed_precision,
    "scaler-with-autocast": scalers.scaler_with_autocast,
    "scale-back-off": own_scales.scale_back_off,
    "divide-by-scale": own_scales.divide_by_scale,
    "clip-in-framework": frameworks.clip_in_framework,
    "backward-in-framework": frameworks.backward_in_framework,
    "trainer-precision": frameworks.trainer_precision,
    "one-scaler": scalers.one_scaler,
    "scale-backward": passes.scale_backward,
    "unscale-by-scaler": passes.unscale_by_scaler,
    "clear-always": passes.clear_always,
    "unscale-all": passes.unscale_all,
    "fp32-function": functions.fp32_function,
    "unscale-once": scalers.unscale_once,
    "scaler-state": checkpoints.scaler_state,
    "buffer-keeps-dtype": buffers.buffer_keeps_dtype,
    "fp32-loop": regions.fp32_loop,
    "fp32-first": regions.fp32_first,
    "mask-sum": masks.mask_sum,
    "small-mask": masks.small_mask,
    "add-scaler": new_scaler.add_scaler,
    "autocast-forward": weights.autocast_forward,
}
# Kinds that fit many healthy lines: they are for a line that a finding has named.
ONLY_FOR_FINDINGS: frozenset[FixKind] = frozenset({
    "float-and-back", "fp32-cast", "fp32-state", "fp32-weights", "fp32-island", "float-input", "input-dtype",
    "source-dtype", "write-dtype", "product-dtype", "double-where", "mean-of-some", "no-clamp", "schedule-after-step",
    "two-pass-variance", "vector-norm", "update-after-step", "fp32-eps", *SPANS,
})  # fmt: skip
