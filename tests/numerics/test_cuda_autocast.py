"""CUDA's autocast lists on the CPU, against a record made on a GPU."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.numerics.autocast_table import CALLS, COLUMNS, column_name, result
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from floatline.numerics import cuda_autocast
from floatline.numerics.cuda_autocast import cpu_autocast_lists, cuda_autocast_lists, follows_cuda_lists
from floatline.numerics.half_on_cpu import HalfOnCPU

RECORD = Path(__file__).parents[1] / "data" / "cuda_autocast.json"
HALF = torch.float16

# The CPU has no half-precision FFT. It says so; it does not return another dtype.
NO_CPU_KERNEL = {"torch.fft.rfft(x)", "torch.fft.fft(x)"}
# Operations that torch put on CUDA's lists, or took off, between releases.
LISTED_SINCE = {"F.rms_norm(x, [8], v)": "aten::rms_norm"}


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    if not RECORD.exists():
        pytest.fail(f"{RECORD.name} is missing. Make it on a GPU with tools/record_cuda_autocast.py.")
    return json.loads(RECORD.read_text())


def raises(outcome: str) -> bool:
    return "Error: " in outcome


def agree(cuda: str, ours: str) -> bool:
    """Whether both return the same dtypes, or both raise: autocast's own errors in the same words."""
    if "autocast" in cuda or not raises(cuda):
        return ours == cuda
    return raises(ours)


def disagreements(record: dict[str, Any], low: str, dtype: str) -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    has_rule = torch._C._dispatch_has_kernel_for_dispatch_key
    changed = {
        call
        for call, op in LISTED_SINCE.items()
        if (op in record["kernels"]) != (op in names and has_rule(op, "AutocastCUDA"))
    }
    cuda = record["columns"][column_name(low, dtype)]
    dtypes = getattr(torch, dtype), getattr(torch, low)
    return {call for call in CALLS if not agree(cuda[call], result(call, "cpu", *dtypes))} - changed


def test_the_record_is_of_a_gpu_and_holds_every_call(record):
    assert "NVIDIA" in record["device"]
    assert set(record["columns"]) == {column_name(*column) for column in COLUMNS}
    assert all(set(results) == set(CALLS) for results in record["columns"].values())


@pytest.mark.parametrize(("low", "dtype"), COLUMNS)
def test_every_call_returns_what_the_gpu_returned(record, low, dtype):
    with cuda_autocast_lists():
        assert disagreements(record, low, dtype) <= NO_CPU_KERNEL


def test_calls_without_a_cpu_kernel_raise():
    with cuda_autocast_lists():
        assert all(raises(result(call, "cpu", HALF, HALF)) for call in NO_CPU_KERNEL)


def test_cpu_autocast_alone_returns_other_dtypes(record):
    differing = disagreements(record, "float16", "float16")
    assert differing > {
        "torch.exp(x)",
        "torch.log(x)",
        "x ** 2",
        "F.softmax(x, dim=-1)",
        "x.sum()",
        "torch.norm(x)",
        "x.cumsum(dim=0)",
        "F.layer_norm(x, [8])",
        "F.binary_cross_entropy(x, y)",
        "F.avg_pool3d(i3, 2)",
        "torch.dot(low[0], full[0])",
    }


def test_every_rule_of_the_installed_torch_is_known():
    known = set(cuda_autocast._by_name(cuda_autocast._LISTS)) | {"_cudnn_rnn"}
    assert cuda_autocast._listed("AutocastCUDA") <= known


def test_an_unknown_rule_is_named_in_a_warning(monkeypatch):
    lists = {**cuda_autocast._LISTS, "append": "norm.Scalar"}
    monkeypatch.setattr(cuda_autocast, "_LISTS", lists)
    with pytest.warns(UserWarning, match=r"not known for norm\.ScalarOpt_dim[,;]"), cuda_autocast_lists():
        pass


# --- entering and leaving ---------------------------------------------------------------------------


def dtype_of(call: Callable[[torch.Tensor], torch.Tensor]) -> torch.dtype:
    with torch.autocast("cpu", dtype=HALF):
        return call(torch.ones(2, 2, dtype=HALF)).dtype


def test_leaving_restores_every_rule_of_the_cpu():
    before = {call: result(call, "cpu", HALF, HALF) for call in CALLS}
    with cuda_autocast_lists():
        during = {call: result(call, "cpu", HALF, HALF) for call in CALLS}
    after = {call: result(call, "cpu", HALF, HALF) for call in CALLS}
    assert before == after != during


def test_an_error_inside_restores_the_cpu():
    with pytest.raises(ZeroDivisionError), cuda_autocast_lists():
        raise ZeroDivisionError
    assert dtype_of(torch.exp) == HALF


def test_an_error_while_entering_restores_the_cpu(monkeypatch):
    def broken() -> Any:
        yield from list(kernels())[:50]
        raise ZeroDivisionError

    kernels = cuda_autocast._kernels
    monkeypatch.setattr(cuda_autocast, "_kernels", broken)
    with pytest.raises(ZeroDivisionError), cuda_autocast_lists():
        pass
    assert dtype_of(torch.exp) == HALF
    assert torch.backends.mha.get_fastpath_enabled()


def test_it_can_be_entered_twice_and_again():
    for _ in range(2):
        with cuda_autocast_lists():
            with cuda_autocast_lists():
                assert dtype_of(torch.exp) == torch.float32
            assert dtype_of(torch.exp) == torch.float32
        assert dtype_of(torch.exp) == HALF


def test_the_lists_hold_in_all_threads_until_the_last_one_leaves():
    seen: list[torch.dtype] = []
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with cuda_autocast_lists():
            inside.set()
            leave.wait(250)
            seen.append(dtype_of(torch.exp))

    thread = threading.Thread(target=work)
    with cuda_autocast_lists():
        thread.start()
        inside.wait(250)
    seen.append(dtype_of(torch.exp))
    leave.set()
    thread.join()
    assert seen == [torch.float32, torch.float32]
    assert dtype_of(torch.exp) == HALF


def exp_dtype() -> torch.dtype:
    with torch.autocast("cpu", dtype=HALF):
        return torch.ones(2, dtype=HALF).exp().dtype


def test_entered_by_hand_they_hold_until_left_though_nobody_keeps_them():
    cuda_autocast_lists().__enter__()
    try:
        gc.collect()
        assert exp_dtype() is torch.float32
    finally:
        cuda_autocast_lists().__exit__(None, None, None)
    assert exp_dtype() is HALF


def test_left_without_being_entered_is_an_error_and_changes_nothing():
    with pytest.raises(RuntimeError, match="more often than it was entered"):
        cuda_autocast_lists().__exit__(None, None, None)
    with cuda_autocast_lists():
        assert exp_dtype() is torch.float32
    assert exp_dtype() is HALF


def test_held_off_they_change_nothing_whoever_enters_them_and_hold_again_afterwards():
    with cuda_autocast_lists():
        with cpu_autocast_lists():
            with cuda_autocast_lists():
                assert dtype_of(torch.exp) == HALF
            assert not follows_cuda_lists()
        assert dtype_of(torch.exp) == torch.float32
        assert follows_cuda_lists()
    assert dtype_of(torch.exp) == HALF
    assert not follows_cuda_lists()


def test_as_a_decorator_they_hold_for_each_call():
    @cuda_autocast_lists()
    def asked(depth: int) -> list[torch.dtype]:
        return [exp_dtype(), *(asked(depth - 1) if depth else [])]

    assert exp_dtype() is HALF
    assert asked(1) == asked(1) == [torch.float32] * 2
    assert exp_dtype() is HALF


def test_nothing_changes_where_autocast_is_off():
    x = torch.ones(2, dtype=HALF)
    with cuda_autocast_lists():
        assert x.exp().dtype == HALF
        with torch.autocast("cpu", dtype=HALF), torch.autocast("cpu", enabled=False):
            assert x.exp().dtype == HALF
            assert F.binary_cross_entropy(x / 2, x / 2).dtype == HALF


# --- what it is for ---------------------------------------------------------------------------------


def test_exp_of_12_is_finite_as_on_a_gpu_and_inf_without_the_lists():
    x = torch.tensor([12.0], dtype=HALF)
    with torch.autocast("cpu", dtype=HALF):
        assert x.exp().isinf()
        with cuda_autocast_lists():
            assert x.exp().item() == pytest.approx(162754.79, rel=1e-6)


def test_binary_cross_entropy_is_refused_in_cuda_words():
    x = torch.full((2,), 0.5, dtype=HALF)
    with cuda_autocast_lists(), torch.autocast("cpu", dtype=HALF):
        with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits") as error:
            F.binary_cross_entropy(x, x)
        assert dtype_of(torch.exp) == torch.float32
    assert "unsafe to autocast" in str(error.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.exp().sum(),
        lambda x: x.softmax(-1)[0, 0],
        lambda x: torch.norm(x),
        lambda x: (x**3).sum(),
        lambda x: F.layer_norm(x, [4])[0, 0],
        lambda x: torch.einsum("ij,kj->ik", x, x).sum(),
        lambda x: torch.addcmul(x, x.float(), x).sum(),
    ],
)
def test_gradients_flow_through_the_casts(call):
    x = torch.linspace(0.1, 0.9, 12, dtype=HALF).reshape(3, 4).requires_grad_()
    exact = x.detach().double().requires_grad_()
    with cuda_autocast_lists(), torch.autocast("cpu", dtype=HALF):
        call(x).backward()
    call(exact).backward()
    assert x.grad is not None
    assert x.grad.dtype == HALF
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=4e-3, atol=1e-3)


class Casts(TorchDispatchMode):
    """Counts casts."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_a_weight_used_twice_is_cast_once_by_linear_and_twice_by_mv():
    weight, x = torch.ones(2, 2, requires_grad=True), torch.ones(2, dtype=HALF)
    with cuda_autocast_lists(), torch.autocast("cpu", dtype=HALF):
        with Casts() as by_linear:
            F.linear(x, weight) + F.linear(x, weight)
        with Casts() as by_mv:
            torch.mv(weight, x) + torch.mv(weight, x)
    assert (by_linear.count, by_mv.count) == (1, 2)


def test_the_fast_path_of_attention_is_off_as_on_a_gpu():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().half()
    x = torch.ones(1, 3, 8, dtype=HALF)
    with torch.no_grad(), torch.autocast("cpu", dtype=HALF):
        assert layer(x).dtype == HALF
        with cuda_autocast_lists():
            assert layer(x).dtype == torch.float32
        assert layer(x).dtype == HALF


def test_it_works_together_with_half_on_cpu():
    layer, x = nn.Linear(8, 8), torch.ones(2, 8)
    with HalfOnCPU() as mode, cuda_autocast_lists(), torch.autocast("cpu", dtype=HALF):
        out = layer(x)
        loss = F.cross_entropy(out, torch.tensor([0, 1]))
        loss.backward()
    assert (out.dtype, loss.dtype) == (HALF, torch.float32)
    assert mode.computed == {"aten.addmm": 1, "aten.mm": 1}
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


# --- regions that name "cuda" ------------------------------------------------------------------------

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there such a region is a GPU's own")
ONES = torch.ones(2, 2)
OFF: dict[str, Callable[[], Any]] = {
    "torch.autocast": lambda: torch.autocast("cuda", enabled=False),
    "by name": lambda: torch.autocast(device_type="cuda", dtype=HALF, enabled=False),
    "torch.cuda.amp": lambda: torch.cuda.amp.autocast(enabled=False),
}


def product_dtype(region: Callable[[], Any], low: torch.dtype = HALF, *, enabled: bool = True) -> torch.dtype:
    """Of a product in a region inside of one of the CPU."""
    with torch.autocast("cpu", dtype=low, enabled=enabled), region():
        return (ONES @ ONES).dtype


@without_gpu
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("spelling", OFF)
def test_a_region_that_is_off_for_cuda_is_off_for_the_cpu_and_only_inside(spelling):
    with cuda_autocast_lists():
        assert product_dtype(OFF[spelling]) == torch.float32
    assert product_dtype(OFF[spelling]) == HALF


@without_gpu
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_region_that_is_on_has_the_dtype_of_a_gpu_or_of_the_region_around_it():
    def region() -> Any:
        return torch.autocast("cuda")

    with cuda_autocast_lists():
        assert product_dtype(region, enabled=False) == HALF
        assert product_dtype(region, torch.bfloat16) == torch.bfloat16
    assert product_dtype(region, enabled=False) == torch.float32


@without_gpu
def test_leaving_gives_torch_its_own_regions_whoever_wrapped_them_meanwhile(monkeypatch):
    own = torch.autocast.__init__
    with cuda_autocast_lists():
        assert torch.autocast.__init__ is not own
        between = torch.autocast.__init__
    assert torch.autocast.__init__ is own
    monkeypatch.setattr(torch.autocast, "__init__", between)  # put back later by somebody who had wrapped it
    assert product_dtype(OFF["torch.autocast"]) == HALF
