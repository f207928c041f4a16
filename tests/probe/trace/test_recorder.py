"""The recorder: the step stays the same bit for bit, and every operation says where it comes from."""

import gc
import inspect
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from tests.probe.trace.recorded_steps import Calculation, ops_named, same_bits, step, trace_of
from tests.slow import mostly_slow
from torch import nn
from torch.utils.checkpoint import checkpoint

from floatline.probe.trace.recorder import Recorder, _compare

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
SEQUENCE = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2))
IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3))
IDS = torch.arange(10).reshape(2, 5)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def linear():
    return nn.Linear(8, 8)


def overwrite(self, x):
    h = self.l(x).relu_().clone()
    h[:, 2:4].mul_(0.5)
    h[:, 0] = 3.0
    return h.add_(1.0)


def attend(self, x):
    q, k, v = (t.view(2, 5, 2, 4).transpose(1, 2) for t in self.l(x).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attend_masked(self, x):
    q = self.l(x)
    scores = q @ q.mT
    return scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -math.inf).softmax(-1) @ q


STEPS = {
    "in place": (lambda: Calculation(overwrite, l=linear()), X),
    "custom function": (lambda: Calculation(lambda s, x: Square.apply(s.l(x)), l=linear()), X),
    "checkpoint": (lambda: Calculation(lambda s, x: checkpoint(s.l, x, use_reentrant=False), l=linear()), X),
    "dropout": (lambda: nn.Sequential(linear(), nn.Dropout(0.5), linear()), X),
    "embedding": (lambda: nn.Sequential(nn.Embedding(10, 8), nn.LayerNorm(8)), IDS),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)), IMAGE),
    "attention": (lambda: Calculation(attend, l=nn.Linear(8, 24)), SEQUENCE),
    "mask": (lambda: Calculation(attend_masked, l=linear()), SEQUENCE),
    "gru": (lambda: Calculation(lambda s, x: s.r(x)[0], r=nn.GRU(8, 6)), SEQUENCE),
    "out": (lambda: Calculation(lambda s, x: s.l(x) * torch.add(x, 1, out=torch.empty_like(x)), l=linear()), X),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed", "fp16-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", mostly_slow(STEPS, every=3))
def test_a_step_is_bit_for_bit_the_same_with_and_without_the_recorder(name, precision):
    make, x = STEPS[name]
    options = {"precision": precision, "optimizer": OPTIMIZERS["foreach"], "micro_batches": 2}
    loss, weights, _ = step(make, x, record=False, **options)
    recorded_loss, recorded_weights, recorder = step(make, x, **options)
    assert same_bits([loss, *weights], [recorded_loss, *recorded_weights])
    assert recorder.trace.ops
    assert recorder.trace.meta["twin_failures"] == recorder.trace.meta["failures"] == {}


def test_the_comparison_above_can_fail():
    make, x = STEPS["conv"]
    _, weights, _ = step(make, x, record=False)
    _, others, _ = step(make, 1.001 * x, record=False)
    assert not same_bits(weights, others)


@pytest.mark.parametrize("name", STEPS)
def test_every_operation_has_a_line_of_the_users_code(name):
    make, x = STEPS[name]
    trace = trace_of(make, x, precision="fp16-mixed")
    assert [op.name for op in trace.ops if not op.line] == []
    assert {op.file.rpartition("/")[2] for op in trace.ops} <= {"test_recorder.py", "recorded_steps.py"}


def test_an_fp32_step_differs_nowhere_from_its_twin():
    make, x = STEPS["conv"]
    trace = trace_of(make, x, precision="fp32")
    errors = [v.error for op in trace.ops for v in op.outputs if v.dtype == "float32"]
    assert errors
    assert set(errors) == {0.0}


def test_a_half_step_differs_from_its_twin_by_about_the_rounding_of_half():
    make, x = STEPS["conv"]
    products = ops_named(trace_of(make, x), "aten.convolution")
    assert all(1e-5 < v.error < 2e-3 for op in products for v in op.outputs)


def test_operations_name_their_module_line_and_function():
    def forward(self, x):
        return self.inner(x) * 2.0

    outer = Calculation(forward, inner=nn.Sequential(linear(), nn.Tanh()))
    trace = trace_of(lambda: outer, X)
    line = inspect.getsourcelines(forward)[1] + 1
    (product,) = [op for op in ops_named(trace, "aten.mul", "forward") if 2.0 in op.scalars]
    assert (product.module, product.line, product.function.rpartition(".")[2]) == ("", line, "forward")
    assert ops_named(trace, "aten.addmm")[0].module == "inner.0"
    assert ops_named(trace, "aten.tanh")[0].module == "inner.1"


def test_backward_operations_point_to_the_forward_operation_and_its_line():
    trace = trace_of(lambda: nn.Sequential(linear(), nn.Tanh()), X)
    (tanh,) = ops_named(trace, "aten.tanh")
    (backward,) = ops_named(trace, "aten.tanh_backward")
    assert (backward.phase, backward.node, backward.forward) == ("backward", "TanhBackward0", tanh.index)
    assert (backward.module, backward.file, backward.line) == (tanh.module, tanh.file, tanh.line)


def test_a_backward_that_the_user_wrote_keeps_its_own_line():
    trace = trace_of(*STEPS["custom function"])
    lines, start = inspect.getsourcelines(Square.backward)
    inside = [op for op in trace.ops if op.phase == "backward" and op.line in range(start, start + len(lines))]
    assert [op.name for op in inside] == ["aten.mul", "aten.mul"]
    assert {op.node for op in inside} == {"SquareBackward"}
    assert {trace.ops[op.forward].name for op in inside} == {"aten.mul"}


def test_phases_are_told_apart():
    trace = trace_of(*STEPS["embedding"], precision="fp16-mixed", optimizer=OPTIMIZERS["foreach"])
    assert ops_named(trace, "aten.embedding")[0].phase == "forward"
    assert ops_named(trace, "aten.embedding_dense_backward")[0].phase == "backward"
    assert {op.phase for op in trace.ops if "addcdiv" in op.name} == {"update"}
    assert {op.phase for op in trace.ops if "_amp_" in op.name or "norm" in op.name} >= {"outside"}


def test_a_loss_without_gradient_before_backward_is_forward_and_an_average_after_it_is_outside():
    model = linear()
    with Recorder(model) as recorder:
        loss = model(X).mean()
        with torch.no_grad():
            weight = loss.abs()
        (weight * loss).backward()
        with torch.no_grad():
            model.weight.mul_(0.9)
    assert [op.phase for op in recorder.trace.ops if op.name in ("aten.abs", "aten.mul_")] == ["forward", "outside"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_runs_again_is_forward_and_marked(reentrant):
    def forward(self, x):
        return checkpoint(lambda h: torch.tanh(self.l(h)), self.first(x), use_reentrant=reentrant)

    trace = trace_of(lambda: Calculation(forward, l=linear(), first=linear()), X)
    assert [(op.phase, op.recomputed) for op in ops_named(trace, "aten.tanh")] == [
        ("forward", False),
        ("forward", True),
    ]
    assert [op.recomputed for op in ops_named(trace, "aten.tanh_backward")] == [False]


def test_operands_know_their_maker_their_role_and_the_constants():
    def forward(self, x):
        return x / ((x * x).view(-1, 8) + 1e-8)

    model = Calculation(forward)
    with Recorder(model, batch=((X,), ())) as recorder:
        model(X)
    square, guard, ratio = recorder.trace.ops
    assert [op.name for op in (square, guard, ratio)] == ["aten.mul", "aten.add", "aten.div"]
    assert [(o.role, o.shared, o.made_by) for o in square.inputs] == [("inputs[0]", True, None)] * 2
    assert guard.scalars == (1e-8,)
    assert guard.inputs[0].made_by == square.index  # through the view
    assert [(o.made_by, o.shared) for o in ratio.inputs] == [(None, False), (guard.index, False)]


def test_parameters_buffers_gradients_and_states_have_their_roles():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with Recorder(model, batch=((X,), ())) as recorder:
            model(X).pow(2).mean().backward()
            optimizer.step()
    roles = {o.role for op in recorder.trace.ops for o in op.inputs}
    expected = {"inputs[0]", "param:0.weight", "buffer:1.running_mean", "grad:0.weight", "state:0.weight.exp_avg"}
    assert expected <= roles


def test_gradients_are_kept_as_backward_left_them():
    trace = trace_of(lambda: nn.Sequential(linear()), X, precision="fp16-mixed")
    assert set(trace.gradients) == {"0.weight", "0.bias"}
    scaled = {o.role: o.value.largest for op in trace.ops if "unscale" in op.name for o in op.inputs}
    assert all(g.value.largest == scaled[f"grad:{name}"] for name, g in trace.gradients.items())


def test_an_operation_that_raises_is_the_last_and_has_no_outputs():
    model = Calculation(lambda s, x: x.masked_fill(x > 0, -1e9), unused=linear())
    recorder = Recorder(model)
    with pytest.raises(RuntimeError, match="without overflow"), recorder:
        model(X.half())
    last = recorder.trace.ops[-1]
    assert (last.name, last.outputs) == ("aten.masked_fill", [])
    assert recorder.trace.meta["exception"]["op"] == last.index


def test_a_tensor_that_cannot_be_measured_does_not_break_the_step(monkeypatch):
    def refuse(self, x, twin, *, exact):
        raise NotImplementedError

    monkeypatch.setattr("floatline.probe.trace.measures.Measures.measure", refuse)
    with Recorder(nn.Identity()) as recorder:
        y = X * 2.0
    assert torch.equal(y, X + X)
    assert recorder.trace.meta["failures"] == {"aten.mul": 2}


def test_sparse_gradients_can_be_recorded():
    model = nn.Embedding(10, 8, sparse=True).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model) as recorder:
        model(IDS).float().pow(2).mean().backward()
        optimizer.step()
    assert recorder.trace.meta["failures"] == {}
    assert recorder.trace.gradients["weight"].value.largest > 0


def test_modules_and_optimizers_have_no_hooks_left_after_the_step():
    from torch.nn.modules import module
    from torch.optim import optimizer

    hooks = (module._global_forward_hooks, module._global_forward_pre_hooks, optimizer._global_optimizer_pre_hooks)
    before = [len(h) for h in hooks]
    with Recorder(nn.Identity()):
        assert [len(h) for h in hooks] == [n + 1 for n in before]
    assert [len(h) for h in hooks] == before


def test_no_tensor_of_the_step_is_kept_alive():
    import gc

    from torch.multiprocessing.reductions import StorageWeakRef

    with Recorder(nn.Identity()):
        x = X.half() * 2
        memory = StorageWeakRef(x.untyped_storage())
        assert not memory.expired()
        del x
        gc.collect()
        assert memory.expired()


def test_without_twins_the_figures_of_the_step_remain():
    trace = trace_of(*STEPS["conv"], twins=False)
    values = [v for op in trace.ops for v in op.outputs]
    assert {v.error for v in values} == {None}
    assert max(v.largest for v in values) > 0


@pytest.mark.parametrize("of_python", [0, 375])
def test_the_garbage_collector_is_as_it_was_before_a_recording_also_after_one_that_raised(monkeypatch, of_python):
    """Python 3.12 begins with some frozen objects, and those are nobody's wish."""
    gc.unfreeze()
    monkeypatch.setattr(gc, "get_freeze_count", lambda count=gc.get_freeze_count: count() + of_python)
    model = nn.Linear(4, 2)
    with Recorder(model):
        assert gc.get_freeze_count() > 10_000
        with Recorder(model):  # the outer one lets go of it
            model(torch.ones(3, 4))
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == of_python
    with pytest.raises(ValueError, match="the user's"), Recorder(model):
        raise ValueError("the user's")
    assert gc.get_freeze_count() == of_python


def test_what_the_user_froze_stays_frozen():
    gc.freeze()
    try:
        with Recorder(nn.Linear(4, 2)):
            pass
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()


def test_gradients_are_compared_and_counted_by_exponent_as_python_counts_them():
    values = [0.0, 1.0, -1.5, 2.0**-149, 2.0**-148 * 1.5, 65504.0, -3.4e38, 2.0**-260, math.inf, math.nan, 5.0]
    twin = torch.tensor(values, dtype=torch.float64)
    own = twin.half().double()  # small ones are 0, and large ones inf
    bad, difference, norm, lost, nonzero, *counts = _compare(own, twin).tolist()
    fine = [(a, b) for a, b in zip(own.tolist(), values, strict=True) if math.isfinite(a) and math.isfinite(b)]
    assert bad == len(values) - len(fine) == 3
    assert (lost, nonzero) == (3, 7)
    assert difference == sum((a - b) ** 2 for a, b in fine)
    assert norm == sum(b**2 for _, b in fine)
    exponents = [max(math.frexp(b)[1] - 1, -200) for _, b in fine if b]
    assert {k: int(count) for k, count in enumerate(counts, -200) if count} == Counter(exponents)
