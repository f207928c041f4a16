"""Causes by which a number is too small for the format and becomes zero."""

from __future__ import annotations

from floatline.causes.cause import Cause

EPS_UNDERFLOW = Cause(
    id="eps-underflow",
    title="A guard constant rounds to zero",
    family="range",
    mechanism=(
        "The smallest FP16 number above zero is 5.96e-8; a constant of 2.98e-8 or less becomes zero. The "
        "usual guards 1e-8, 1e-9 and 1e-12 are all zero, so x / (norm + 1e-8) divides zero by zero for an "
        "empty row, and log(p + 1e-8) is -inf where p is zero. A guard that FP16 can hold still vanishes "
        "beside a larger number: 1 + 1e-4 is 1."
    ),
    told_apart=(
        "A div, log, sqrt or rsqrt is the first non-finite value, and its operand came from adding a "
        "constant. FP32 and BF16 are fine with the same constant. If a value itself rounded to zero or one, "
        "it is rounded-onto-singularity. If it happens in optimizer.step(), it is optimizer-state-underflow. "
        "If FP32 is NaN too, it is singular-gradient or empty-reduction."
    ),
    advice="Use a guard of 1e-4 or more here, or compute this line in FP32, where the guard can be held.",
    remedies=(
        "x / x.norm(dim=-1, keepdim=True).clamp_min(1e-4)  # a guard that FP16 can hold",
        "torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype)  # or guard in FP32",
        "torch.nn.functional.logsigmoid(x)  # instead of log(sigmoid(x) + 1e-8)",
        "eps = torch.finfo(x.dtype).tiny  # a guard that follows the dtype",
    ),
    wrong_fix=(
        "A smaller guard such as 1e-12: it is zero as well. nan_to_num behind the division: forward is "
        "clean, backward is still NaN. Dropping the rows that fail: the next empty row fails again."
    ),
    messages=(),
    reference="An eps too small for half, ultralytics/yolov5#2376",
)

GRADIENT_UNDERFLOW = Cause(
    id="gradient-underflow",
    title="Gradients round to zero",
    family="range",
    mechanism=(
        "A gradient of 2.98e-8 or less is exactly zero in FP16, and below 6.1e-5 it loses bits. Means over "
        "many pixels, small loss weights and long chains make such gradients, and the parameters behind them "
        "do not move. A loss scale of 2^16 lifts all gradients by 16 powers of two, out of the zeros. BF16 "
        "has the range of FP32 and needs no scale."
    ),
    told_apart=(
        "Gradients are exactly zero where those of FP32 are not, and the zeros go away when the loss is "
        "multiplied by a power of two. Zeros that stay at every scale are structural: clamp-kills-gradient, "
        "or a dead ReLU. Gradients that are None are params-not-trained. Gradients that are fine while the "
        "weights stand still are update-lost-to-rounding. A loss that has reached its floor is no fault."
    ),
    advice="Scale the loss with torch.amp.GradScaler before the backward pass, or train in BF16.",
    remedies=(
        "scaler.scale(loss).backward()  # FP16 autocast always needs torch.amp.GradScaler",
        'with torch.autocast("cuda", dtype=torch.bfloat16): y = model(x)  # BF16 needs no scale',
        "Keep the trainable parameters in FP32: the scaler does not take FP16 ones.",
    ),
    wrong_fix=(
        "A higher learning rate, or more epochs: zero times anything is zero. A higher rate for the head "
        "that does not move: its gradient is zero as well. Dividing the loss against overflow: more "
        "gradients become zero."
    ),
    messages=(),
    reference="Mixed Precision Training, arXiv:1710.03740",
)

OPTIMIZER_STATE_UNDERFLOW = Cause(
    id="optimizer-state-underflow",
    title="The optimizer's state does not fit 16 bits",
    family="range",
    mechanism=(
        "torch's optimizers keep their state in the dtype of the parameter. With FP16 parameters Adam's eps "
        "of 1e-8 is zero, and its second moment after one step, 0.001 times the squared gradient, is zero "
        "for every gradient below 5.4e-3. A zero gradient then gives zero divided by zero, NaN; a small one "
        "gives inf. Adagrad's eps of 1e-10 and the square of 1e-4 are zero too. At the other end the square of a "
        "large gradient is inf, and a weight whose update is divided by inf stands still. A state that the code "
        "itself keeps in FP16 has the same limits beside FP32 parameters."
    ),
    told_apart=(
        "Loss and gradients are finite, and the weights are not after optimizer.step(), or the state holds "
        "zeros or inf. With torch's optimizers it needs half parameters: FP32 parameters under autocast never "
        "show it. If the gradients were not finite, look at "
        "gradient-overflow. If the weights are finite and stand still, it is update-lost-to-rounding."
    ),
    advice="Keep FP32 weights and compute under torch.autocast, so that the optimizer's state is FP32 as well.",
    remedies=(
        "model.float()  # FP32 weights, and torch.autocast for the compute",
        "torch.optim.Adam(params, eps=1e-4)  # the least, if the weights must stay in half",
        "torch.optim.Adagrad(params, eps=1e-3, initial_accumulator_value=0.1)  # the same for Adagrad",
    ),
    wrong_fix=(
        "Gradient clipping or a lower learning rate: zero divided by zero depends on neither. "
        "torch.amp.GradScaler: it refuses half parameters, see fp16-params-with-scaler. eps=1e-8 by hand: "
        "still zero. A larger eps alone stops the NaN, but the second moments stay zero, so Adam no longer "
        "adapts."
    ),
    messages=(),
    reference="Adam's eps in float16, pytorch/pytorch#147437",
)

UNDERFLOWS = (EPS_UNDERFLOW, GRADIENT_UNDERFLOW, OPTIMIZER_STATE_UNDERFLOW)
