"""CUDA's autocast lists on the CPU, so that a laptop predicts the dtypes of a GPU."""

# torch shows its dispatcher to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import ContextDecorator, ExitStack, contextmanager
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.library import Library, fallthrough_kernel

from floatline.numerics.half_on_cpu import HalfOnCPU

# low       autocast's dtype
# float32   float32
# dtype     float32, unless the call says which dtype it wants
# append    float32, by the overload that takes a dtype
# widest    the widest dtype among the arguments
# refused   an error
# float16   float16, even where autocast's dtype is bfloat16
# rounded   computed in float32, returned in the dtype of the input
Rule = Literal["low", "float32", "dtype", "append", "widest", "refused", "float16", "rounded"]

# As torch registers them for CUDA in aten/src/ATen/autocast_mode.h and autocast_mode.cpp.
_LISTS: dict[Rule, str] = {
    "low": """
        _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d
        conv_transpose2d.input conv_transpose3d.input convolution cudnn_convolution
        cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm
        baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell
        gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
        scaled_dot_product_attention""",
    "float32": """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
        pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm
        frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
        cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
        huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
        multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
        upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
        upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
        _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa""",
    "dtype": """
        prod prod.dim_int prod.dim_Dimname softmax.int softmax.Dimname log_softmax.int log_softmax.Dimname
        cumprod cumprod.dimname cumsum cumsum.dimname linalg_vector_norm linalg_matrix_norm
        linalg_matrix_norm.str_ord sum sum.dim_IntList sum.dim_DimnameList""",
    "append": "norm.Scalar norm.ScalarOpt_dim norm.names_ScalarOpt_dim",
    "widest": """
        addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add""",
    "refused": "binary_cross_entropy",
}
# Not on CUDA's lists, and yet other than on the CPU: recurrent layers reach cuDNN, whose own rule says
# float16; trace is a sum there; avg_pool3d has a 16-bit kernel there and none on the CPU.
_UNLISTED: dict[Rule, str] = {
    "float16": """
        lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data""",
    "float32": "trace",
    "rounded": "avg_pool3d",
}
_WITH_DTYPE = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
    "norm.names_ScalarOpt_dim": "norm.names_ScalarOpt_dim_dtype",
}


@contextmanager
def cuda_regions() -> Generator[None]:
    """Where there is no GPU, let a region of autocast that is made inside and names "cuda" be one of the CPU.

    By itself torch passes over it: `torch.cuda.amp.autocast(enabled=False)` around a layer of a model changes nothing
    on a CPU, and makes the layer raise on a GPU, if nothing casts what it is given. It holds for all threads.
    """
    if torch.cuda.is_available():
        yield
        return
    region = torch.amp.autocast_mode.autocast
    make, is_on = region.__init__, True

    @wraps(make)
    def make_for_cpu(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **named: Any) -> None:
        if is_on and device_type == "cuda":
            if dtype is None and not torch.is_autocast_enabled("cpu"):
                dtype = torch.get_autocast_dtype("cuda")  # a GPU's own; inside of another region it is that one's
            device_type = "cpu"
        make(self, device_type, dtype, *args, **named)

    region.__init__ = make_for_cpu
    try:
        yield
    finally:
        is_on = False  # who has put something above it may put it back later: it does nothing then
        if region.__init__ is make_for_cpu:
            region.__init__ = make


class cuda_autocast_lists(ContextDecorator):  # noqa: N801 - used as contextlib's are, in `with` and as a decorator
    """Let `torch.autocast("cpu")` treat every operation as CUDA's autocast does.

    CPU autocast keeps exp, pow, sum, softmax and many more in 16 bits where CUDA takes float32, runs
    some in float32 that CUDA leaves alone, and lets binary_cross_entropy pass, which CUDA refuses::

        with cuda_autocast_lists(), torch.autocast("cpu", dtype=torch.float16):
            torch.ones(2, dtype=torch.float16).exp().dtype  # torch.float32, as on a GPU

    The rules are registered with torch's dispatcher, where CUDA's own live: they reach calls made inside
    torch's C++ code too (cross_entropy's log_softmax), which a Python-level mode would not see, and the
    casts are recorded by autograd. torch has one dispatcher, so while one thread is inside, CPU autocast
    follows CUDA's lists in all threads; whether autocast is on stays a matter of each thread. Enter
    before other threads work under CPU autocast; the last one out restores torch. The fast path of
    nn.MultiheadAttention and nn.TransformerEncoder is off meanwhile, as it is under CUDA's autocast.

    Regions that are made meanwhile and name "cuda" are those of the CPU (`cuda_regions`).

    Entered by hand, at the top of a file, it holds until it is left, or to the end of the process::

        cuda_autocast_lists().__enter__()

    Numerics:
        Which operations are listed is asked of the installed torch. The dtypes returned, and the calls
        that raise, agree with an H200 over tests/numerics/autocast_table.py, but for the half-precision FFT, which
        the CPU does not have. Not emulated: CUDA's kernels themselves, and the cache of cast weights for
        einsum, mv, addmv, addr and recurrent layers: there a weight used twice is cast twice, and its
        gradients are added in float32. Checked by tests/numerics/test_cuda_autocast.py.
    """

    def __enter__(self) -> None:
        _registration.change(users=1)

    def __exit__(self, *_: object) -> None:
        _registration.change(users=-1)


@contextmanager
def gpu_arithmetic() -> Generator[None]:
    """16 bits as a GPU has them: on a CPU its products and its autocast; what lies on a GPU passes through."""
    with HalfOnCPU(), cuda_autocast_lists():
        yield


@contextmanager
def cpu_autocast_lists() -> Generator[None]:
    """Let `cuda_autocast_lists` change nothing inside, whoever enters it: autocast on the CPU stays the CPU's."""
    _registration.change(holds=1)
    try:
        yield
    finally:
        _registration.change(holds=-1)


def follows_cuda_lists() -> bool:
    """Whether autocast on the CPU follows CUDA's lists now."""
    return _registration.in_force


class _Registration:
    """CUDA's rules instead of the CPU's, for as long as anyone uses them and nobody holds them off."""

    def __init__(self) -> None:
        self.in_force = False
        self._lock = threading.Lock()
        self._num_users = self._num_holds = 0
        self._undo = ExitStack()

    def change(self, *, users: int = 0, holds: int = 0) -> None:
        """Add so many who use the rules, and who hold them off, and put in force what follows."""
        with self._lock:
            num_users, num_holds = self._num_users + users, self._num_holds + holds
            if num_users < 0:
                raise RuntimeError("cuda_autocast_lists was left more often than it was entered. Enter it first.")
            wanted = num_users > 0 and num_holds == 0
            if wanted and not self.in_force:
                self._register()
            elif self.in_force and not wanted:
                self._undo.close()
            self.in_force, self._num_users, self._num_holds = wanted, num_users, num_holds

    def _register(self) -> None:
        with ExitStack() as undo, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            undo.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
            undo.enter_context(cuda_regions())
            library = Library("aten", "IMPL", "AutocastCPU")
            undo.callback(library._destroy)
            for name, kernel in _kernels():
                library.impl(name, kernel)  # pyright: ignore[reportUnknownMemberType]
            self._undo = undo.pop_all()


# torch's dispatcher is one for the process, and so is this.
_registration = _Registration()


def _kernels() -> Iterable[tuple[str, Callable[..., Any]]]:
    """What to register for AutocastCPU, by the name of the operation."""
    listed, on_cpu = _listed("AutocastCUDA"), _listed("AutocastCPU")
    rules, unlisted = _by_name(_LISTS), _by_name(_UNLISTED)
    unknown = sorted(listed - set(rules) - {"_cudnn_rnn"})
    if unknown:
        message = f"CUDA's autocast rule is not known for {', '.join(unknown)}; CPU's rule stays."
        warnings.warn(message, stacklevel=5)
    for name, rule in rules.items():
        # CPU's kernel for the same rule stays: its casts of weights are cached, as CUDA's are.
        if name in listed and not (rule == "low" and name in on_cpu):
            yield name, _kernel(_overload(name), rule)
    for name, rule in unlisted.items():
        yield name, _kernel(_overload(name), rule)
    for name in on_cpu - listed - set(unlisted):
        yield name, fallthrough_kernel


def _by_name(lists: dict[Rule, str]) -> dict[str, Rule]:
    return {name: rule for rule, names in lists.items() for name in names.split()}


@functools.cache  # of torch's own rules: it takes longer than to register all of CUDA's
def _listed(key: str) -> frozenset[str]:
    """Names of the operations for which torch has a rule under a dispatch key."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return frozenset(name[6:] for name in names if name.startswith("aten::") and has_kernel(name, key))


def _overload(name: str) -> OpOverload[..., Any]:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _kernel(op: OpOverload[..., Any], rule: Rule) -> Callable[..., Any]:
    if rule == "refused":
        # CUDA's kernel refuses before it looks at a tensor: let it speak for itself.
        return lambda *args, **kwargs: op._op_dk(torch._C.DispatchKey.AutocastCUDA, *args, **kwargs)
    if rule == "dtype":
        return _dtype_kernel(op)
    if rule == "append":
        return _append_kernel(op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = _target(rule, (*args, *kwargs.values()))
        result = _without_autocast(op, _cast(args, dtype), {k: _cast(v, dtype) for k, v in kwargs.items()})
        return result.to(args[0].dtype) if rule == "rounded" else result

    return kernel


def _dtype_kernel(op: OpOverload[..., Any]) -> Callable[..., Any]:
    position = [argument.name for argument in op._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = args[position] if position < len(args) else kwargs.get("dtype")
        if given is None and _is_eligible(args[0]):
            args, kwargs = args[:position], {**kwargs, "dtype": torch.float32}
        return _without_autocast(op, args, kwargs)

    return kernel


def _append_kernel(op: OpOverload[..., Any]) -> Callable[..., Any]:
    with_dtype = _overload(_WITH_DTYPE[op.name().removeprefix("aten::")])
    defaults = [argument.default_value for argument in op._schema.arguments]

    def kernel(*args: Any) -> Any:
        dtype = torch.float32 if _is_eligible(args[0]) else args[0].dtype
        return _without_autocast(with_dtype, (*args, *defaults[len(args) :]), {"dtype": dtype})

    return kernel


def _without_autocast(op: OpOverload[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    torch.set_autocast_enabled("cpu", False)
    try:
        return op(*args, **kwargs)
    finally:
        torch.set_autocast_enabled("cpu", True)


def _is_eligible(value: Any) -> bool:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return is_float and value.dtype != torch.float64 and value.device.type == "cpu"


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value.to(dtype) if _is_eligible(value) else value


def _target(rule: Rule, values: tuple[Any, ...]) -> torch.dtype:
    if rule == "float16":
        return torch.float16
    if rule in ("float32", "rounded"):
        return torch.float32
    low = torch.get_autocast_dtype("cpu")
    if rule == "low":
        return low
    found = {value.dtype for value in _flat(values) if _is_eligible(value)}
    if torch.float32 in found:
        return torch.float32
    if found - {low}:
        raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return low


def _flat(values: Any) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value  # pyright: ignore[reportUnknownVariableType]
        else:
            yield value
