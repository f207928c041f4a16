"""Symptoms: messages that several causes share, those of torch.autograd's anomaly mode among them."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Symptom:
    """A message that does not decide its cause.

    Args:
        title: What the message says, in one line.
        patterns: Regular expressions, any of which finds it.
        causes: The ids that fit, in the order worth checking.
        check: What to look at to decide between them.
    """

    title: str
    patterns: tuple[str, ...]
    causes: tuple[str, ...]
    check: str

    def is_in(self, text: str) -> bool:
        """Whether the text shows this symptom."""
        return any(re.search(pattern, text, re.IGNORECASE) for pattern in self.patterns)


_ANOMALY = r"Function '(?:%s)\w*' returned nan values"
# The most specific first; the last takes whatever is left.
ANOMALIES: tuple[Symptom, ...] = (
    Symptom(
        title="Anomaly mode stopped at a softmax or attention",
        patterns=(_ANOMALY % r"\w*Softmax|\w*Attention",),
        causes=(
            "fully-masked-softmax",
            "scalar-out-of-range",
            "activation-overflow",
            "optimizer-state-underflow",
        ),
        check=(
            "Look at the scores that enter it. A row of -inf that the code wrote is fully-masked-softmax; a "
            "-inf made by adding a constant or two masks is scalar-out-of-range; +inf or NaN came from "
            "upstream."
        ),
    ),
    Symptom(
        title="Anomaly mode stopped at a normalisation layer",
        patterns=(_ANOMALY % r"\w*(?:Layer|Group|Batch|RMS|Instance)_?Norm",),
        causes=("activation-overflow", "input-out-of-range", "product-overflow", "bad-input-data"),
        check=(
            "The normalisation is rarely guilty: look at its input. An inf there was made by an earlier "
            "layer, by the cast of the batch, or was in the data."
        ),
    ),
    Symptom(
        title="Anomaly mode stopped at a root, power, norm or angle",
        patterns=(_ANOMALY % r"Sqrt|Rsqrt|Pow|Acos|Asin|Atanh|LinalgVectorNorm|Norm|Cdist|Std|Var",),
        causes=(
            "singular-gradient",
            "rounded-onto-singularity",
            "eps-underflow",
            "cancellation",
            "gradient-overflow",
        ),
        check=(
            "Compute the operand in FP32. Exactly on the singular point: singular-gradient. Near it: "
            "rounded-onto-singularity, or eps-underflow if a guard was added. Negative: cancellation."
        ),
    ),
    Symptom(
        title="Anomaly mode stopped at an exp or a product",
        patterns=(_ANOMALY % r"Exp|Mul|Sinh|Cosh",),
        causes=("exp-overflow", "product-overflow", "activation-overflow"),
        check=(
            "Look at the forward values of that line. An inf from exp is exp-overflow, an inf from the "
            "product itself product-overflow; a factor that came in as inf was made upstream."
        ),
    ),
    Symptom(
        title="Anomaly mode stopped at a log, sigmoid or division",
        patterns=(_ANOMALY % r"Log|Sigmoid|Div|Reciprocal|BinaryCrossEntropy|NllLoss",),
        causes=(
            "rounded-onto-singularity",
            "eps-underflow",
            "gradient-overflow",
            "singular-gradient",
            "exp-overflow",
        ),
        check=(
            "Look at the operand of the log or the denominator. Exactly zero, and a guard was added: "
            "eps-underflow. Exactly zero in 16 bits only: rounded-onto-singularity. Small but not zero: "
            "gradient-overflow."
        ),
    ),
    Symptom(
        title="Anomaly mode stopped at an operation",
        patterns=(r"Function '\w+' returned nan values",),
        causes=(
            "activation-overflow",
            "gradient-overflow",
            "product-overflow",
            "exp-overflow",
            "bad-input-data",
        ),
        check=(
            "Anomaly mode names where NaN was first seen in backward. Look at the forward values of that "
            "line: an inf or NaN there was made further up."
        ),
    ),
)


_NONFINITE = r"(?:nan|[-+]?inf(?:inity|inite)?)\b"
# A complaint in words is short; in a long log the same words mean nothing.
_IN_WORDS = r"^(?=.{0,200}$).*"

_NAN_CAUSES = (
    "activation-overflow",
    "eps-underflow",
    "optimizer-state-underflow",
    "rounded-onto-singularity",
    "exp-overflow",
    "scalar-out-of-range",
    "reduction-overflow",
    "bad-input-data",
    "optimization-divergence",
    "empty-reduction",
    "fully-masked-softmax",
    "nan-times-zero",
)
_NAN_CHECK = (
    "Run the same batches and seed in FP32. NaN there too: one of the last five. Fine in FP32 and in BF16: a "
    "range cause; fine in FP32 and NaN in BF16: rounding. Then find the first operation with finite inputs "
    "and a non-finite output."
)

# The most specific first: of several symptoms in one text only the first is reported.
SYMPTOMS: tuple[Symptom, ...] = (
    Symptom(
        title="Two dtypes met in one operation",
        patterns=(
            r"expected scalar type '?\w+'? but found '?\w+",
            r"(?:mat1 and mat2|m1 and m2|self and mat2|vec1 and vec2|both vectors|query, key, and value|"
            r"input tensors).{0,25}have (?:the )?same dtype",
            r"Input type \(\S+\) and (?:bias|weight) type \(\S+\) should be the same",
            r"Input dtypes must be the same",
            r"Input and parameter tensors are not the same dtype",
            r"input must have the type torch\.\w+, got type torch\.\w+",  # recurrent layers, torch 2.6
            r"input dtype \(\S+\) does not match weight dtype",
            r"mixed dtype \(CPU\): expect parameter to have scalar type",
        ),
        causes=("dtype-mismatch", "autocast-region-misuse"),
        check=(
            "Find the line that raised. Inside autocast(enabled=False) it is autocast-region-misuse: the "
            "input was not cast at the border. In backward, or anywhere else, it is dtype-mismatch."
        ),
    ),
    *ANOMALIES,
    Symptom(
        title="Weights or buffers are not finite",
        patterns=(
            r"Detected nan and/or inf values in",
            r"nans? (?:found )?in (?:the )?(?:model )?(?:weights?|parameters?|state.?dict)",
        ),
        causes=(
            "optimizer-state-underflow",
            "gradient-overflow",
            "optimization-divergence",
            "bad-input-data",
        ),
        check=(
            "Look one step back. Gradients finite and weights not: optimizer-state-underflow. Gradients not "
            "finite: the step should have been skipped, so look at the scaler, then at the data."
        ),
    ),
    Symptom(
        title="The loss is NaN or inf",
        patterns=(
            r"\b\w*loss\w*\W{0,6}(?:is|was|=|:|becomes?|became|turned|went|goes|returned in \S+ is)?"
            rf"\W{{0,12}}(?:to |into )?{_NONFINITE}",
            rf"{_NONFINITE}\W{{0,3}}(?:in |as )?(?:the )?(?:\w+ )?loss",
            r"non-?finite loss",
            rf"\bloss overflow(?:ed)?(?: detected)?\W{{1,4}}{_NONFINITE}",
            rf"\b(?:perplexity|ppl)\W{{1,6}}{_NONFINITE}",
        ),
        causes=_NAN_CAUSES,
        check=_NAN_CHECK,
    ),
    Symptom(
        title="Steps are skipped and the loss scale falls",
        patterns=(
            r"gradient overflow(?: detected)?\W{1,3}skipping (?:step|batch)",
            r"loss scale (?:was )?(?:reduced|halved|decreased|lowered|backed off) (?:from|to|by)\b",
            r"overflow!.{0,40}skipping step",
            r"grad overflow on iteration",
            r"loss scale already at minimum",
            r"minimum loss scale reached",
            r"(?:non-?finite|inf|nan) grad\w*,? (?:step )?skipp",
        ),
        causes=(
            "gradient-overflow",
            "activation-overflow",
            "exp-overflow",
            "scaler-state-lost",
            "optimization-divergence",
            "bad-input-data",
        ),
        check=(
            "A few skips at the start and then none are how a dynamic scale settles: nothing is wrong. If "
            "they do not stop, look at the forward pass first: a non-finite value there cannot be fixed by "
            "any scale."
        ),
    ),
    Symptom(
        title="The gradient norm is not finite",
        patterns=(
            r"total norm of order \S+ for gradients .{0,30}non-finite",
            rf"grad(?:ient)?[ _]?norm\W{{1,4}}(?:is )?{_NONFINITE}",
        ),
        causes=(
            "gradient-overflow",
            "activation-overflow",
            "exp-overflow",
            "singular-gradient",
            "rounded-onto-singularity",
            "bad-input-data",
        ),
        check=(
            "Under a scaler one such step now and then is normal. Otherwise run the same batch in FP32: not "
            "finite there either means singular-gradient or bad-input-data; finite means a range cause, "
            "forward first."
        ),
    ),
    Symptom(
        title="Gradients are large",
        patterns=(r"\b(?:large|unstable) grad(?:ient)?s?(?: norm| step|\W)",),
        causes=("clip-before-unscale", "optimization-divergence", "gradient-overflow", "bad-input-data"),
        check=(
            "Read the norm after scaler.unscale_. Before it, gradients are larger by as much as the loss scale says, "
            "and a clip there is clip-before-unscale. Large after it, run the same batch in FP32: as large there is "
            "optimization-divergence or the batch."
        ),
    ),
    Symptom(
        title="Gradients are small",
        patterns=(r"\b(?:small|tiny) grad(?:ient)?s?(?: norm|\W)",),
        causes=("gradient-underflow", "update-lost-to-rounding", "clamp-kills-gradient", "params-not-trained"),
        check=(
            "A small norm is no fault: what counts is what became zero. Compare the share of zeros with FP32's on the "
            "same batch. More of them in FP16 is gradient-underflow; as many, and weights that stand still, "
            "update-lost-to-rounding."
        ),
    ),
    Symptom(
        title="A value that must be finite is not",
        patterns=(
            r"probability tensor contains either `?inf",
            r"found invalid values:.{0,40}nan",
            r"all elements of input should be between 0 and 1",
            r"input_val >= (?:zero|0) && input_val <= (?:one|1)",
            r"contained non-finite values",
            r"Detected inf/nan during batch_number",
            r"NaN or Inf found in input tensor",
        ),
        causes=(
            "activation-overflow",
            "optimizer-state-underflow",
            "fully-masked-softmax",
            "scalar-out-of-range",
            "bad-input-data",
        ),
        check=(
            "The message comes from the first check that looks, not from the operation at fault. See whether "
            "the weights are finite; if they are, find the first operation with finite inputs and a "
            "non-finite output."
        ),
    ),
    Symptom(
        title="DistributedDataParallel waits for gradients that do not come",
        patterns=(r"Expected to have finished reduction in the prior iteration",),
        causes=("params-not-trained", "distributed-desync"),
        check=(
            "Parameters without a gradient on every rank: params-not-trained. On one rank only: the ranks "
            "take different paths, distributed-desync."
        ),
    ),
    Symptom(
        title="The loss scaler is switched off",
        patterns=(r"GradScaler is enabled, but \w+ is not available",),
        causes=("gradient-underflow",),
        check="It matters only under FP16 autocast: BF16 and FP32 need no scaler.",
    ),
    Symptom(
        title="NumPy met zero or NaN",
        patterns=(r"(?:divide by zero|invalid value) encountered in",),
        causes=(
            "eps-underflow",
            "empty-reduction",
            "cancellation",
            "rounded-onto-singularity",
            "bad-input-data",
        ),
        check="Look at the operand that the warning's line divides by, or takes the log or root of.",
    ),
    Symptom(
        title="A NaN was seen",
        patterns=(r"\bnans?\b",),
        causes=_NAN_CAUSES,
        check=_NAN_CHECK,
    ),
    Symptom(
        title="The loss does not move",
        patterns=(
            _IN_WORDS + r"\b(?:loss|accuracy|metric|model|training|network|weights?|it)\b.{0,30}"
            r"\b(?:flat|stuck|constant|frozen|plateaus?|stagnat\w+)\b",
            _IN_WORDS + r"\b(?:do|does|is|are)(?: not|n.?t) (?:learn|converg|decreas|improv|mov|train|chang)",
            _IN_WORDS + r"\bnever (?:learns?|converges?|decreases?|improves?|moves?|changes?)\b",
        ),
        causes=(
            "gradient-underflow",
            "update-lost-to-rounding",
            "params-not-trained",
            "clip-before-unscale",
            "clamp-kills-gradient",
            "product-overflow",
            "scheduler-vs-skipped-step",
            "autocast-region-misuse",
            "bad-input-data",
        ),
        check=(
            "Run FP32 first: flat there too means params-not-trained, clamp-kills-gradient or wrong labels. "
            "Then look at one step: gradients None, zero or tiny; weights moved or bit-identical; learning "
            "rate still above zero."
        ),
    ),
    Symptom(
        title="16 bits train, but worse than FP32",
        patterns=(
            _IN_WORDS + r"\b(?:worse|lower|drops?|dropped|fell|falls|degrad\w+|gap)\b.{0,60}"
            r"\b(?:fp16|bf16|float16|bfloat16|amp|half|mixed|16.?bit)\b",
            _IN_WORDS + r"\b(?:fp16|bf16|float16|bfloat16|amp|half|mixed|16.?bit)\b.{0,60}"
            r"\b(?:worse|lower|drops?|dropped|fell|falls|degrad\w+|gap)\b",
        ),
        causes=(
            "update-lost-to-rounding",
            "gradient-underflow",
            "clip-before-unscale",
            "integer-not-exact",
            "accumulator-stagnation",
            "reduction-overflow",
            "exp-overflow",
            "decay-lost-to-rounding",
        ),
        check=(
            "Compare several seeds first: one run against one run shows mostly noise. Then compare one step "
            "with FP32: zeros in gradients, weights that did not move, values that are far off."
        ),
    ),
)
