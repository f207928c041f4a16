"""Causes that 16-bit training is blamed for, although FP32 fails in the same way."""

from __future__ import annotations

from floatline.causes.cause import Cause

PARAMS_NOT_TRAINED = Cause(
    id="params-not-trained",
    title="The optimizer does not hold what the loss uses",
    family="not-precision",
    mechanism=(
        "An optimizer holds the parameters it was given when it was built. A head replaced afterwards, a "
        "bare tensor with requires_grad that is no torch.nn.Parameter, what .to(device) makes of one, a detached "
        "branch or a frozen module is never updated. An optimizer whose gradients are all None raises 'No inf "
        "checks were recorded for this optimizer' with a scaler, and does nothing without one. FP32 trains no better."
    ),
    told_apart=(
        "Compare the parameters of the model with those in optimizer.param_groups by identity, and look for "
        "gradients that are None after backward. Gradients that exist but are zero are gradient-underflow or "
        "clamp-kills-gradient. Parameters that the optimizer holds, that have gradients and stand still are "
        "update-lost-to-rounding. If gradients were cleared between backward and step, it is the loop: "
        "scaler-misuse."
    ),
    advice="Make the optimizer after the last change of the model, from all parameters that are to be trained.",
    remedies=(
        "optimizer = torch.optim.AdamW(model.parameters())  # after the last change of the model",
        'optimizer.add_param_group({"params": model.head.parameters()})  # or add the new part',
        "self.scale = torch.nn.Parameter(torch.rand(size))  # not a bare tensor",
        "if any(p.grad is not None for p in params): scaler.step(optimizer)  # two optimizers",
    ),
    wrong_fix=(
        "Commenting the assertion out, or adding zero times a detached loss: the gradients stay None. "
        "Unfreezing all, a higher learning rate, BF16: the optimizer still holds the old tensors."
    ),
    messages=(
        r"No inf checks were recorded for this optimizer",
        r"element 0 of tensors does not require grad and does not have a grad_fn",
        r"optimizer got an empty parameter list",
    ),
    reference="nerfstudio-project/nerfstudio#1919, huggingface/accelerate#328",
)

BAD_INPUT_DATA = Cause(
    id="bad-input-data",
    title="The data is broken",
    family="not-precision",
    mechanism=(
        "A NaN or inf in a batch stays non-finite through the layers in every precision. With a scaler such "
        "steps are skipped, so it shows as NaN now and then and a falling scale; without one the first bad "
        "batch destroys the weights. Labels that are finite but wrong leave no numeric trace: the loss stays "
        "at the level of guessing, ln(C) for C balanced classes, in FP32 as well."
    ),
    told_apart=(
        "Test the batch before the model sees it. Finite data that becomes inf in the cast is "
        "input-out-of-range. A batch without labels is empty-reduction. Finite data and the same flat loss "
        "in FP32: look at samples beside their labels. NaN that only 16 bits show is not this."
    ),
    advice="Look at the batches where they are loaded, and drop or repair what is not finite.",
    remedies=(
        "assert torch.isfinite(x).all(), path  # in the loader, with the name of the file",
        "keep = torch.isfinite(x).flatten(1).all(1); x, y = x[keep], y[keep]  # drop bad rows",
        "Look at twenty samples beside their labels, taken from the batch that the model gets.",
    ),
    wrong_fix=(
        "BF16, FP32 or a lower init_scale: NaN is NaN in all of them. nan_to_num on the loss: the number is "
        "finite, the gradients are still NaN."
    ),
    messages=(r"Input (?:\w+ )?contains (?:NaN|infinity)",),
    reference="unit8co/darts#881, prs-eth/Marigold#111",
)

OPTIMIZATION_DIVERGENCE = Cause(
    id="optimization-divergence",
    title="Training diverges in any precision",
    family="not-precision",
    mechanism=(
        "The step is too large for the curvature: every update overshoots by more than the last, and norms "
        "grow by a factor per step until they leave the format. FP16 ends at 65504 and FP32 at 3.4e38, so "
        "FP16 only shows it earlier. The scaler then halves without end, because no scale makes the weights "
        "smaller."
    ),
    told_apart=(
        "Replay in FP32 with the same seed and batches: loss and norms grow geometrically there too. If FP32 "
        "is calm, it is a range cause: activation-overflow, exp-overflow or gradient-overflow. One spike "
        "with calm after it is a batch: bad-input-data. SGD that explodes at once with AMP only is "
        "scaler-misuse."
    ),
    advice="Lower the learning rate or warm it up, and clip the gradients.",
    remedies=(
        'for group in optimizer.param_groups: group["lr"] *= 0.1  # lower the learning rate',
        "torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=500)  # or warm up",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # after scaler.unscale_(optimizer)",
    ),
    wrong_fix=(
        "Tuning the loss scale, FP32 layers, BF16: each only moves the moment of the crash. Skipping bad "
        "steps: from then on all steps are bad."
    ),
    messages=(),
    reference="Step size against curvature, arXiv:2103.00065",
)

EMPTY_REDUCTION = Cause(
    id="empty-reduction",
    title="A mean over nothing",
    family="not-precision",
    mechanism=(
        "A mean over no elements divides zero by zero and is NaN in every precision. So is cross_entropy "
        "when every label is ignore_index, a masked mean under an empty mask, and the standard deviation of "
        "a single element. The gradient of such a cross entropy is zero: the weights stay healthy, no step "
        "is skipped, and only the logged loss is NaN."
    ),
    told_apart=(
        "The count at the reduction is zero in that batch, and FP32 gives NaN as well. A softmax row of -inf "
        "is fully-masked-softmax. NaN in the data is bad-input-data. A count that is zero beside a guard "
        "that rounded to zero is eps-underflow: FP32 is fine then."
    ),
    advice="Divide by the number of elements, at least one.",
    remedies=(
        'total = torch.nn.functional.cross_entropy(x, y, reduction="sum")  # sum, then divide',
        "loss = total / (y != -100).sum().clamp(min=1)  # by the number of labels, at least one",
        "loss = (losses * mask).sum() / mask.sum().clamp(min=1)  # the same for a masked mean",
    ),
    wrong_fix=(
        "FP32, BF16 or a lower learning rate: the count stays zero. An eps of 1e-8 in the denominator: in "
        "FP16 it is zero too. Skipping the batch on one rank only: see distributed-desync."
    ),
    messages=(
        r"Mean of empty slice",
        r"degrees of freedom is <= 0",
        r"Expected reduction dim to be specified for input\.numel\(\) == 0",
        r"Expected reduction dim -?\d+ to have non-zero size",
    ),
    reference="pytorch/pytorch#70348",
)

FULLY_MASKED_SOFTMAX = Cause(
    id="fully-masked-softmax",
    title="A softmax row with nothing left",
    family="not-precision",
    mechanism=(
        "softmax subtracts the maximum of the row; where the whole row is -inf, that is -inf minus -inf, NaN "
        "in every precision. Empty documents, left padding under a causal mask and windows without keys make "
        "such rows. Backward carries the NaN into the shared projections, even if the loss never reads that "
        "row."
    ),
    told_apart=(
        "The code itself writes -inf (float('-inf'), key_padding_mask, an additive mask) and one row has "
        "nothing else; FP32 is NaN too. If the -inf came from a constant or a sum that left FP16's range, it "
        "is scalar-out-of-range, and FP32 is fine. If there is no row at all, it is empty-reduction."
    ),
    advice="Leave at least one entry of every row unmasked, and zero the output of the empty ones.",
    remedies=(
        "keep = keep | ~keep.any(-1, keepdim=True)  # open empty rows before the softmax",
        'probs = scores.masked_fill(~keep, float("-inf")).softmax(-1)  # and zero their output',
        "torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)  # zeros there",
    ),
    wrong_fix=(
        "nan_to_num after the softmax: forward is clean, backward is still NaN. FP32 or BF16: -inf is the "
        "same there. Two masks of finfo.min added up: in FP16 that is -inf again."
    ),
    messages=(),
    reference="pytorch/pytorch#41508",
)

NAN_TIMES_ZERO = Cause(
    id="nan-times-zero",
    title="A product with zero leaves NaN and inf in",
    family="not-precision",
    mechanism=(
        "Zero times NaN and zero times inf are NaN, in every precision. A mask that multiplies, (losses * mask).sum(), "
        "does not leave out padded rows that hold NaN, a logarithm of zero or a quotient by a length of zero, and "
        "~mask * float('-inf') is NaN wherever the mask is true. Backward does the same: a row that a selection "
        "left out has gradient zero, and its product with an activation that is NaN reaches every weight."
    ),
    told_apart=(
        "All that is not finite meets an exact zero in one product, and what comes out is not finite; FP32 fails as "
        "well. If some of it counts, it is bad-input-data. If FP32 is fine, an operation made inf in 16 bits: look at "
        "eps-underflow, rounded-onto-singularity or scalar-out-of-range. A row of a softmax with nothing left is "
        "fully-masked-softmax, a mean over no elements empty-reduction, and an infinite derivative that meets a "
        "gradient of zero singular-gradient."
    ),
    advice="Fill what the mask leaves out with a harmless number before anything is computed of it.",
    remedies=(
        "x = x.masked_fill(~mask[..., None], 0.0)  # padded entries filled before the first layer",
        "p = torch.where(mask, p, 1.0); losses = -p.log() * mask  # harmless before the logarithm",
        "scores = scores.masked_fill(~mask, float('-inf'))  # not + ~mask * float('-inf')",
        "entropy = -(p * logits.log_softmax(-1).masked_fill(~mask, 0.0)).sum(-1)  # zero times zero",
    ),
    wrong_fix=(
        "torch.where behind the loss: the loss is finite, and in backward zero may meet what is infinite or NaN. "
        "nan_to_num: forward is clean, and where the numbers were wrong they stay. FP32, BF16, a lower loss scale: "
        "zero times NaN is NaN in all of them."
    ),
    messages=(),
    reference="Masked tokens that poison the loss, ecmwf/WeatherGenerator#2723",
)

SINGULAR_GRADIENT = Cause(
    id="singular-gradient",
    title="The derivative is infinite at this point",
    family="not-precision",
    mechanism=(
        "sqrt and fractional powers have an infinite derivative at zero, acos and asin at 1. In backward "
        "that inf meets a gradient of zero and gives NaN. The diagonal of a distance matrix, the norm of an "
        "unused row or a perfect match is exactly on the point, in FP32 as well. x.norm() is safe: its "
        "gradient at zero is zero; the root of a sum of squares written by hand is not."
    ),
    told_apart=(
        "Forward is finite, backward is not, and the FP32 operand is exactly on the point. If FP32 is only "
        "near it and rounding moved the value, it is rounded-onto-singularity. If FP32's gradient is finite "
        "and large, it is gradient-overflow."
    ),
    advice="Replace the singular points by a harmless number before this operation, and put their value back after it.",
    remedies=(
        "safe = torch.where(d2 > 0, d2, 1.0)  # first where: keep the root off the point",
        "d = torch.where(d2 > 0, safe.sqrt(), 0.0)  # second where: put the value back",
        "d = torch.linalg.vector_norm(x - y, dim=-1)  # gradient zero at zero",
        "d = (d2.float() + 1e-6).sqrt()  # or an eps inside the root",
    ),
    wrong_fix=(
        "Masking the diagonal after the root: zero times inf is still NaN. Gradient clipping: NaN stays NaN. "
        "FP32 or BF16: zero is exact in all of them."
    ),
    messages=(),
    reference="pytorch/pytorch#2421 (norm at zero)",
)

CLAMP_KILLS_GRADIENT = Cause(
    id="clamp-kills-gradient",
    title="A clamp stops all gradients",
    family="not-precision",
    mechanism=(
        "Outside its bounds torch.clamp has gradient zero. A loss clamped to at most 6 that starts higher "
        "reads 6.0000 for ever, and an untrained language model over 50,257 tokens starts at ln(50257) = "
        "10.8. Clamped logits and log-variances do the same to part of the network."
    ),
    told_apart=(
        "Gradients are exactly zero at every loss scale and in FP32, and the clamp is active on every "
        "element. Zeros that go away with a larger scale are gradient-underflow. Gradients that are None are "
        "params-not-trained."
    ),
    advice="Train on the unclamped number, and clamp only a detached copy.",
    remedies=(
        "loss.backward()  # the loss itself, not its clamped copy",
        "shown = loss.detach().clamp(max=6.0)  # clamp only what is plotted",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # against spikes: clip gradients",
    ),
    wrong_fix=(
        "A larger loss scale, a higher learning rate, BF16: zero times anything is zero. A higher bound: the "
        "trap is further away and still there."
    ),
    messages=(),
    reference="torch.clamp and gradients, pytorch/pytorch#7002",
)

DISTRIBUTED_DESYNC = Cause(
    id="distributed-desync",
    title="One rank does something else",
    family="not-precision",
    mechanism=(
        "Collectives pair up by their order. A rank that skips a batch joins the next all-reduce one step "
        "late: gradients of different steps are averaged, and the last collective has no partner and times "
        "out. torch.amp.GradScaler decides on each rank alone: an inf that only one rank sees gives the "
        "ranks different scales, and then different weights."
    ),
    told_apart=(
        "Compare across ranks: the number of backward passes, the scale, a checksum of the weights. The "
        "timeout comes last; look for the first step at which one rank did something else. Its reason is "
        "another cause, often bad-input-data or empty-reduction. If no rank skipped anything, a rank died or "
        "the network failed."
    ),
    advice="Decide on all ranks together, by an all-reduce of the decision, so that all skip or none.",
    remedies=(
        "bad = (~torch.isfinite(loss)).float()  # decide together: a flag on every rank",
        "torch.distributed.all_reduce(bad); skip = bool(bad > 0)  # then all skip, or none",
        "Or let every rank run backward: the all-reduce spreads the inf, and all scalers skip.",
        "Run once with TORCH_DISTRIBUTED_DEBUG=DETAIL: it names the collectives that do not match.",
    ),
    wrong_fix=(
        "A longer timeout: the partner never comes. find_unused_parameters=True: the parameters are used, a "
        "rank is missing. FP32: the skip is still taken on one rank alone."
    ),
    messages=(
        r"Watchdog caught collective operation timeout",
        r"Detected mismatch between collectives on ranks",
        r"mismatched ranks that caused the desync",
        r"WorkNCCL\(.{0,200}timed out",
        r"NCCL communicator was aborted on rank",
        r"Timed out waiting \d+ ?ms for (?:recv|send) operation",
        r"gloo/transport/\S{1,80}\] Connection closed by peer",  # what the other ranks see of that
        r"failed to pass monitoredBarrier",
    ),
    reference="NVIDIA-NeMo/Automodel#2468, lightseekorg/TorchSpec#126",
)

OUT_OF_MEMORY = Cause(
    id="out-of-memory",
    title="The GPU's memory is full",
    family="not-precision",
    mechanism=(
        "FP16 halves what is stored in 16 bits, and nothing else. In FP32, AdamW takes 16 bytes for a "
        "parameter: 4 of weight, 4 of gradient, 8 of its own state. Mixed precision keeps all of these and "
        "adds a copy of 2 for autocast, so 18. FP16 weights with an exact master take 14. Activations are "
        "what halves, and only those of operations that run in 16 bits: a large batch gains much, a large "
        "model with a small batch can need more than in FP32."
    ),
    told_apart=(
        "Ask which part is large: weights, gradients, states, copies or activations. If the memory grows from "
        "step to step, something keeps the graph of each, often a sum of losses. If the message tells of much "
        "that is reserved but unallocated, the cache is in pieces. Another process on the same GPU counts as "
        "well. No number is wrong, which tells it from activation-overflow and all other causes."
    ),
    advice="Make the largest part smaller: activations by smaller batches or checkpointing, states by the optimizer.",
    remedies=(
        "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)  # activations: computed again",
        "scaler.scale(loss / num_micro_batches).backward()  # activations: smaller batches, the same update",
        "total += loss.item()  # not total += loss, which keeps the graph of every step",
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True where much is reserved and unallocated.",
    ),
    wrong_fix=(
        "Autocast for a model whose weights and optimizer states are what is large: it adds a copy. "
        "torch.cuda.empty_cache(): it gives back what is free already. FP16 weights under torch's Adam: they "
        "fit, and are NaN after a step or two."
    ),
    messages=(
        r"\b(?:CUDA|HIP|XPU|GPU) (?:out of memory|OOM\b)",
        r"MPS backend out of memory",
        r"CUDA error: out of memory",
        r"OutOfMemoryError",
    ),
    reference="https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management, arXiv:1910.02054",
)

ELSEWHERE = (
    PARAMS_NOT_TRAINED,
    BAD_INPUT_DATA,
    OPTIMIZATION_DIVERGENCE,
    EMPTY_REDUCTION,
    FULLY_MASKED_SOFTMAX,
    NAN_TIMES_ZERO,
    SINGULAR_GRADIENT,
    CLAMP_KILLS_GRADIENT,
    DISTRIBUTED_DESYNC,
    OUT_OF_MEMORY,
)
