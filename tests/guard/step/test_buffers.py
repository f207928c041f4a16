"""A skipped step leaves a model's buffers as they were: every bit of every buffer, however the step is made."""

import contextlib
import math
import threading

import pytest
import torch
from torch import nn

import floatline as fl
from floatline.guard.step.buffers import Buffers, _Holding

KINDS = {
    "plain": lambda ps: torch.optim.SGD(ps, lr=0.01),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "floatline": lambda ps: fl.optim.AdamW(ps, lr=0.01),
}


class Tracker(nn.Module):
    """Buffers of all kinds: replaced by another tensor, counted, one that grows, one that never changes, None."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int32))
        self.register_buffer("queue", torch.zeros(0, 8), persistent=False)
        self.register_buffer("mask", torch.ones(8, dtype=torch.bool))
        self.register_buffer("later", None)

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.count += 1
            self.queue = torch.cat([self.queue, x.detach()[:1]])
            self.later = self.mean * 2
        return torch.where(self.mask, x, 0.0) - 0.01 * self.mean


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), Tracker(), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        nn.ReLU(), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 1),
    )  # fmt: skip


def batch(number, *, bad=False):
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))
    return (x * math.nan if bad else x), x.sum(1, keepdim=True)


def buffers_of(model):
    return {name: None if b is None else b.clone() for name, b in all_buffers(model)}


def all_buffers(model):
    return [(f"{p}.{n}", b) for p, m in model.named_modules() for n, b in m._buffers.items()]


def equal(one, two):
    return one.keys() == two.keys() and all(
        (a is None) == (two[n] is None) and (a is None or (a.shape == two[n].shape and torch.equal(a, two[n])))
        for n, a in one.items()
    )


def loss_of(model):
    return lambda b: (model(b[0]) - b[1]).square().mean()


def by_step(guard, model, *batches):
    return guard.step(loss_of(model), *batches)


def by_backward(guard, model, *batches):
    for b in batches:
        with guard.autocast():
            loss = loss_of(model)(b)
        guard.backward(loss)
    return guard.update()


@pytest.mark.parametrize("make_step", [by_step, by_backward])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("good", [0, 1, 3])
def test_a_batch_of_nan_changes_no_buffer(kind, make_step, good):
    model = make_model()
    guard = fl.Guard(model, KINDS[kind](model.parameters()), plan="fp32")
    for number in range(good):
        assert make_step(guard, model, batch(number)).applied
    before = buffers_of(model)
    assert not make_step(guard, model, batch(9), batch(8, bad=True)).applied
    assert equal(buffers_of(model), before)
    assert make_step(guard, model, batch(7)).applied
    assert not equal(buffers_of(model), before)
    assert all(b is None or b.isfinite().all() for b in buffers_of(model).values())


def test_without_it_running_statistics_would_be_nan_for_good(monkeypatch):
    monkeypatch.setattr(Buffers, "settle", lambda self, applied: setattr(self, "_slots", None))
    model = make_model()
    guard = fl.Guard(model, KINDS["plain"](model.parameters()), plan="fp32")
    for number in range(20):
        guard.step(loss_of(model), batch(number, bad=number == 3))
    assert model[1].running_mean.isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_skips_has_the_buffers_of_one_without_these_batches(kind):
    found = []
    for bad in ([], [0, 4, 5, 11]):
        model = make_model()
        guard = fl.Guard(model, KINDS[kind](model.parameters()), plan="fp32")
        for number in range(12):
            for _ in range(1 + (number in bad)):
                wrong = number in bad and guard.attempts == number + bad.index(number)
                guard.step(loss_of(model), batch(number, bad=wrong))
        found.append(buffers_of(model) | {n: p.detach() for n, p in model.named_parameters()})
    assert equal(*found)


def test_a_step_left_out_on_request_changes_no_buffer():
    model = make_model()
    guard = fl.Guard(model, KINDS["plain"](model.parameters()), plan="fp32")
    guard.step(loss_of(model), batch(0))
    before = buffers_of(model)
    assert guard.step(loss_of(model), batch(1), skip=True).reason == "requested"
    assert equal(buffers_of(model), before)


def test_what_others_write_between_steps_stays():
    model = make_model()
    guard = fl.Guard(model, KINDS["plain"](model.parameters()), plan="fp32")
    by_backward(guard, model, batch(0))
    model[1].running_mean.fill_(5.0)
    model.eval()(batch(1)[0])
    model.train()
    by_backward(guard, model, batch(2, bad=True))
    assert model[1].running_mean.eq(5.0).all()


def test_buffers_that_begin_to_change_when_modules_are_switched_to_training_go_back():
    model = make_model()
    model[1].eval()
    guard = fl.Guard(model, KINDS["plain"](model.parameters()), plan="fp32")
    for number in range(3):
        guard.step(loss_of(model), batch(number))
    model[1].train()
    guard.step(loss_of(model), batch(4, bad=True))
    assert model[1].running_mean.eq(0.0).all()


def test_a_compiled_models_buffers_go_back():
    model = make_model()[:2]
    compiled = torch.compile(model, backend="eager")
    guard = fl.Guard(compiled, KINDS["plain"](compiled.parameters()), plan="fp32")
    for number in range(4):
        guard.step(lambda b: compiled(b[0]).square().mean(), batch(number, bad=number == 2))
    assert model[1].running_mean.isfinite().all()
    assert model[1].num_batches_tracked == 3


class Own(nn.Module):
    """An average of its own inputs, which is made or moved in the way that a test asks for."""

    def __init__(self, way):
        super().__init__()
        self.calls, self.way = 0, way
        if way != "first of all":
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
        if way not in ("first of all", "first of its kind"):
            self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("mask", torch.ones(8)) if way == "written as it is" else None

    def forward(self, x):
        self.calls += 1
        if not hasattr(self, "mean"):
            self.register_buffer("mean", x.detach().mean(0))
        elif (self.way == "later" and self.calls < 3) or (self.way == "now and then" and self.calls % 3 != 2):
            return x
        elif self.way == "by a sum":
            self.mean = torch.lerp(self.mean, x.detach().mean(0), 0.1)
        elif self.way == "written as it is":
            self.mask.copy_(self.mask)
            return x
        else:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


def own_run(way, bad, make_step, *, num=8):
    """A run in which some batches come once as NaN before they come as they are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Own(way), nn.Linear(8, 1))
    guard = fl.Guard(model, KINDS["plain"](model.parameters()), plan="fp32")
    for number in range(num):
        if number in bad:
            assert not make_step(guard, model, batch(number, bad=True)).applied
            model[1].calls -= 1
        assert make_step(guard, model, batch(number)).applied
    return buffers_of(model) | {n: p.detach() for n, p in model.named_parameters()}, guard


@pytest.mark.parametrize("make_step", [by_step, by_backward])
@pytest.mark.parametrize(
    ("way", "bad"),
    [
        ("first of all", [0]), ("first of all", [5]), ("first of its kind", [0]), ("first of its kind", [4]),
        ("later", [4]), ("now and then", [4]), ("now and then", [7]), ("by a sum", [0, 3]),
    ],
)  # fmt: skip
def test_buffers_that_are_made_or_moved_late_go_back_too(way, bad, make_step):
    found, expected = (own_run(way, some, make_step)[0] for some in (bad, []))
    assert equal(found, expected)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3,)])
def test_an_equal_tensor_is_another_one(shape):
    model = nn.Module()
    model.register_buffer("mean", torch.ones(shape))
    holding = _Holding([model])
    assert holding.is_same()
    model.mean = model.mean.clone()
    assert not holding.is_same()
    assert holding.written() == [model]


def test_buffers_that_are_written_as_they_are_are_looked_at_once_and_not_kept():
    found, guard = own_run("written as it is", [], by_step)
    assert found["1.mask"].eq(1).all()
    assert guard._buffers.tensors == ()
    assert not guard._buffers._looks


def test_what_is_written_between_steps_is_not_taken_for_a_steps_doing():
    model = nn.Sequential(nn.Linear(4, 1))
    model.register_buffer("table", torch.zeros(100, 100))
    guard = fl.Guard(model, KINDS["plain"](model.parameters()), plan="fp32")
    for number in range(4):
        guard.step(loss_of(model), batch(number))
        model.table.add_(1)
    assert guard._buffers.tensors == ()


def test_buffers_that_the_user_makes_before_the_first_step_stay_where_it_is_skipped():
    model = nn.Sequential(nn.Linear(4, 1))
    guard = fl.Guard(model, KINDS["plain"](model.parameters()), plan="fp32")
    model.register_buffer("table", torch.ones(3))
    assert not guard.step(loss_of(model), batch(0, bad=True)).applied
    assert model.table.eq(1).all()


def test_a_model_that_compiles_itself_is_put_back_where_the_loop_says_when_a_step_begins():
    model = make_model()[:2]
    model.compile(backend="eager")
    guard = fl.Guard(model, KINDS["plain"](model.parameters()), plan="fp32")
    for number in range(4):
        by_backward(guard, model, (batch(number, bad=number == 2)[0], torch.zeros(16, 8)))
    assert model[1].running_mean.isfinite().all()
    assert model[1].num_batches_tracked == 3


def test_nothing_is_kept_of_buffers_that_no_step_changes():
    model = nn.Sequential(nn.Linear(4, 1))
    model.register_buffer("table", torch.zeros(1000, 1000))
    guard = fl.Guard(model, KINDS["plain"](model.parameters()), plan="fp32")
    for number in range(3):
        guard.step(loss_of(model), batch(number))
    assert guard._buffers._kept.blocks == []


def test_a_step_that_raises_changes_no_buffer():
    model = make_model()
    guard = fl.Guard(model, KINDS["plain"](model.parameters()), plan="fp32")
    guard.step(loss_of(model), batch(0))
    before = buffers_of(model)

    def fail(b):
        loss_of(model)(b)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guard.step(fail, batch(1))
    assert equal(buffers_of(model), before)


class Counter(nn.Module):
    """Counts its forward passes, those in evaluation among them, in one buffer in place and in one that is new."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.seen += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


def run_with_replays(replays, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Counter(), nn.Dropout(0.2), nn.Linear(8, 1))
    guard = fl.Guard(model, KINDS["plain"](model.parameters()), plan="fp32", **options)
    for number in range(25):
        assert guard.step(loss_of(model), batch(number)).applied
        if replays:
            assert guard.replay(loss_of(model), batch(number)).isfinite()
    return buffers_of(model) | {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("replays", [False, True])
def test_replays_of_a_canary_and_of_ones_own_leave_what_they_write_to_buffers_as_it_was(replays):
    assert equal(run_with_replays(replays, policy=fl.Policy(snapshot_gib=1.0)), run_with_replays(False))


def test_without_putting_back_replays_would_move_buffers_and_with_them_the_run(monkeypatch):
    monkeypatch.setattr("floatline.guard.responses.untouched", lambda model: contextlib.nullcontext())
    assert not equal(run_with_replays(False, policy=fl.Policy(snapshot_gib=1.0)), run_with_replays(False))


def adversaries(norm, *bad, make_step, num=6):
    """Two guards by turns; the first step runs through the second model, with batches of NaN among its own."""
    torch.manual_seed(0)
    makes = nn.Sequential(nn.Linear(4, 8), *([nn.BatchNorm1d(8)] if norm else []))
    tells = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    guards = [fl.Guard(m, KINDS["plain"](m.parameters()), plan="fp32") for m in (makes, tells)]

    def take(guard, compute, x):
        if make_step is by_step:
            return guard.step(compute, x)
        with guard.autocast():
            loss = compute(x)
        guard.backward(loss)
        return guard.update()

    for number in range(num):
        for wrong in [True, False] if number in bad else [False]:
            outcome = take(guards[0], lambda x: -tells(makes(x)).mean(), batch(number, bad=wrong)[0])
            assert outcome.applied is not wrong
        x = batch(50 + number)[0]
        assert take(
            guards[1], lambda x: (tells(makes(x).detach()) - tells(makes(x).detach() + 1)).tanh().mean(), x
        ).applied
    return buffers_of(nn.ModuleList([makes, tells]))


@pytest.mark.parametrize("make_step", [by_step, by_backward])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("bad", [0, 1, 4])
def test_what_a_skipped_step_changes_in_another_guards_model_goes_back_too(make_step, norm, bad):
    expected = adversaries(norm, make_step=make_step)
    assert equal(adversaries(norm, bad, make_step=make_step), expected)


def test_without_guests_the_other_model_would_keep_its_nan(monkeypatch):
    monkeypatch.setattr("floatline.guard.step.buffers._STEPS", threading.local())
    monkeypatch.setattr(Buffers, "keep", lambda self, again=False: self._keep(again=again))
    assert adversaries(True, 4, make_step=by_step)["1.1.running_mean"].isnan().any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["fused", "floatline"])
def test_on_a_gpu_buffers_go_back_without_a_host_read(kind):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).cuda()
    guard = fl.Guard(model, KINDS[kind](model.parameters()), plan="fp32", policy=fl.Policy(read_after=64))
    batches = [tuple(t.cuda() for t in batch(i, bad=i in (5, 6))) for i in range(12)]
    for b in batches[:4]:
        guard.step(loss_of(model), b)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for b in batches[4:]:
            guard.step(loss_of(model), b)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert model[1].running_mean.isfinite().all()
    assert int(model[1].num_batches_tracked) == 10
