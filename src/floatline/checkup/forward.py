"""One forward pass under a plan, watched: bytes kept for backward, 16-bit weight copies, matrix products."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from floatline.numerics.cuda_autocast import cuda_autocast_lists
from floatline.numerics.half_on_cpu import HalfOnCPU
from floatline.plans import Plan
from floatline.precision.dtypes import DTYPES, floating_parameters
from floatline.workload import Workload

# Weights times input values: up to here a real pass takes less time than setting up a simulated one.
_SMALL = 1_000_000_000
# Beyond so many a real pass may take minutes on a CPU.
_LARGE = 20_000_000


@dataclass(frozen=True)
class Gemm:
    """One matrix product (m by k) times (k by n), done `batch` times; a convolution counts as one."""

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def multiply_adds(self) -> int:
        """Its work."""
        return self.batch * self.m * self.n * self.k

    @property
    def aligned(self) -> bool:
        """Whether all sizes are multiples of 8, as 16-bit tensor cores read 8 values at a time."""
        return all(size % 8 == 0 for size in (self.m, self.n, self.k))


@dataclass(frozen=True)
class ForwardPass:
    """What one forward pass did.

    Args:
        saved: Bytes kept for backward, without weights, inputs and the copies below.
        copies: Bytes of the 16-bit copies that autocast made of weights.
        gemms: Its matrix products.
        simulated: Whether it ran on tensors without data.
    """

    saved: int
    copies: int
    gemms: tuple[Gemm, ...]
    simulated: bool


class _ForwardWatch(TorchDispatchMode):
    """Sees every operation below autocast and autograd."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.weights = {id(parameter): parameter.requires_grad for parameter in model.parameters()}
        self.trained_copies: dict[int, int] = {}
        self.frozen_copies: dict[int, int] = {}
        self.gemms: list[Gemm] = []
        self.alive: list[Any] = []  # the address of a freed storage would be given out again

    def __torch_dispatch__(  # pyright: ignore[reportImplicitOverride, reportIncompatibleMethodOverride]
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and id(args[0]) in self.weights:  # pyright: ignore[reportPrivateUsage]
            trained = self.weights[id(args[0])]
            (self.trained_copies if trained else self.frozen_copies)[storage_id(out)] = storage_bytes(out)
            self.alive.append(out)
        gemm = _read_gemm(func, args, out)
        if gemm:
            self.gemms.append(gemm)
        return out


def _read_gemm(func: Any, args: tuple[Any, ...], out: Any) -> Gemm | None:
    aten = torch.ops.aten
    if func in (aten.mm.default, aten.bmm.default):
        left, right = args[0], args[1]
    elif func in (aten.addmm.default, aten.baddbmm.default):
        left, right = args[1], args[2]
    elif func is aten.convolution.default:
        weight, groups = args[1], args[8]
        pixels = out.numel() // out.shape[1]
        k = weight[0].numel() if not args[6] else weight.numel() // weight.shape[0]
        return Gemm(m=pixels, n=out.shape[1] // groups, k=k, batch=groups)
    else:
        return None
    batch = left.shape[0] if left.dim() == 3 else 1
    return Gemm(m=left.shape[-2], n=right.shape[-1], k=left.shape[-1], batch=batch)


def storage_id(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def storage_bytes(tensor: Tensor) -> int:
    """Bytes of the memory behind a tensor, not only of its view."""
    return tensor.untyped_storage().nbytes()


def run_forward(workload: Workload, plan: Plan, *, like_cuda: bool) -> ForwardPass:
    """Run the first batch forward under a plan, on a copy of the model, and say what it kept.

    Numerics:
        Bytes are exact for what torch's CPU operators save; shared memory counts once. CUDA's kernels
        save the same, but for some fused ones (attention, batch norm, recurrent layers).
        Checked by tests/checkup/test_memory.py against sizes worked out by hand.

    Small models run for real, large ones on tensors without data, and those that look at values
    (`.item()`, boolean masks) for real again unless they are too large.

    Args:
        workload: What is trained; its model is not touched.
        plan: Dtypes of weights and compute.
        like_cuda: Whether autocast on the CPU follows CUDA's lists.
    """
    weights = sum(parameter.numel() for _, parameter in floating_parameters(workload.model))
    inputs, targets = workload.batches[0]
    values = sum(t.numel() for t in (*inputs, *targets) if isinstance(t, Tensor))
    if weights * values <= _SMALL:
        return _run_real(workload, plan, like_cuda=like_cuda)
    try:
        return _run_simulated(workload, plan, like_cuda=like_cuda)
    except Exception:
        if weights > _LARGE:
            raise
        return _run_real(workload, plan, like_cuda=like_cuda)


def _run_real(workload: Workload, plan: Plan, *, like_cuda: bool) -> ForwardPass:
    model = apply_weights(copy.deepcopy(workload.model), plan)
    with HalfOnCPU():
        return _watch(workload, plan, model, workload.batches[0], like_cuda=like_cuda, simulated=False)


def _run_simulated(workload: Workload, plan: Plan, *, like_cuda: bool) -> ForwardPass:
    mode: Any = FakeTensorMode()
    with FakeCopyMode(mode):
        model = copy.deepcopy(workload.model)

    def strip(x: Any) -> Any:
        return mode.from_tensor(x) if isinstance(x, Tensor) else x

    batch = tree_map(strip, workload.batches[0])
    with mode:
        model = apply_weights(model, plan)
        return _watch(workload, plan, model, batch, like_cuda=like_cuda, simulated=True)


def _watch(
    workload: Workload, plan: Plan, model: nn.Module, batch: Any, *, like_cuda: bool, simulated: bool
) -> ForwardPass:
    if not plan.mixed:
        batch = _cast_batch(batch, DTYPES[plan.weights])
    inputs, targets = batch
    known = [*model.parameters(), *model.buffers(), *(t for t in (*inputs, *targets) if isinstance(t, Tensor))]
    owned = {storage_id(tensor) for tensor in known}
    saved: dict[int, int] = {}
    watch = _ForwardWatch(model)

    def keep(tensor: Tensor) -> Tensor:
        watch.alive.append(tensor)
        if storage_id(tensor) not in owned:
            saved[storage_id(tensor)] = storage_bytes(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with _quiet(), watch, hooks, _autocast(plan, _device_type(model), like_cuda=like_cuda):
        workload.loss_fn(model.train()(*inputs), *targets)
    # Autocast keeps copies of trained weights; those of frozen ones live on only where backward needs them.
    kept_copies = dict(watch.trained_copies)
    kept_copies.update({key: size for key, size in watch.frozen_copies.items() if key in saved})
    activations = sum(size for key, size in saved.items() if key not in kept_copies)
    return ForwardPass(activations, sum(kept_copies.values()), tuple(watch.gemms), simulated)


def _cast_batch(batch: Any, dtype: torch.dtype) -> Any:
    def cast_floats(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return tree_map(cast_floats, batch)


def apply_weights(model: nn.Module, plan: Plan) -> nn.Module:
    """Give the weights the plan's dtype, in place: all of them, or under a mixed plan the trained ones."""
    dtype = DTYPES[plan.weights]
    done: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    for module in model.modules():
        # Not Module.to: it cannot swap tensors without data.
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not parameter.is_floating_point() or (plan.mixed and not parameter.requires_grad):
                continue
            if id(parameter) not in done:
                done[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
            setattr(module, name, done[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_floating_point() and not plan.mixed:
                setattr(module, name, buffer.to(dtype))
    return model


@contextlib.contextmanager
def _autocast(plan: Plan, device_type: str, *, like_cuda: bool) -> Generator[None]:
    if not plan.mixed:
        yield
        return
    lists = cuda_autocast_lists() if like_cuda and device_type == "cpu" else contextlib.nullcontext()
    with lists, torch.autocast(device_type, dtype=DTYPES[plan.compute]):
        yield


def _device_type(model: nn.Module) -> str:
    return next((parameter.device.type for parameter in model.parameters()), "cpu")


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """No warnings, no trace in the random state, and no oneDNN: its LSTM keeps a work space of its own."""
    fork = cast("Any", torch.random.fork_rng(devices=[]))  # pyright: ignore[reportUnknownMemberType]
    plain = cast("Any", torch.backends.mkldnn.flags(enabled=False))  # pyright: ignore[reportUnknownMemberType]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with fork, plain, torch.enable_grad():
            yield


def largest_gemm(gemms: Sequence[Gemm]) -> int:
    """Multiply-adds of the largest product; 0 where there is none."""
    return max((gemm.multiply_adds for gemm in gemms), default=0)
