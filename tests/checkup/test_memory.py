"""Memory by part against sizes worked out by hand, and the forward pass that measures it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from floatline.base.texts import format_bytes
from floatline.checkup import forward
from floatline.checkup.forward import Gemm, run_forward
from floatline.checkup.memory import Memory, estimate_memory, make_optimizer
from floatline.errors import TargetError
from floatline.plans import KeptModule, Plan
from floatline.plans.presets import PLANS
from floatline.workload import Workload

ADAMW = torch.optim.AdamW


def workload(model: nn.Module, *inputs: Any, make: Any = ADAMW, loss: Any = None) -> Workload:
    return Workload(
        model=model,
        batches=[(inputs, ())],
        loss_fn=loss or (lambda out: out.float().sum()),
        precision="fp16-mixed",
        make_optimizer=lambda m: make([p for p in m.parameters() if p.requires_grad]),
    )


def estimate(work: Workload, *plans: Plan, like_cuda: bool = False) -> Memory:
    plans = plans or tuple(PLANS.values())
    return estimate_memory(work, plans, optimizer=make_optimizer(work), like_cuda=like_cuda)


# --- by hand ---


def test_two_linear_layers_by_hand():
    # 8 x 16 -> 32 -> 4, no biases: 640 weights.
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 4, bias=False))
    memory = estimate(workload(model, torch.randn(8, 16), loss=lambda out: out.sum()))
    weights = 16 * 32 + 32 * 4
    states = weights * 8 + 2 * 4  # two moments, and a step counter for each of the two tensors

    full = memory.parts["fp32"]
    assert (full.weights, full.gradients, full.states) == (weights * 4, weights * 4, states)
    assert (full.master, full.copies) == (0, 0)
    # Backward needs the ReLU's output, which is also the second layer's input; the batch is not counted.
    assert full.activations == 8 * 32 * 4

    mixed = memory.parts["fp16-mixed"]
    assert (mixed.weights, mixed.gradients, mixed.states) == (weights * 4, weights * 4, states)
    assert mixed.copies == weights * 2
    # In 16 bits: the batch, cast, and the ReLU's output.
    assert mixed.activations == 8 * 16 * 2 + 8 * 32 * 2
    assert memory.parts["bf16-mixed"] == mixed

    true = memory.parts["fp16-true"]
    assert (true.weights, true.master, true.gradients) == (weights * 2, weights * 2, weights * 2)
    # The batch is cast before the step, and is not counted.
    assert true.activations == 8 * 32 * 2
    assert true.total == sum(size for part, size in true.as_json().items() if part != "total" and size)


def test_adamw_takes_16_bytes_a_weight_in_fp32_and_18_in_mixed():
    memory = estimate(workload(nn.Linear(1000, 100, bias=False), torch.randn(1, 1000)))
    for plan, each in (("fp32", 16), ("fp16-mixed", 18), ("fp16-true", 14)):
        parts = memory.parts[plan]
        assert parts.total is not None and parts.activations is not None
        assert parts.total - parts.activations - 4 == each * 100_000


@pytest.mark.parametrize(
    ("make", "each", "once"),
    [
        (torch.optim.SGD, 0, 0),
        (lambda p: torch.optim.SGD(p, momentum=0.9), 4, 0),
        (ADAMW, 8, 4),
        (lambda p: ADAMW(p, fused=True), 8, 4),
        (lambda p: ADAMW(p, amsgrad=True), 12, 4),
        (torch.optim.Adagrad, 4, 4),
    ],
)
def test_optimizer_states_are_counted_from_a_real_step(make: Any, each: int, once: int):
    work = workload(nn.Linear(64, 8, bias=False), torch.randn(2, 64), make=make)
    assert estimate(work, PLANS["fp32"]).parts["fp32"].states == each * 512 + once


def test_an_optimizer_that_cannot_be_stepped_is_not_guessed_at():
    parts = estimate(workload(nn.Linear(4, 4), torch.randn(2, 4), make=torch.optim.LBFGS)).parts["fp32"]
    assert parts.states is None
    assert parts.total is None


def test_counting_changes_neither_the_model_nor_the_optimizer():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    work = workload(model, torch.randn(8, 4))
    optimizer = make_optimizer(work)
    random = torch.get_rng_state()
    estimate_memory(work, PLANS.values(), optimizer=optimizer, like_cuda=True)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.dtype == torch.float32 and p.grad is None for p in model.parameters())
    assert not optimizer.state
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in model.parameters()}


def test_a_frozen_fp16_base_stays_fp16_under_a_mixed_plan():
    base, adapter = nn.Linear(10, 10, bias=False).half().requires_grad_(False), nn.Linear(10, 10, bias=False)
    memory = estimate(workload(nn.Sequential(base, adapter), torch.randn(2, 10)))
    assert memory.parts["fp16-mixed"].weights == 100 * 2 + 100 * 4
    assert memory.parts["fp32"].weights == 200 * 4
    assert memory.parts["fp16-mixed"].gradients == 100 * 4
    # The base is FP16 already: only the adapter is copied.
    assert memory.parts["fp16-mixed"].copies == 100 * 2


def test_copies_of_frozen_weights_count_only_where_backward_needs_them():
    frozen = nn.Linear(10, 10, bias=False).requires_grad_(False)
    first = estimate(workload(nn.Sequential(frozen, nn.Linear(10, 3, bias=False)), torch.randn(2, 10)))
    assert first.parts["fp16-mixed"].copies == 30 * 2
    last = estimate(workload(nn.Sequential(nn.Linear(10, 10, bias=False), frozen), torch.randn(2, 10)))
    assert last.parts["fp16-mixed"].copies == 100 * 2 + 100 * 2


def test_modules_kept_in_fp32_keep_their_bytes():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    plan = Plan(weights="fp16", compute="fp16", fp32_modules=(KeptModule(pattern="1"),))
    parts = estimate(workload(model, torch.randn(2, 4)), plan).parts["plan"]
    assert (parts.weights, parts.master, parts.gradients) == (16 * 2 + 16 * 4, 16 * 2, 16 * 2 + 16 * 4)


def test_tied_weights_count_once_and_stay_tied():
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    parts = estimate(workload(nn.Sequential(first, second), torch.randn(2, 4))).parts["fp16-mixed"]
    assert (parts.weights, parts.copies) == (16 * 4, 16 * 2)


def test_cuda_lists_keep_softmax_in_fp32():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(8, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.proj(x).softmax(-1)

    work = workload(Attention(), torch.randn(4, 8), loss=lambda out: out.sum())
    saved = [run_forward(work, PLANS["fp16-mixed"], like_cuda=like).saved for like in (False, True)]
    # The cast batch, and softmax's output: 2 bytes each on a CPU, 4 on a GPU.
    assert saved == [4 * 8 * 2 + 4 * 8 * 2, 4 * 8 * 2 + 4 * 8 * 4]


# --- simulated and real ---


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.rnn = nn.LSTM(32, 16, batch_first=True)
        self.conv = nn.Conv1d(16, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.rnn(self.layer(self.embed(x)))[0].transpose(1, 2)).relu().mean(-1)


@pytest.mark.parametrize("plan", ["fp32", "fp16-mixed", "fp16-true"])
def test_a_simulated_pass_keeps_the_same_bytes_as_a_real_one(plan: str, monkeypatch: pytest.MonkeyPatch):
    work = workload(Model(), torch.randint(0, 50, (2, 12)))
    real = run_forward(work, PLANS[plan], like_cuda=True)
    monkeypatch.setattr(forward, "_SMALL", -1)
    simulated = run_forward(work, PLANS[plan], like_cuda=True)
    assert (real.simulated, simulated.simulated) == (False, True)
    assert (real.saved, real.copies) == (simulated.saved, simulated.copies)
    assert sum(g.multiply_adds for g in real.gemms) == sum(g.multiply_adds for g in simulated.gemms)


def test_a_model_that_looks_at_values_runs_for_real(monkeypatch: pytest.MonkeyPatch):
    class Picky(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x[x.sum(-1) > 0])

    monkeypatch.setattr(forward, "_SMALL", -1)
    assert not run_forward(workload(Picky(4, 4), torch.ones(2, 4)), PLANS["fp32"], like_cuda=False).simulated


def test_a_forward_pass_that_fails_is_told_and_the_rest_is_still_counted():
    class Masked(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).masked_fill(torch.ones(4, dtype=torch.bool), -1e9)

    memory = estimate(workload(Masked(4, 4), torch.randn(2, 4)))
    assert "without overflow" in memory.problems["fp16-mixed"]
    assert memory.parts["fp16-mixed"].activations is None
    assert memory.parts["fp16-mixed"].weights == 20 * 4
    # bf16 holds -1e9: its own pass is run.
    assert "bf16-mixed" not in memory.problems
    assert memory.parts["bf16-mixed"].activations is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_keeps_the_bytes_that_the_cpu_foretells():
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 32), nn.Softmax(-1))
    x = torch.randn(16, 64)
    for plan in (PLANS["fp32"], PLANS["fp16-mixed"], PLANS["bf16-mixed"]):
        foretold = run_forward(workload(model, x), plan, like_cuda=True)
        seen = run_forward(workload(model.cuda(), x.cuda()), plan, like_cuda=True)
        model.cpu()
        assert (foretold.saved, foretold.copies) == (seen.saved, seen.copies), plan.name


# --- matrix products ---


def test_matrix_products_are_read_with_their_sizes():
    model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(6 * 4, 5))
    done = run_forward(workload(model, torch.randn(2, 4, 4, 4)), PLANS["fp32"], like_cuda=False)
    assert done.gemms == (Gemm(m=2 * 2 * 2, n=3, k=2 * 9, batch=2), Gemm(m=2, n=5, k=24))
    assert not any(gemm.aligned for gemm in done.gemms)
    assert Gemm(8, 16, 24).aligned
    assert Gemm(8, 16, 24).multiply_adds == 8 * 16 * 24


# --- words ---


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 KB"), (1_237_581_744, "1.24 GB"), (None, "?"), (999_600, "1 MB")],
)
def test_bytes_for_people(count: int | None, text: str):
    assert format_bytes(count) == text


def test_a_make_optimizer_that_fails_or_lies_is_refused():
    def broken(_: Any) -> Any:
        raise RuntimeError("no")

    with pytest.raises(TargetError, match="make_optimizer failed: RuntimeError: no"):
        make_optimizer(workload(nn.Linear(2, 2), torch.ones(1, 2), make=broken))
    with pytest.raises(TargetError, match="make_optimizer returned a int"):
        make_optimizer(workload(nn.Linear(2, 2), torch.ones(1, 2), make=lambda _: 3))
