"""What torch.autograd's anomaly mode names, and the causes that fit it."""

from __future__ import annotations

from floatline.causes.symptom import Symptom


def _anomaly(functions: str) -> str:
    return rf"Function '(?:{functions})\w*' returned nan values"


# The most specific first; the last takes whatever is left.
ANOMALIES: tuple[Symptom, ...] = (
    Symptom(
        title="Anomaly mode stopped at a softmax or attention",
        patterns=(_anomaly(r"\w*Softmax|\w*Attention"),),
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
        patterns=(_anomaly(r"\w*(?:Layer|Group|Batch|RMS|Instance)_?Norm"),),
        causes=("activation-overflow", "input-out-of-range", "product-overflow", "bad-input-data"),
        check=(
            "The normalisation is rarely guilty: look at its input. An inf there was made by an earlier "
            "layer, by the cast of the batch, or was in the data."
        ),
    ),
    Symptom(
        title="Anomaly mode stopped at a root, power, norm or angle",
        patterns=(_anomaly(r"Sqrt|Rsqrt|Pow|Acos|Asin|Atanh|LinalgVectorNorm|Norm|Cdist|Std|Var"),),
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
        patterns=(_anomaly(r"Exp|Mul|Sinh|Cosh"),),
        causes=("exp-overflow", "product-overflow", "activation-overflow"),
        check=(
            "Look at the forward values of that line. An inf from exp is exp-overflow, an inf from the "
            "product itself product-overflow; a factor that came in as inf was made upstream."
        ),
    ),
    Symptom(
        title="Anomaly mode stopped at a log, sigmoid or division",
        patterns=(_anomaly(r"Log|Sigmoid|Div|Reciprocal|BinaryCrossEntropy|NllLoss"),),
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
