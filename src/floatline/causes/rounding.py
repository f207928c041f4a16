"""Causes by which a number fits the format but is rounded to something harmful."""

from __future__ import annotations

from floatline.causes.cause import Cause

ROUNDED_ONTO_SINGULARITY = Cause(
    id="rounded-onto-singularity",
    title="A value rounds onto a singular point",
    family="rounding",
    mechanism=(
        "FP16 has no number between 0.9995 and 1, so sigmoid(x) is exactly 1 from x = 8.32 on and log(1 - p) "
        "is -inf; FP32 gets there at 16.6. At the other end sigmoid(x) is exactly zero below -17.4, and so "
        "is every softmax probability of 2.98e-8 or less. A clamp to 1 - 1e-6 does nothing: in FP16 that "
        "constant is 1. A schedule buffer cast by model.half() loses its tail the same way. CUDA autocast "
        "refuses torch.nn.functional.binary_cross_entropy for this reason."
    ),
    told_apart=(
        "The FP32 value is near the singular point, the 16-bit value is exactly on it, at zero or one, and "
        "the next operation (log, div, acos, atanh, sqrt) is singular there. If FP32 is exactly on the point "
        "too, it is singular-gradient. If what became zero is a guard constant, it is eps-underflow. If a "
        "subtraction made the value, it is cancellation."
    ),
    advice="Compute what leads here in FP32, or use a form without this point: logsigmoid, log_softmax.",
    remedies=(
        "torch.nn.functional.binary_cross_entropy_with_logits(x, target)  # logits, not probabilities",
        "torch.nn.functional.logsigmoid(-x)  # instead of log(1 - sigmoid(x))",
        "torch.log_softmax(x, dim=-1)  # instead of log(softmax(x))",
        "angle = torch.acos(cos.float().clamp(-1 + 1e-6, 1 - 1e-6))  # cos itself made in FP32",
        "model.alpha_bar = schedule.float()  # set schedules again after model.half()",
    ),
    wrong_fix=(
        "Adding 1e-8 inside the log, or clamping to 1 - 1e-6: both constants vanish in FP16. FP32 for the "
        "log alone: its input has been rounded already. Gradient clipping: NaN stays NaN."
    ),
    messages=(r"binary_cross_entropy and torch\.nn\.BCELoss are unsafe to autocast",),
    reference=(
        "zylo117/Yet-Another-EfficientDet-Pytorch#502, "
        "https://docs.pytorch.org/docs/stable/amp.html#prefer-binary-cross-entropy-with-logits-over-binary-cross-entropy"
    ),
)

UPDATE_LOST_TO_ROUNDING = Cause(
    id="update-lost-to-rounding",
    title="Weight updates round to nothing",
    family="rounding",
    mechanism=(
        "Rounding to nearest gives w back when the update is smaller than half the spacing of numbers at w. "
        "In BF16 an update below |w|/512 is always lost and one above |w|/256 never is; in FP16 these are "
        "|w|/4096 and |w|/2048 (of subnormal weights more is lost). A BF16 gain of 1.0 with updates of 0.001 "
        "stays 1.0 for ever."
    ),
    told_apart=(
        "Gradients are finite and not zero, and weights are bit-identical after the step. If the gradients "
        "are zero, it is gradient-underflow. A parameter that no optimizer holds is params-not-trained. The "
        "same arithmetic in an EMA, a counter or a buffer is accumulator-stagnation. Some lost updates are "
        "harmless: compare the loss with FP32 before you change anything."
    ),
    advice="Keep FP32 weights and compute under torch.autocast; 16-bit weights need an optimizer of floatline.optim.",
    remedies=(
        "model.float()  # FP32 weights, torch.autocast with torch.bfloat16 for the compute",
        "for p in adapter.parameters(): p.data = p.data.float()  # FP32 adapters, 16-bit base",
        "Where FP32 weights do not fit in memory: an optimizer with stochastic rounding or Kahan summation.",
    ),
    wrong_fix=(
        "Loss scaling: the gradients are not zero, and the scale is divided out before the update. More "
        "steps: every one is lost. A learning rate raised until something moves: the small weights diverge "
        "first."
    ),
    messages=(),
    reference="Revisiting BFloat16 Training, arXiv:2010.06192",
)

DECAY_LOST_TO_ROUNDING = Cause(
    id="decay-lost-to-rounding",
    title="Weight decay rounds to nothing",
    family="rounding",
    mechanism=(
        "AdamW takes a share of each weight, rate times decay, and rounds. In BF16 a share below 1/512 always rounds "
        "away, in FP16 one below 1/4096; a rate of 1e-3 with a decay of 0.1 takes 1e-4. The updates "
        "themselves are larger and arrive, so the loss falls, and weights that FP32 shrinks keep their size: another "
        "regularisation, larger norms, a smaller effective rate behind norms, and more with every step."
    ),
    told_apart=(
        "The product of weights and decay leaves them bit-identical while the update behind it moves them, and FP32's "
        "weights are smaller by then. If the update is lost as well, it is update-lost-to-rounding. In a run so short "
        "that FP32's weights do not shrink either it does no harm, and is no finding."
    ),
    advice="Keep FP32 weights and compute under torch.autocast; 16-bit weights need an optimizer of floatline.optim.",
    remedies=(
        "model.float()  # FP32 weights, torch.autocast with torch.bfloat16 for the compute",
        "Where FP32 weights do not fit in memory: an optimizer with stochastic rounding or Kahan summation.",
    ),
    wrong_fix=(
        "A larger decay until it moves: from one spacing on it takes far more than it was to take. Decay in the "
        "gradient, as Adam does it: it is divided by the second moment, and is another regularisation. Loss scaling: "
        "no gradient is involved."
    ),
    messages=(),
    reference="AdamW without decay in BF16, Nerogar/OneTrainer#996",
)

ACCUMULATOR_STAGNATION = Cause(
    id="accumulator-stagnation",
    title="A running sum stops moving",
    family="rounding",
    mechanism=(
        "a + b is a when b is smaller than half the spacing at a. Counting by ones stops at 2048 in FP16 and "
        "at 256 in BF16. At a = 1 FP16 ignores every increment up to 0.000488. An EMA with decay 0.9995 adds "
        "0.0005 of the difference and an Euler step adds dt * f(x): both are often smaller than that, and "
        "the state never leaves its start."
    ),
    told_apart=(
        "a + b == a with b not zero, many times, outside the optimizer. Inside optimizer.step() it is "
        "update-lost-to-rounding. If the sum becomes inf instead of standing still, it is "
        "reduction-overflow. If integers are rounded by a cast and nothing is added, it is "
        "integer-not-exact."
    ),
    advice="Keep what is added up over many steps in FP32, and count in integers.",
    remedies=(
        "ema = copy.deepcopy(model).float()  # the averaged copy in FP32",
        "ema_p.lerp_(p.float(), 1 - decay)  # its update as well",
        "state = state + dt * f(state.half()).float()  # FP32 state, f in half if you like",
        "count = torch.zeros((), dtype=torch.int64)  # count in integers",
    ),
    wrong_fix=(
        "A lower decay until the copy moves: then it is no average any more. Finer integration steps: "
        "smaller increments, so more of them are lost. More epochs: lost additions do not add up."
    ),
    messages=(),
    reference="EMA weights in half, d8ahazard/sd_dreambooth_extension#1417",
)

INTEGER_NOT_EXACT = Cause(
    id="integer-not-exact",
    title="Positions and counts are rounded",
    family="rounding",
    mechanism=(
        "FP16 holds every integer up to 2048, BF16 up to 256. Beyond that neighbours share one number: in "
        "BF16 the integers 1024 to 1028 are all 1024. Positions, timesteps and counts built in the model's "
        "dtype lose their order. A product such as t * freq keeps 11 significant bits in FP16 and 8 in BF16, "
        "so its fast sinusoids are noise."
    ),
    told_apart=(
        "A cast of integers, or torch.arange with a 16-bit dtype, changes values or makes duplicates. "
        "Nothing is non-finite; the loss stops at a floor that FP32 passes, and it gets worse with length. A "
        "counter that stands still is accumulator-stagnation. Digits lost in a difference are cancellation."
    ),
    advice="Keep positions, ids and counts in integers or FP32, and cast only what is computed from them.",
    remedies=(
        "pos = torch.arange(n, device=x.device, dtype=torch.float32)  # not x.dtype",
        "angle = t.float()[:, None] * freq.float()  # angles in FP32, autocast off",
        "cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)  # cast last",
    ),
    wrong_fix=(
        "Dividing t by its maximum after the cast: the bits are gone, only scaled. A larger rotary base or a "
        "bigger network behind the embedding: neighbours are already the same number. Loss scaling: no "
        "gradient is lost."
    ),
    messages=(),
    reference="huggingface/transformers#29285 (BF16 positions), NVIDIA/Megatron-LM#535 (FP16)",
)

CANCELLATION = Cause(
    id="cancellation",
    title="A difference of near-equals is all error",
    family="rounding",
    mechanism=(
        "Both operands carry a rounding error of up to half their spacing; the subtraction removes the "
        "common digits and keeps the error. With mean 30 and deviation 0.2, E[x*x] and E[x]*E[x] are near "
        "900, where FP16's spacing is 0.5, and their difference should be 0.04. It comes out as 0.5, zero or "
        "-0.5, and the root of the last is NaN."
    ),
    told_apart=(
        "The result differs from FP32 by as much as its own size, while its operands agree to all their "
        "digits. The first NaN is often the root or log of a small negative number. If a value rounded to "
        "exactly zero or one without a subtraction, it is rounded-onto-singularity. If FP32 is negative as "
        "well, the formula is at fault in any precision."
    ),
    advice="Compute this difference in FP32, or subtract before squaring.",
    remedies=(
        "var = (x - x.mean(-1, keepdim=True)).square().mean(-1)  # subtract first, then square",
        "var = x.float().var(-1, unbiased=False)  # or in FP32",
        "torch.cdist(x.float(), y.float())  # not xx + yy - 2xy in half",
        "torch.expm1(x)  # instead of exp(x) - 1; torch.log1p for the log",
    ),
    wrong_fix=(
        "clamp(min=0) with an eps: no NaN, but the value is still pure error, and dividing by the root of "
        "eps blows it up. A larger eps: it switches the feature off."
    ),
    messages=(),
    reference="A squared distance below zero, lucidrains/vector-quantize-pytorch#106",
)

CHOICE_FLIPPED = Cause(
    id="choice-flipped",
    title="Rounded numbers choose another index",
    family="rounding",
    mechanism=(
        "top-k, argmax, sort, NMS, routing and thresholds compare numbers, and 16 bits make near ones equal or turn "
        "their order round. Scores from 2048 on lie at least 2 apart in FP16, and cosines just below one lie 0.0039 "
        "apart in BF16. The index that comes out is no rounding of the right one: another expert computes, another box "
        "is kept, another code is looked up."
    ),
    told_apart=(
        "The indices, labels or masks of an operation are others than FP32's, the numbers it chose by are off by "
        "rounding alone, and with these numbers in FP32 the results are FP32's. If they are a difference of "
        "near-equals, it is cancellation; if they overflowed, product-overflow. Ties that are broken otherwise and "
        "change nothing are no finding."
    ),
    advice="Compute what is compared in FP32, from the operation that makes the scores; a cast behind it is too late.",
    remedies=(
        "y = f(x.float()).to(x.dtype)  # the line in FP32, its result rounded once",
        "score = (a.float() @ b.float().T)  # what is chosen by is computed in FP32",
        "distance = torch.cdist(x.float(), codes.float())  # nearest neighbours and codebooks",
        "logits = router(x.float())  # a router with FP32 weights costs little",
        "Subtract a common offset before the scores are rounded: only differences decide.",
    ),
    wrong_fix=(
        "topk(score.float(), k): what was rounded stays equal. A wider threshold: other choices flip. A fixed order "
        "among ties: the same wrong choice every time."
    ),
    messages=(),
    reference="Experts that a BF16 router chooses otherwise, vllm-project/vllm#14027",
)

EPS_TOO_LARGE = Cause(
    id="eps-too-large",
    title="A 16-bit format's own eps weighs too much",
    family="rounding",
    mechanism=(
        "torch.finfo(x.dtype).eps is 1.2e-7 in FP32, 0.00098 in FP16 and 0.0078 in BF16. Added to a mean of squares of "
        "small activations it is as large as they are: the norm no longer normalises, and its gradient shrinks with "
        "it. Older releases of torch take it for nn.RMSNorm without an eps."
    ),
    told_apart=(
        "An operation adds, or bounds by, exactly the eps of a 16-bit format, and what it is added to is not much "
        "larger. FP32 has another constant there, so that the same line with FP32's eps brings FP32's results back. "
        "If the eps vanishes instead, it is eps-underflow."
    ),
    advice="Write the eps that FP32 has, torch.finfo(torch.float32).eps, whatever the input's dtype is.",
    remedies=(
        "eps = torch.finfo(torch.float32).eps  # not of x.dtype",
        "norm = torch.nn.RMSNorm(width, eps=1e-6)  # older releases take the input's",
        "scale = torch.rsqrt(x.float().pow(2).mean(-1) + 1e-6)  # as most models write it",
    ),
    wrong_fix=(
        "A larger gain behind the norm: the eps still decides how large and small rows compare. Loss scaling: nothing "
        "is lost, it is the function that is another."
    ),
    messages=(),
    reference="nn.RMSNorm of small BF16 activations, pytorch/pytorch#189581",
)

KERNEL_OFF = Cause(
    id="kernel-off",
    title="A kernel is wrong in 16 bits",
    family="rounding",
    mechanism=(
        "An operation gives, on the same 16-bit inputs, another result than in FP32, by more than the format of its "
        "result and the length of its sums explain. Kernels have code of their own for each format: tiles of another "
        "size, a tail that is left out, a mask that is shifted, a scale that is stale, sums kept in 16 bits. What is "
        "read is sound, and the damage is made in this one place."
    ),
    told_apart=(
        "What the operation reads is given to it as FP32 numbers, so what was rounded before it is in both results: "
        "digits lost in a difference are cancellation, a sum that leaves the format is reduction-overflow, and a sum "
        "that stands still from call to call is accumulator-stagnation. Each result is held to a bound of its family "
        "of operations. A kernel that torch does not know is held to itself in FP32: one that is wrong in both formats "
        "is not seen, nor one that runs in 16 bits only, nor one that is no operation of torch."
    ),
    advice="Use another implementation of this operation, or run it in FP32, and report the kernel with its inputs.",
    remedies=(
        "with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH): ...  # another kernel",
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False  # sums in FP32",
        "y = kernel(x.float()).to(x.dtype)  # the same kernel in FP32",
        "acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)  # in a kernel of your own: sums in FP32, masked loads",
    ),
    wrong_fix=(
        "Loss scaling, clipping, a lower learning rate: the result is as wrong. FP32 for the layers around it: they "
        "are sound. BF16 instead of FP16: often the same code."
    ),
    messages=(),
    reference="pytorch/pytorch#168126, Dao-AILab/flash-attention#2151, pytorch/pytorch#121558",
)

CHANGED_IN_16_BITS = Cause(
    id="changed-in-16-bits",
    title="16 bits change this result here",
    family="rounding",
    mechanism=(
        "Nothing is inf or NaN, and the result is not FP32's. With this line in FP32 it is: the line rounds away "
        "digits that matter later, or chooses other indices, labels or masks by what was rounded. "
        "Everything that is computed from it is computed from other numbers: a loss that stays above FP32's, a metric "
        "that falls, a wrong box, a wrong expert."
    ),
    told_apart=(
        "The losses, or numbers that the script reads, are apart from a run in FP32 with the same seed, by more than a "
        "small change of the weights does. If the difference is one of near-equals, it is cancellation; if whole "
        "numbers or positions were rounded, it is integer-not-exact; if a sum stands still, it is "
        "accumulator-stagnation."
    ),
    advice="Compute this line in FP32, with what it reads, and cast the result.",
    remedies=(
        "score = (a.float() @ b.float().T)  # what is chosen by is computed in FP32",
        "keep = torch.topk(score.float(), k).indices  # only helps if score was not 16-bit before",
    ),
    wrong_fix=(
        "A float() behind the operation: what was rounded before it stays rounded. Loss scaling: no gradient is lost. "
        "More steps: the result is off in every one."
    ),
    messages=(),
    reference="A metric that falls without an error, huggingface/transformers#29285",
)

ROUNDINGS = (
    ROUNDED_ONTO_SINGULARITY,
    UPDATE_LOST_TO_ROUNDING,
    DECAY_LOST_TO_ROUNDING,
    ACCUMULATOR_STAGNATION,
    INTEGER_NOT_EXACT,
    CANCELLATION,
    CHOICE_FLIPPED,
    EPS_TOO_LARGE,
    KERNEL_OFF,
    CHANGED_IN_16_BITS,
)
