"""Causes in the use of the loss scaler, and in what runs beside it."""

from __future__ import annotations

from floatline.causes.cause import Cause

CLIP_BEFORE_UNSCALE = Cause(
    id="clip-before-unscale",
    title="Gradients are clipped while still scaled",
    family="loop",
    mechanism=(
        "scaler.scale(loss).backward() leaves gradients multiplied by the scale, 65536 at the start. "
        "Clipping them to a norm of 1.0 leaves at most 1.5e-5 after unscaling. SGD creeps; Adam hides it "
        "until the scale changes. A norm that is logged or compared with a threshold at that point is wrong "
        "by the same factor."
    ),
    told_apart=(
        "No NaN and no skipped step; the norm handed to the clipping is a multiple of scaler.get_scale(). "
        "Without clipping the model trains. If gradients are exactly zero, it is gradient-underflow. If "
        "optimizer.step() runs on scaled gradients, it is scaler-misuse."
    ),
    advice="Call unscale_ of the scaler once, after the last backward pass and before the gradients are clipped.",
    remedies=(
        "scaler.unscale_(optimizer)  # once, after the last backward and before clipping",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # then clip",
        "scaler.step(optimizer)  # knows that the gradients are unscaled",
    ),
    wrong_fix=(
        "A higher learning rate: it diverges as soon as the scale drops. A lower init_scale: still wrong, by "
        "a smaller factor. No clipping: the spikes come back."
    ),
    messages=(r"does not allow for gradient clipping because it performs unscaling",),
    reference="https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-clipping",
)

FP16_PARAMS_WITH_SCALER = Cause(
    id="fp16-params-with-scaler",
    title="A loss scaler meets FP16 parameters",
    family="loop",
    mechanism=(
        "'Attempting to unscale FP16 gradients.' means that a trainable parameter is FP16: a gradient has "
        "the dtype of its parameter. Unscaled in place, small FP16 gradients would round to zero again, so "
        "torch.amp.GradScaler refuses. A checkpoint loaded in FP16, model.half(), or adapters that take the "
        "dtype of their base bring it about. Autocast and gradient checkpointing have nothing to do with it."
    ),
    told_apart=(
        "The exception names it; list the parameters with requires_grad and dtype torch.float16. BF16 "
        "parameters do not raise and need no scaler. Without the scaler the same model runs into "
        "optimizer-state-underflow, gradient-underflow or update-lost-to-rounding."
    ),
    advice="Keep the parameters that are trained in FP32, and compute under torch.autocast.",
    remedies=(
        "trainable = [p for p in model.parameters() if p.requires_grad]  # adapters over a frozen base",
        "for p in trainable: p.data = p.data.float()  # before the optimizer is built",
        "model.float()  # full fine-tuning: FP32 weights, torch.autocast for the compute",
    ),
    wrong_fix=(
        "Turning the scaler off: small gradients become zero and Adam divides by zero, without an error. "
        "Editing grad_scaler.py to allow FP16: the unscaled gradients round to zero. Turning gradient "
        "checkpointing off: it is not involved."
    ),
    messages=(r"Attempting to unscale FP16 gradients",),
    reference="pytorch/pytorch#74739",
)

SCALER_MISUSE = Cause(
    id="scaler-misuse",
    title="The scaler's calls are incomplete or out of order",
    family="loop",
    mechanism=(
        "scale, backward, unscale_, step and update belong together, once per optimizer step. "
        "optimizer.step() instead of scaler.step(optimizer) uses gradients multiplied by 65536: SGD "
        "explodes at once, Adam hides it. unscale_ in every micro-batch divides what was accumulated before "
        "by the scale again; an update() in between silences the error that would say so. Without update() "
        "the next step raises. An update() without a step or unscale_ since the last one raises 'No inf "
        "checks were recorded prior to update': a loop that looks for inf by hand, updates and continues "
        "ends at its first overflow."
    ),
    told_apart=(
        "Read the order of the calls; most errors of torch.amp.GradScaler name the one that is wrong. Silent "
        "forms: SGD that explodes at once with AMP only, or accumulation in which only the last micro-batch "
        "counts. If only the clipping is in the wrong place, it is clip-before-unscale. A penalty made of "
        "scaled gradients is scaled-grad-in-penalty. 'No inf checks were recorded for this optimizer' is "
        "params-not-trained."
    ),
    advice="Let the scaler scale every loss, make every step, and be updated once a step.",
    remedies=(
        "scaler.scale(loss / num_micro_batches).backward()  # every micro-batch",
        "scaler.unscale_(optimizer)  # once, after the last one, if you clip",
        "scaler.step(optimizer)  # never optimizer.step()",
        "scaler.update()  # once, also where step skipped; not for a batch you left out",
    ),
    wrong_fix=(
        "Dividing the learning rate by the scale: right until the scale changes. Switching to Adam: it hides "
        "the factor, but eps and L2 decay are off by it and the inf check is gone. Commenting the assertion "
        "out: the gradients stay scaled."
    ),
    messages=(
        r"unscale_\(\) has already been called on this optimizer",
        r"unscale_\(\) is being called after step\(\)",
        r"step\(\) has already been called since the last update\(\)",
        r"No inf checks were recorded prior to update",
        r"Attempted (?:step|update|unscale_) but _(?:scale|growth_tracker) is None",
        r"Closure use is not currently supported if GradScaler is enabled",
        r"A GradScaler instance may only be pickled at the beginning",
    ),
    reference="https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation",
)

SCALER_STATE_LOST = Cause(
    id="scaler-state-lost",
    title="The loss scale restarts on resume",
    family="loop",
    mechanism=(
        "The checkpoint holds model and optimizer, but not scaler.state_dict(). Every resume starts at 65536 "
        "again. A model that needs 64 pays 10 skipped steps each time, and short preemptible sessions never "
        "get past them."
    ),
    told_apart=(
        "The scale jumps back to its start value in mid-run, and a burst of skipped steps follows; one long "
        "session trains well. Skips at the very first start are normal. Skips that never end are "
        "gradient-overflow or activation-overflow."
    ),
    advice="Save the scaler's state_dict with the checkpoint, and load it before the first step.",
    remedies=(
        'state = {"model": model.state_dict(), "scaler": scaler.state_dict()}  # save both',
        'scaler.load_state_dict(checkpoint["scaler"])  # load it before the first step',
        'torch.amp.GradScaler("cuda", init_scale=2.0**10)  # old checkpoint: start near the last scale',
    ),
    wrong_fix=(
        "A lower learning rate after the resume, or a search for differences in the data order: the skipped "
        "steps come from the scale alone."
    ),
    messages=(
        r"state dict is empty, possibly because it was saved from a disabled instance of GradScaler",
        r"KeyError: ['\"](?:grad_)?scaler(?:_state)?(?:_dict)?['\"]",
    ),
    reference="huggingface/transformers#34053, ultralytics/ultralytics#22189",
)

SCHEDULER_VS_SKIPPED_STEP = Cause(
    id="scheduler-vs-skipped-step",
    title="The schedule advances on skipped steps",
    family="loop",
    mechanism=(
        "When gradients are not finite, scaler.step(optimizer) does not call optimizer.step(), but "
        "scheduler.step() runs all the same. Skips at the start eat the warm-up or a short decay: after 20 "
        "skipped steps a linear decay over 20 steps has reached zero. PyTorch warns only if the very first "
        "step was skipped, and the order of the two calls is right even then."
    ),
    told_apart=(
        "Count both: more scheduler steps than optimizer steps. Where no scaler is in use the warning means "
        "what it says, and the two calls are to be swapped. A few skips in a long schedule are harmless. A "
        "flat loss at a healthy learning rate is something else: gradient-underflow or "
        "update-lost-to-rounding."
    ),
    advice="Step the schedule only when the scaler made a step: its scale falls when it skips one.",
    remedies=(
        "before = scaler.get_scale(); scaler.step(optimizer); scaler.update()  # note the scale",
        "if scaler.get_scale() >= before: scheduler.step()  # it falls only when a step is skipped",
        'torch.amp.GradScaler("cuda", init_scale=2.0**10)  # fewer skips at the start',
    ),
    wrong_fix=(
        "Silencing the warning: the schedule still runs ahead. Swapping the two calls: they were in order. A "
        "higher base learning rate: the schedule still ends too early."
    ),
    messages=(r"Detected call of `?lr_scheduler\.step\(\)`? before `?optimizer\.step\(\)",),
    reference="pytorch/pytorch#44511, Lightning-AI/pytorch-lightning#16228",
)

SCALED_GRAD_IN_PENALTY = Cause(
    id="scaled-grad-in-penalty",
    title="A gradient penalty is made of scaled gradients",
    family="loop",
    mechanism=(
        "torch.autograd.grad of a scaled output gives gradients multiplied by the scale, 65536 at the start. "
        "A penalty that squares their norm takes them as real: it is 4.3e9 times too large and leaves FP16's "
        "range. The scale falls until the penalty is finite, and from then on it holds the true norm near "
        "the inverse of the scale."
    ),
    told_apart=(
        "Only with AMP; it begins at torch.autograd.grad with create_graph=True of a scaled value, and the "
        "penalty follows the square of the scale. If clipping reads scaled gradients, it is "
        "clip-before-unscale. If the penalty is NaN in FP32 too, where a norm is exactly zero, it is "
        "singular-gradient."
    ),
    advice="Divide these gradients by the scaler's scale before anything is computed from them.",
    remedies=(
        "grads = torch.autograd.grad(scaler.scale(loss), params, create_graph=True)  # scaled",
        "grads = [g / scaler.get_scale() for g in grads]  # unscale before the penalty",
        "grads = torch.autograd.grad(out.float().sum(), x, create_graph=True)  # or FP32, no scale",
    ),
    wrong_fix=(
        "A smaller penalty weight or init_scale: the factor changes whenever the scale does. Clipping: it "
        "bounds the gradient of a wrong penalty."
    ),
    messages=(),
    reference="https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-penalty",
)

SCALERS = (
    CLIP_BEFORE_UNSCALE,
    FP16_PARAMS_WITH_SCALER,
    SCALER_MISUSE,
    SCALER_STATE_LOST,
    SCHEDULER_VS_SKIPPED_STEP,
    SCALED_GRAD_IN_PENALTY,
)
