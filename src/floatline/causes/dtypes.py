"""Causes by which a dtype is wrong for an operation, or an autocast region for a dtype."""

from __future__ import annotations

from floatline.causes.cause import Cause

UNSUPPORTED_HALF_OP = Cause(
    id="unsupported-half-op",
    title="No 16-bit kernel for this operation",
    family="loop",
    mechanism=(
        "Some operations have no 16-bit kernel, and autocast hands them 16-bit tensors because their input "
        "came from a matmul or convolution: linear algebra such as slogdet, inv and svd, FFTs, cdist, "
        "ctc_loss. Which ones depends on the device and the version; older versions had no half matmul on a "
        "CPU at all."
    ),
    told_apart=(
        "The exception names the operation and one dtype, Half or BFloat16; no number is wrong yet. If it "
        "names two dtypes, it is dtype-mismatch or autocast-region-misuse. A kernel name that ends in _cpu "
        "may only mean that the model was not moved to the GPU."
    ),
    advice="Leave autocast around this operation, and give it FP32 inputs.",
    remedies=(
        'with torch.autocast("cuda", enabled=False): d = w.float().slogdet()  # leave it and cast',
        "torch.cdist(x.float(), y.float())  # or cast the inputs where they are used",
        "model.float()  # on a CPU without half kernels",
    ),
    wrong_fix=(
        ".half() on everything: every such operation then fails. try/except around the term: the loss "
        "silently loses it. Leaving autocast without .float(): the tensor stays 16-bit."
    ),
    messages=(
        r"not implemented for '(?:Half|BFloat16|ComplexHalf|Float8\w*)'",
        r"Low precision dtypes not supported\. Got (?:Half|BFloat16)",
        r"Unsupported dtype (?:Half|BFloat16)",
        r"Got unsupported ScalarType (?:Half|BFloat16)",
        r"is not implemented for type torch\.(?:cuda\.)?(?:Half|BFloat16)Tensor",
        r"powers of two when computing in half precision",
        r"FFT doesn't support tensors? of type:? (?:Half|BFloat16|ComplexHalf)",
        r"input tensor must be either float or double dtype",
        r"could not create a primitive descriptor for",
    ),
    reference="pytorch/pytorch#136748 (cdist), Lightning-AI/torchmetrics#1009 (half on a CPU)",
)

DTYPE_MISMATCH = Cause(
    id="dtype-mismatch",
    title="Two dtypes meet in one operation",
    family="loop",
    mechanism=(
        "Matmuls, convolutions and most indexed writes want one dtype. Autocast casts the inputs of the "
        "operations on its lists, inside its region, and nothing else: buffers, caches, custom autograd "
        "Functions and foreign kernels see what they are given. A custom Function saves an FP32 weight, its "
        "backward runs outside autocast, and a half gradient meets that weight."
    ),
    told_apart=(
        "The exception names two dtypes. Raised in backward: a custom autograd Function. Raised in forward: "
        "a buffer, mask or cache, or a tensor made without a dtype. Raised inside a disabled autocast "
        "region: autocast-region-misuse. If it names one dtype only, it is unsupported-half-op."
    ),
    advice="Cast one of the two to the format of the other here; a custom autograd function needs custom_fwd.",
    remedies=(
        '@torch.amp.custom_fwd(device_type="cuda")  # above forward of the custom Function',
        '@torch.amp.custom_bwd(device_type="cuda")  # above its backward',
        "out = torch.zeros(n, dtype=x.dtype, device=x.device)  # make buffers in the dtype at hand",
        "out.index_add_(0, index, source.to(out.dtype))  # cast at the indexed write",
    ),
    wrong_fix=(
        "backward inside autocast: PyTorch advises against it. Casting the parameter to half: it brings "
        "fp16-params-with-scaler. .half() on the line that failed: the next line fails."
    ),
    messages=(
        r"source and destination dtypes match",
        r"Expected self\.dtype to be equal to src\.dtype",
        r"self (?:\(\w+\) )?and source .{0,40}(?:same scalar type|same dtype)",
        r"attempting to assign a gradient with dtype|assigned grad has data of a different type",
        r"Found dtype \w+ but expected \w+",
        r"expected dtype \S+ for `\w+` but got dtype",
    ),
    reference=("https://docs.pytorch.org/docs/stable/notes/amp_examples.html#autocast-and-custom-autograd-functions"),
)

AUTOCAST_REGION_MISUSE = Cause(
    id="autocast-region-misuse",
    title="The autocast region is drawn wrong",
    family="loop",
    mechanism=(
        "Leaving autocast casts nothing: inside a disabled region a half activation from outside meets FP32 "
        "weights, and the exception names two dtypes. The other form is silent. Autocast keeps the 16-bit "
        "copy of each FP32 weight until its outermost region ends; where optimizer.step() runs inside the "
        "region, every forward pass uses the old copy, and the loss is bit-identical while the weights move."
    ),
    told_apart=(
        "Two dtypes, raised inside autocast(enabled=False): this. Raised anywhere else: dtype-mismatch. The "
        "silent form: the weights change and the loss of the same batch does not, in any digit. If the "
        "weights stand still too, it is update-lost-to-rounding or params-not-trained."
    ),
    advice="Cast at the border of the region, and keep backward and the optimizer's step outside of it.",
    remedies=(
        'with torch.autocast("cuda", enabled=False): y = self.head(x.float())  # cast at the border',
        'with torch.autocast("cuda", dtype=torch.float16): loss = fn(model(x), y)  # forward only',
        "scaler.scale(loss).backward(); scaler.step(optimizer)  # outside the region",
    ),
    wrong_fix=(
        "self.head.half(): the head then runs in the precision it was to be spared. Removing the FP32 "
        "region: the overflow it was made for comes back."
    ),
    messages=(),
    reference=("https://docs.pytorch.org/docs/stable/amp.html, X-GenGroup/Flow-Factory#186 (stale weight copy)"),
)

DTYPES = (UNSUPPORTED_HALF_OP, DTYPE_MISMATCH, AUTOCAST_REGION_MISUSE)
