"""A captured step, run again: the same bits as it was, in any precision, and nothing of the run is touched."""

import copy
import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import floatline as fl
from floatline.errors import GuardError, ReplayError
from floatline.probe.steps.capture import capture_step
from floatline.probe.steps.replayed import compare_steps


class Net(nn.Module):
    """Dropout, batch norm, a plain counter, a list, a tensor in no buffer, and noise of all generators."""

    def __init__(self, *, noise=True):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(16, 4)
        self.noise = noise
        self.calls = 0
        self.seen = []
        self.mean = torch.zeros(16)
        self.own = torch.Generator().manual_seed(3)

    def forward(self, x):
        self.calls += 1
        x = self.norm(self.first(x))
        self.seen.append(self.calls)
        self.mean.mul_(0.9).add_(x.detach().float().mean(0), alpha=0.1)
        if self.noise:
            x = x * (1 + 0.1 * random.random() + 0.1 * float(numpy.random.rand()))
        return self.last(self.drop(F.relu(x)))


class Loop:
    """A plain loop with a GradScaler in FP16 autocast."""

    def __init__(self, *, make=torch.optim.AdamW, clip=None, model=None):
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        self.model = model or Net()
        self.optimizer = make(self.model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        self.clip = clip
        self.generator = torch.Generator().manual_seed(1)

    def batch(self):
        x = torch.randn(32, 8, generator=self.generator)
        return x, x[:, :4].argmax(1)

    def compute_loss(self, batch):
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def step(self, batch):
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = self.compute_loss(batch)
        self.scaler.scale(loss).backward()
        raw = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item(), raw

    def capture(self, batch, **options):
        plan = fl.Plan.model_validate({**MIXED, **({"clip": {"max_norm": self.clip}} if self.clip else {})})
        return capture_step(
            self.model, self.optimizer, self.compute_loss, batch, plan=plan, scaler=self.scaler, **options
        )


MIXED = {"weights": "fp32", "compute": "fp16", "scaling": {}}


@pytest.fixture(autouse=True)
def _half():
    with fl.HalfOnCPU():
        yield


@pytest.fixture
def loop():
    made = Loop()
    for _ in range(3):
        made.step(made.batch())
    return made


def state_of(model, optimizer):
    """Everything that a replay must leave as it is, tensors as bits and as places in memory."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if hasattr(model, "mean"):
        tensors["mean"] = model.mean
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "bits": {name: tensor.detach().clone() for name, tensor in tensors.items()},
        "places": {name: (id(tensor), tensor.data_ptr(), tensor._version) for name, tensor in tensors.items()},
        "grads": {name: (id(p.grad), None if p.grad is None else p.grad.clone()) for name, p in tensors.items()},
        "states": copy.deepcopy(states),
        "flags": {
            name: (m.training, len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m))
            for name, m in model.named_modules()
        },
        "plain": (getattr(model, "calls", 0), list(getattr(model, "seen", []))),
        "own": model.own.get_state() if hasattr(model, "own") else None,
        "random": (random.getstate(), str(numpy.random.get_state()), torch.get_rng_state()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_grad_enabled()),
    }


def tensors_of(model):
    return {name: p.detach() for name, p in model.named_parameters()} | dict(model.named_buffers())


def assert_same(a, b, place="state"):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), place
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), place
        for key in a:
            assert_same(a[key], b[key], f"{place}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), place
        for number, (one, other) in enumerate(zip(a, b, strict=True)):
            assert_same(one, other, f"{place}[{number}]")
    else:
        assert a == b, place


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, fl.optim.AdamW])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_replay_as_it_was_gives_the_bits_of_the_step(make, clip):
    loop = Loop(make=make, clip=clip)
    for _ in range(3):
        loop.step(loop.batch())
    batch = loop.batch()
    step = loop.capture(batch)
    loss, raw = loop.step(batch)
    again = step.replay(update=True)
    assert again.loss == loss
    assert_same(raw, again.raw)
    if make is fl.optim.AdamW and clip:  # it clips inside, in another order of operations
        for name, p in loop.model.named_parameters():
            torch.testing.assert_close(again.after[name], p.detach())
        return
    assert_same(
        {n: p.detach() for n, p in loop.model.named_parameters()} | dict(loop.model.named_buffers()), again.after
    )


def test_the_check_above_can_fail(loop):
    batch = loop.batch()
    step = loop.capture(batch)
    torch.rand(1)  # other random numbers
    _, raw = loop.step(batch)
    assert not torch.equal(raw["last.weight"], step.replay().raw["last.weight"])


def test_a_second_replay_gives_the_same_bits(loop):
    step = loop.capture(loop.batch())
    first, again = step.replay(update=True), step.replay(update=True)
    assert first.loss == again.loss
    assert_same(first.raw, again.raw)
    assert_same(first.after, again.after)


def test_micro_batches_give_the_bits_of_a_guarded_step():
    torch.manual_seed(0)
    model = Net(noise=False)
    optimizer = fl.optim.AdamW(model.parameters(), lr=1e-2)
    guard = fl.Guard(model, optimizer, plan="fp16-mixed", clip_norm=float("inf"))

    def compute_loss(batch):
        return F.cross_entropy(model(batch[0]).float(), batch[1]), len(batch[0])

    batches = [(torch.randn(n, 8), torch.randint(4, (n,))) for n in (8, 24, 16)]
    guard.step(compute_loss, *batches)
    scale = float(guard.run.judge.scale)
    plan = guard.plan.model_copy(update={"clip": None})
    step = capture_step(model, optimizer, compute_loss, *batches, plan=plan, scale=scale)
    outcome = guard.step(compute_loss, *batches)
    again = step.replay(update=True)
    assert again.loss == outcome.loss
    assert_same(tensors_of(model), again.after)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"precision": "fp32"},
        {"precision": "bf16"},
        {"precision": "fp16", "scale": 8.0},
        {"islands": ["first"]},
        {"trace": True},
        {"update": True},
    ],
)
def test_the_run_is_not_touched(loop, how):
    loop.compute_loss(loop.batch()).backward()  # gradients that are under way
    loop.model.norm.eval()
    step = loop.capture(loop.batch())
    before = state_of(loop.model, loop.optimizer)
    step.replay(**how)
    assert_same(before, state_of(loop.model, loop.optimizer))


@pytest.mark.parametrize("how", [{}, {"trace": True}, {"precision": "fp32", "islands": ["first"]}])
def test_the_run_is_not_touched_by_a_replay_that_raises(loop, how):
    def fail(batch):
        loss = loop.compute_loss(batch)
        loss.backward()
        loop.model.register_buffer("late", torch.zeros(3))
        loop.model.first.weight.requires_grad_(False)
        loop.model.eval()
        raise RuntimeError("in the middle")

    step = capture_step(loop.model, loop.optimizer, fail, loop.batch(), plan="fp16-mixed", scale=8.0)
    before = state_of(loop.model, loop.optimizer)
    with pytest.raises(RuntimeError, match="in the middle"):
        step.replay(**how)
    assert_same(before, state_of(loop.model, loop.optimizer))
    assert loop.model.first.weight.requires_grad


def test_the_checks_above_can_fail(loop):
    before = state_of(loop.model, loop.optimizer)
    loop.compute_loss(loop.batch())
    with pytest.raises(AssertionError):
        assert_same(before, state_of(loop.model, loop.optimizer))


def test_a_graph_that_is_under_way_can_still_go_backward(loop):
    batch = loop.batch()
    loss = loop.compute_loss(batch)
    loop.capture(batch).replay(update=True)
    loss.backward()
    assert loop.model.first.weight.grad is not None


def test_later_steps_of_the_run_do_not_change_the_captured_one(loop):
    step = loop.capture(loop.batch())
    first = step.replay()
    for _ in range(3):
        loop.step(loop.batch())
    assert_same(first.raw, step.replay().raw)


def test_fp32_is_the_step_without_autocast_and_without_a_scale(loop):
    loop.model.noise = False
    batch = loop.batch()
    step = loop.capture(batch)
    wide = step.replay(precision="fp32")
    loop.optimizer.zero_grad()
    loss = loop.compute_loss(batch)
    loss.backward()
    assert wide.scale == 1.0
    assert wide.loss == loss.item()
    assert_same({n: p.grad for n, p in loop.model.named_parameters()}, wide.raw)


def test_precisions_differ_as_their_formats_do():
    # A smooth model: a ReLU near 0 that flips in BF16 makes an error of any size.
    loop = Loop(model=nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
    step = loop.capture(loop.batch())
    wide = step.replay(precision="fp32")
    errors = {p: compare_steps(step.replay(precision=p), wide).whole.largest_error for p in ("fp16", "bf16")}
    assert 0 < errors["fp16"] < errors["bf16"] < 0.1


def test_a_bf16_step_can_be_tried_in_fp16():
    model = nn.Linear(4, 1)
    x = torch.full((2, 4), 300.0)
    options = {"plan": "bf16-mixed"}
    step = capture_step(
        model, None, lambda b: (model(b).to(torch.bfloat16) * 300).square().mean().float(), x, **options
    )
    assert step.replay().finite
    assert not step.replay(precision="fp16").finite


def test_weights_of_16_bits_are_widened_for_fp32():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).half()
    x = torch.randn(4, 8).half()
    step = capture_step(model, None, lambda b: model(b).float().mean() * 1e-6, x, plan="fp16-true")
    narrow, wide = step.replay(), step.replay(precision="fp32")
    assert {g.dtype for g in wide.raw.values()} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert compare_steps(narrow, wide).parameters["0.weight"].lost > 0


def test_a_scale_that_is_too_large_overflows_and_another_does_not(loop):
    step = loop.capture(loop.batch())
    assert step.replay(scale=1.0).finite
    assert not step.replay(scale=2.0**24).finite


def test_a_module_in_fp32_fixes_an_overflow_in_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    with torch.no_grad():
        model[1].weight.mul_(1e6)
    step = capture_step(model, None, lambda b: model(b).float().square().mean(), torch.randn(4, 8), plan="fp16-mixed")
    assert not step.replay().finite
    assert step.replay(islands=["1"]).finite
    assert not step.replay(islands=["0"]).finite


def test_a_trace_names_operations_of_the_step(loop):
    trace = loop.capture(loop.batch()).replay(trace=True).trace
    assert {"first", "last", "norm"} <= {op.module for op in trace.ops}
    assert {op.phase for op in trace.ops} >= {"forward", "backward"}
    assert "isfinite" not in {op.name for op in trace.ops}
    assert trace.gradients.keys() == dict(loop.model.named_parameters()).keys()
    assert any(op.file == __file__ for op in trace.ops)


def test_a_step_with_nan_is_skipped_by_a_scaler_and_made_without_one(loop):
    x, y = loop.batch()
    x[0] = float("nan")
    skipped = loop.capture((x, y)).replay(update=True)
    assert not skipped.finite
    assert all(not update.any() for update in skipped.updates.values())
    loop.scaler = torch.amp.GradScaler("cpu", enabled=False)
    made = loop.capture((x, y)).replay(update=True)
    assert any(update.isnan().any() for update in made.updates.values())


def test_trained_tensors_outside_the_model_are_replayed_and_not_touched():
    model, weight = nn.Linear(4, 1), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), weight], lr=0.5)
    step = capture_step(model, optimizer, lambda b: (model(b) * weight).mean(), torch.ones(2, 4), plan="fp32")
    again = step.replay(update=True)
    name = next(name for name in again.raw if name.startswith("optimizer["))
    torch.testing.assert_close(again.updates[name], -0.5 * again.raw[name])
    assert weight == 1.0
    assert weight.grad is None


def test_what_cannot_be_replayed_is_refused(loop):
    batch = loop.batch()
    step = loop.capture(batch)
    with pytest.raises(ReplayError, match="Precision 'fp8' is not known"):
        step.replay(precision="fp8")
    with pytest.raises(ReplayError, match="Give a number above 0"):
        step.replay(scale=0.0)
    with pytest.raises(GuardError, match=r"no module 'firts'.*'first'"):
        step.replay(islands=["firts"])
    with pytest.raises(ReplayError, match="without a batch"):
        capture_step(loop.model, loop.optimizer, loop.compute_loss)
    for without in (
        capture_step(loop.model, None, loop.compute_loss, batch),
        loop.capture(batch, keep_optimizer=False),
    ):
        with pytest.raises(ReplayError, match="captured without its optimizer"):
            without.replay(update=True)


def test_agreement_of_gradients_is_what_its_numbers_say():
    model = nn.Linear(2, 1, bias=False)
    x = torch.tensor([[3.0, 4.0]])

    def replay_of(values):
        step = capture_step(model, None, lambda _: (model(x) * 0).sum() + (model.weight * values).sum(), x, plan="fp32")
        return step.replay(scale=4.0)

    one, other = replay_of(torch.tensor([[0.0, 4.0]])), replay_of(torch.tensor([[3.0, 4.0]]))
    found = compare_steps(one, other).whole
    assert found.cosine == pytest.approx(16 / (4 * 5))
    assert found.norm_ratio == pytest.approx(4 / 5)
    assert (found.lost, found.numel) == (1, 2)
    assert found.largest_error == pytest.approx(3 / 4)
    assert other.gradient_norm == pytest.approx(5.0)
    broken = replay_of(torch.tensor([[float("inf"), 1.0]]))
    assert str(compare_steps(broken, other).worst[1].cosine) == "nan"


class Tied(nn.Module):
    """Tied weights, a recurrent layer, parametrizations that write buffers, and a checkpointed segment."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.memory = nn.LSTM(8, 8, batch_first=True)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        x = self.memory(self.tokens(x))[0]
        x = checkpoint(lambda h: F.dropout(torch.tanh(self.spectral(h)), 0.2), x, use_reentrant=False)
        return self.head(self.weighted(x))


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("compiled", [False, True])
def test_models_of_many_kinds_are_replayed_exactly(compiled):
    torch.manual_seed(0)
    model = Tied() if not compiled else Net(noise=False)
    called = torch.compile(model, backend="eager") if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(32, 8) if compiled else torch.randint(11, (4, 6))

    def compute_loss(batch):
        return called(batch).float().square().mean()

    def make_step():
        optimizer.zero_grad()
        loss = compute_loss(x)
        loss.backward()
        optimizer.step()
        return loss.item()

    make_step()
    step = capture_step(called, optimizer, compute_loss, x, plan="fp32")
    before = state_of(model, optimizer)
    again, traced = step.replay(update=True), step.replay(trace=True)
    assert_same(before, state_of(model, optimizer))
    assert make_step() == again.loss == traced.loss
    assert_same(tensors_of(model), again.after)
    assert len(traced.trace.ops) > 20


def test_a_model_that_is_spread_over_processes_is_refused():
    class Spread(nn.Linear):
        def no_sync(self):
            raise NotImplementedError

    model = Spread(2, 1)
    with pytest.raises(ReplayError, match="Spread is spread over processes"):
        capture_step(model, None, lambda b: model(b).mean(), torch.ones(1, 2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("how", [{}, {"precision": "fp32"}, {"trace": True}, {"update": True}])
def test_on_a_gpu_a_replay_is_exact_and_leaves_the_run_alone(how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.3), nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    x = torch.randn(32, 64, device="cuda")

    def compute_loss(batch):
        return model(batch).float().square().mean()

    def make_step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = compute_loss(x)
        scaler.scale(loss).backward()
        raw = {name: p.grad.clone() for name, p in model.named_parameters()}
        scaler.step(optimizer)
        scaler.update()
        return loss.item(), raw

    for _ in range(3):
        make_step()
    optimizer.zero_grad(set_to_none=True)
    step = capture_step(model, optimizer, compute_loss, x, plan="fp16-mixed", scaler=scaler)
    before, device_random = state_of(model, optimizer), torch.cuda.get_rng_state()
    again = step.replay(**how)
    assert_same(before, state_of(model, optimizer))
    assert torch.equal(device_random, torch.cuda.get_rng_state())
    loss, raw = make_step()
    if how.get("precision"):
        return
    assert again.loss == loss
    assert_same(raw, again.raw)
    if how.get("update"):
        assert_same(tensors_of(model), again.after)
