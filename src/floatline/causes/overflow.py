"""Causes by which a number is too large for the format."""

from __future__ import annotations

from floatline.causes.cause import Cause

ACTIVATION_OVERFLOW = Cause(
    id="activation-overflow",
    title="A layer's output leaves FP16's range",
    family="range",
    mechanism=(
        "FP16 ends at 65504; a result of 65520 or more is stored as inf. Even where the sum inside a matmul "
        "or convolution is kept in FP32, its result is written in FP16. One outlier token, a long residual "
        "stream or a feature map that doubles in a loop is enough. The inf becomes NaN in the next "
        "normalisation or softmax, sometimes only in backward, so the layer that shows the NaN is rarely the "
        "one that made it."
    ),
    told_apart=(
        "The first operation with finite inputs and a non-finite output is a matmul, a convolution or a "
        "residual add, and its FP32 value is finite and larger than 65504. BF16 trains. An element-wise "
        "product is product-overflow, a sum or norm reduction-overflow, exp exp-overflow; the cast of the "
        "batch itself is input-out-of-range. If norms grow without end in FP32 too, it is "
        "optimization-divergence."
    ),
    advice="Run this layer in FP32, or train in BF16, which has the range of FP32.",
    remedies=(
        'with torch.autocast("cuda", enabled=False): y = layer(x.float())  # this layer in FP32',
        "y = residual.float() + y  # and the add that follows, if the sum is too large as well",
        'with torch.autocast("cuda", dtype=torch.bfloat16): y = model(x)  # BF16 has the range of FP32',
        "x = (x + torch.relu(conv(x))) / 2  # a value that grows in a loop: average instead of add",
    ),
    wrong_fix=(
        "A lower learning rate or init_scale: the forward value depends on neither. FP32 for the "
        "normalisation that shows the NaN: its input is already inf. Clamping to FP16's range: inf becomes a "
        "finite lie, and the gradient of the clamped element is zero."
    ),
    messages=(),
    reference="T5 in FP16, huggingface/transformers#9295",
)

PRODUCT_OVERFLOW = Cause(
    id="product-overflow",
    title="A product or square leaves FP16's range",
    family="range",
    mechanism=(
        "Two ordinary factors make a product that FP16 cannot hold: 256 squared is 65536, and FP16 ends at "
        "65504. The inf is often swallowed: rsqrt(inf) and x / inf are zero, so a hand-written RMS norm "
        "returns zeros; nan_to_num puts a constant in its place, and the gradient of a constant is zero. The "
        "loss is then finite and flat."
    ),
    told_apart=(
        "Both factors are finite and the element-wise product is the first non-finite value. Nothing "
        "non-finite may leave the layer, so look inside it. A matmul is activation-overflow. A sum of "
        "squares that each fit is reduction-overflow. exp is exp-overflow."
    ),
    advice="Make this product in FP32: widen one factor with .float(), and cast back what is small again.",
    remedies=(
        "ms = x.float().pow(2).mean(-1, keepdim=True)  # square in FP32",
        "y = (x.float() * torch.rsqrt(ms + eps)).to(x.dtype)  # cast the normalised result back",
        "y = x0.float() * w.float()  # and take the nan_to_num behind it out",
    ),
    wrong_fix=(
        "A larger eps: inf plus eps is inf. nan_to_num or clamp: the value is finite, and its gradient is "
        "zero from then on. Loss scaling: there is no gradient to scale."
    ),
    messages=(r"overflow encountered in (?:scalar )?(?:multiply|square|power)",),
    reference="RMS norm in FP16, pytorch/pytorch#133085",
)

REDUCTION_OVERFLOW = Cause(
    id="reduction-overflow",
    title="A sum of small numbers leaves FP16's range",
    family="range",
    mechanism=(
        "A sum is stored in the dtype of its elements. In FP16 the sum of 70,000 ones is inf, and a map of "
        "512 x 512 has 262,144 pixels. Dice sums, activation penalties, norms and sum pooling get there on "
        "large inputs only. The derivative of a sum is finite, so sometimes only the logged loss is inf and "
        "all gradients are fine. CUDA autocast takes sums in FP32; CPU autocast and a model in half do not."
    ),
    told_apart=(
        "Every element is small and finite, the sum is not, and it fails on large crops or long sequences "
        "only. A bmm with weights of one is a sum too. If the squares themselves are inf, it is "
        "product-overflow. If there is nothing to sum, it is empty-reduction."
    ),
    advice="Add up in FP32, or take a mean instead of a sum.",
    remedies=(
        "total = probs.sum(dtype=torch.float32)  # accumulate and store in FP32",
        "penalty = h.float().pow(2).mean()  # a mean stays in range",
        "dice = 2 * (p * t).mean() / (p.mean() + t.mean())  # the ratio of means is the ratio of sums",
    ),
    wrong_fix=(
        "A larger smoothing constant, or a small factor after the sum: inf plus or times anything is inf. "
        "Gradient clipping: the gradients were never the problem. Blaming the network's output: it is "
        "finite."
    ),
    messages=(r"overflow encountered in (?:reduce|accumulate|dot)",),
    reference="Dice loss in FP16, qubvel-org/segmentation_models.pytorch#463",
)

EXP_OVERFLOW = Cause(
    id="exp-overflow",
    title="exp of a modest number is inf",
    family="range",
    mechanism=(
        "exp(x) leaves FP16 above x = ln(65520) = 11.09; FP32 and BF16 hold it up to 88.7. In forward 1/(1 + "
        "exp(-50x)) looks right, because the reciprocal of inf is zero; in backward zero meets inf and gives "
        "NaN as soon as x is below -0.222. A mask does not remove it: inf times zero is NaN. CUDA autocast "
        "runs exp in FP32; CPU autocast and a model in half do not."
    ),
    told_apart=(
        "The first non-finite value is the output of exp, expm1, sinh or cosh, and its input is finite and "
        "above 11.09. torch.softmax and torch.logsumexp subtract the maximum first and are safe. If the "
        "input of exp is not finite, look upstream: activation-overflow."
    ),
    advice="Take the exponential in FP32, or use sigmoid, softplus or logsumexp, which take none of a large number.",
    remedies=(
        "torch.sigmoid(k * x)  # instead of 1 / (1 + exp(-k * x))",
        "torch.logsumexp(x, dim=-1)  # instead of exp(x).sum(-1).log()",
        "ratio = torch.exp((new_logp - old_logp).float())  # importance ratios in FP32",
        "log_ratio = torch.where(mask, log_ratio, 0.0)  # mask before exp, by selecting",
    ),
    wrong_fix=(
        "Clamping the output or adding eps to the denominator: the NaN is made in backward, behind both. A "
        "smaller init_scale: the scale acts after the forward pass. One more multiplication by the mask: inf "
        "times zero stays NaN."
    ),
    messages=(r"overflow encountered in (?:scalar )?(?:exp|expm1|exp2|sinh|cosh)\b",),
    reference="Differentiable binarization with its factor 50, arXiv:1911.08947",
)

SCALAR_OUT_OF_RANGE = Cause(
    id="scalar-out-of-range",
    title="A constant that FP16 cannot hold",
    family="range",
    mechanism=(
        "masked_fill, clamp and pad check their Python constant: beyond 65504 they raise 'value cannot be "
        "converted to type c10::Half without overflow' (at::Half in older versions). Only a constant raises "
        "this; a tensor that overflows becomes inf without a word. Arithmetic does not check: x - 1e9 is "
        "-inf in FP16. torch.finfo(torch.float16).min is legal, but -65504 plus a score of -16 or less is "
        "-inf, and a row of those makes softmax NaN."
    ),
    told_apart=(
        "The error names a conversion, and the traceback ends at the line with the constant. Without the "
        "error, -inf appears at an add or sub with a constant or a finfo.min mask, and FP32 is fine. If the "
        "code itself wrote float('-inf'), the empty row is the fault: fully-masked-softmax. If no constant "
        "is near, it is activation-overflow."
    ),
    advice="Use a constant that the tensor's own format can hold, and fill once instead of adding masks.",
    remedies=(
        "scores.masked_fill(mask, torch.finfo(scores.dtype).min)  # the dtype of the filled tensor",
        "mask = causal | padding  # join masks as booleans and fill once: never add two masks",
        'scores.masked_fill(mask, float("-inf"))  # only if no row is fully masked',
        "torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)  # boolean mask",
    ),
    wrong_fix=(
        "-1e4: the error is gone, but real scores of that size leak attention into the padding. The finfo of "
        "another dtype, such as torch.finfo(torch.float32).min: it raises the same error. Clamping "
        "activations to 65000: FP16 stores 64992, inf becomes 64992, NaN stays, and no activation ever "
        "raised this error."
    ),
    messages=(r"value cannot be converted to type (?:(?:at|c10)::\w+|float)\s+without overflow",),
    reference="NVIDIA/apex#1052 (the error), huggingface/transformers#17306 (finfo.min plus a score)",
)

INPUT_OUT_OF_RANGE = Cause(
    id="input-out-of-range",
    title="The batch does not fit FP16",
    family="range",
    mechanism=(
        "FP16 stores 65519 as 65504, and 65520 as inf. Raw 16-bit pixels go up to 65535; counts, prices and "
        "timestamps go further. The cast of the batch makes inf before the first layer has run. The data is "
        "legal: it was never normalised, and in FP32 the first normalisation layer hides that."
    ),
    told_apart=(
        "The cast of an input tensor is the first non-finite value, and its source is finite. If the source "
        "is not finite, it is bad-input-data. If the cast is fine and the first layer's output is not, it is "
        "activation-overflow."
    ),
    advice="Bring the input to numbers around 1 in FP32, before it meets 16 bits.",
    remedies=(
        "x = raw.float() / 65535  # raw 16-bit images: scale in FP32, before the network",
        "x = (raw.float() - mean) / std  # counts and prices: standardise in FP32",
        "x = torch.log1p(raw.float())  # heavy tails, values from zero up",
    ),
    wrong_fix=(
        "Dropping the bright images: it loses data and keeps the fault. FP32 for the normalisation layer: "
        "the layer before it has already seen inf. A smaller init_scale: the scale acts after the forward "
        "pass."
    ),
    messages=(r"overflow encountered in cast",),
    reference="Inputs beyond 65504 in a float16 cast, keras-team/keras#22589",
)

GRADIENT_OVERFLOW = Cause(
    id="gradient-overflow",
    title="Forward is finite, a gradient is not",
    family="range",
    mechanism=(
        "FP16 gradients carry the loss scale, 65536 at the start, and must stay below 65520. Too large a "
        "scale is normal for a few steps: the scaler halves it until the gradients fit. They never fit where "
        "the derivative itself is too large: the reciprocal of 0.002 is 500, its derivative is -250,000. A "
        "fixed scale cannot back off at all. torch.amp.GradScaler has no floor: after 144 bad steps in a row "
        "the inverse of its scale is inf, and the next good step writes inf into the weights."
    ),
    told_apart=(
        "No forward value is non-finite. Replay backward without a scale: still non-finite means a "
        "derivative that does not fit, finite means that the scale was too large. A non-finite forward value "
        "is activation-overflow, product-overflow or exp-overflow. If FP32's backward is non-finite too, it "
        "is singular-gradient. A few skipped steps at the start and none later: healthy, change nothing."
    ),
    advice="Run this operation in FP32; a loss scale of your own should be replaced by a dynamic one.",
    remedies=(
        "depth = focal / disparity.float()  # take the steep operation in FP32",
        'scaler = torch.amp.GradScaler("cuda")  # dynamic, instead of a constant factor',
        "assert scaler.get_scale() >= 1.0  # now and then: GradScaler has no floor of its own",
    ),
    wrong_fix=(
        "A lower init_scale where the derivative does not fit: it overflows without any scale. Gradient "
        "clipping: an inf norm turns the inf into NaN and all other gradients into zero. Removing the finite "
        "check: the weights become NaN."
    ),
    messages=(),
    reference="NVIDIA/apex#318 (the scale falls to zero), Mixed Precision Training, arXiv:1710.03740",
)

OVERFLOWS = (
    ACTIVATION_OVERFLOW,
    PRODUCT_OVERFLOW,
    REDUCTION_OVERFLOW,
    EXP_OVERFLOW,
    SCALAR_OUT_OF_RANGE,
    INPUT_OUT_OF_RANGE,
    GRADIENT_OVERFLOW,
)
