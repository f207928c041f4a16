"""Healthy training under a guard has the bits of the bare loop; a step that raises leaves nothing behind."""

import contextlib
import signal
import sys

import pytest
import torch
from tests.slow import mostly_slow, slow
from torch import nn

import floatline as fl
from floatline.plans import Plan, Scaling

OPTIMIZERS = {
    "SGD": lambda ps, **k: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=1e-3, **k),
    "Adam": lambda ps, **k: torch.optim.Adam(ps, lr=0.01, **k),
    "AdamW": lambda ps, **k: torch.optim.AdamW(ps, lr=0.01, **k),
    "Adagrad": lambda ps, **k: torch.optim.Adagrad(ps, lr=0.05, **k),
    "RMSprop": lambda ps, **k: torch.optim.RMSprop(ps, lr=0.01),
    "NAdam": lambda ps, **k: torch.optim.NAdam(ps, lr=0.01),
    "Rprop": lambda ps, **k: torch.optim.Rprop(ps, lr=0.01),
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
SCALING = {"init_scale": 2.0**8, "growth_interval": 20}
PLANS = {
    "fp32": "fp32",
    "bf16-mixed": "bf16-mixed",
    "fp16-mixed": Plan(name="own", weights="fp32", compute="fp16", scaling=Scaling(**SCALING)),
}


@pytest.fixture(autouse=True)
def fast_half():
    with fl.HalfOnCPU():
        yield


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))


def batches(num):
    dice = torch.Generator().manual_seed(1)
    for i in range(num):
        x = torch.randn(8, 6, generator=dice) * (30.0 if i % 11 == 10 else 1.0)  # now and then a harder one
        yield x, torch.randint(0, 3, (8,), generator=dice)


def bits(model):
    return torch.cat([t.detach().flatten().view(torch.uint8) for t in model.state_dict().values()])


def bare(name, precision, *, fused, num=60):
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters(), **({"fused": True} if fused else {}))
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16-mixed", **SCALING)
    dtype = {"fp16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(precision)
    for x, y in batches(num):
        context = torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext()
        with context:
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model


def guarded(name, precision, *, fused, num=60):
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters(), **({"fused": True} if fused else {}))
    guard = fl.Guard(model, optimizer, plan=PLANS[precision])
    for b in batches(num):
        assert guard.step(lambda b: nn.functional.cross_entropy(model(b[0]), b[1]), b).applied
    return model


@pytest.mark.parametrize("precision", PLANS)
@pytest.mark.parametrize("name", mostly_slow([*OPTIMIZERS, *(f"fused {name}" for name in FUSED)], every=3))
def test_a_run_without_faults_ends_with_the_bits_of_the_bare_loop(name, precision):
    fused, name = name.startswith("fused "), name.removeprefix("fused ")
    one, two = (run(name, precision, fused=fused) for run in (bare, guarded))
    assert torch.equal(bits(one), bits(two))


def in_parts(precision, num_parts, *, guard):
    """A run in which each batch comes as micro-batches."""
    model = make_model()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16-mixed", **SCALING)
    guard = fl.Guard(model, optimizer, plan=PLANS[precision]) if guard else None
    dtype = {"fp16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(precision)
    for x, y in batches(30):
        parts = list(zip(x.chunk(num_parts), y.chunk(num_parts), strict=True))
        if guard is not None:
            assert guard.step(lambda b: nn.functional.cross_entropy(model(b[0]), b[1]), *parts).applied
            continue
        for part in parts:
            with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
                loss = nn.functional.cross_entropy(model(part[0]), part[1])
            scaler.scale(loss / num_parts).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("num_parts", [2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_so_it_has_with_a_power_of_two_of_micro_batches(precision, num_parts):
    one, two = (in_parts(precision, num_parts, guard=guard) for guard in (False, True))
    assert torch.equal(bits(one), bits(two))


def test_in_fp16_a_loop_that_divides_each_loss_rounds_small_gradients_once_more():
    one, two = (in_parts("fp16-mixed", 4, guard=guard) for guard in (False, True))
    assert not torch.equal(bits(one), bits(two))
    for name, tensor in one.state_dict().items():
        assert torch.allclose(tensor, two.state_dict()[name], rtol=2e-3, atol=2e-3), name


def test_clipping_that_nobody_asked_for_would_show():
    one, two = bare("SGD", "fp32", fused=False), make_model()
    guard = fl.Guard(two, OPTIMIZERS["SGD"](two.parameters()), plan="fp32", clip_norm=1.0)
    for b in batches(60):
        guard.step(lambda b: nn.functional.cross_entropy(two(b[0]), b[1]), b)
    assert not torch.equal(bits(one), bits(two))


# Gradients of others.


@pytest.mark.parametrize("way", ["step", "backward"])
def test_gradients_that_another_guards_step_has_left_are_not_added(way):
    torch.manual_seed(0)
    makes, tells = nn.Linear(3, 4), nn.Linear(4, 1)
    guards = [fl.Guard(m, torch.optim.SGD(m.parameters(), lr=0.1), plan="fp32") for m in (makes, tells)]
    x, real = torch.randn(8, 3), torch.randn(8, 4)

    def take(guard, compute):
        if way == "step":
            return guard.step(lambda _: compute(), None)
        guard.backward(compute())
        return guard.update()

    take(guards[0], lambda: -tells(makes(x)).mean())
    assert tells.weight.grad is not None  # left by the other model's step
    alone = nn.Linear(4, 1)
    alone.load_state_dict(tells.state_dict())
    (alone(makes(x).detach()) - alone(real)).mean().backward()
    expected = torch.cat([p.grad.flatten() for p in alone.parameters()]).norm()
    outcome = take(guards[1], lambda: (tells(makes(x).detach()) - tells(real)).mean())
    assert outcome.grad_norm == pytest.approx(float(expected), rel=1e-6)


# Exceptions.


class Boom(BaseException):
    """What no code expects."""


def boom(*_):
    raise Boom


def make_guard(**options):
    model = make_model()
    guard = fl.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan="fp32", **options)
    return model, guard


def take(guard, model, b):
    return guard.step(lambda b: nn.functional.cross_entropy(model(b[0]), b[1]), b)


def in_backward(guard, model):
    return model[4].register_full_backward_hook(boom)


def before_the_update(guard, model):
    return guard.optimizer.register_step_pre_hook(boom)


def after_the_update(guard, model):
    return guard.optimizer.register_step_post_hook(boom)


@pytest.mark.parametrize(
    ("plant", "moves"), [(in_backward, False), (before_the_update, False), (after_the_update, True)]
)
def test_weights_ledger_and_attempts_agree_after_a_step_that_raises(tmp_path, plant, moves):
    model, guard = make_guard(folder=tmp_path)
    first, second, third = batches(3)
    take(guard, model, first)
    before = bits(model)
    handle = plant(guard, model)
    with pytest.raises(Boom):
        take(guard, model, second)
    handle.remove()
    assert torch.equal(bits(model), before) is not moves
    assert all(p.grad is None for p in model.parameters())
    outcome = take(guard, model, third)
    assert (outcome.attempt, guard.attempts) == (2 + moves, 2 + moves)
    guard.close()
    steps = fl.Ledger.read(tmp_path).applied
    assert len(steps) == 2 + moves


def test_a_norm_is_that_of_its_own_step_after_one_that_raised():
    model, guard = make_guard()
    first, second = batches(2)
    alone, other = make_guard()
    handle = before_the_update(guard, model)
    state = torch.get_rng_state()
    with pytest.raises(Boom):
        take(guard, model, first)
    handle.remove()
    torch.set_rng_state(state)
    expected = take(other, alone, second).grad_norm
    torch.set_rng_state(state)
    assert take(guard, model, second).grad_norm == expected


def test_a_learning_rate_that_is_refused_leaves_nothing_behind():
    model, guard = make_guard()
    guard.optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(fl.FloatlineError, match="learning rate"):
        take(guard, model, next(batches(1)))
    assert guard.attempts == 0
    assert all(p.grad is None for p in model.parameters())


def test_the_step_after_which_a_schedule_has_no_more_rates_is_in_the_ledger(tmp_path):
    model, guard = make_guard(folder=tmp_path)
    guard.scheduler(torch.optim.lr_scheduler.OneCycleLR(guard.optimizer, max_lr=0.1, total_steps=3))
    made = 0
    with pytest.raises(ValueError, match="step"):
        for b in batches(9):
            before = bits(model)
            take(guard, model, b)
            made += 1
    assert not torch.equal(bits(model), before)
    guard.close()
    assert len(fl.Ledger.read(tmp_path).applied) == made + 1 == guard.attempts


class Deaf:
    """A listener whose service is gone."""

    def begin(self, metadata):
        pass

    def take(self, record, account):
        raise Boom

    def close(self):
        pass


def test_a_step_that_a_listener_raises_over_is_in_the_ledger_and_advances_the_schedule(tmp_path):
    model, guard = make_guard(folder=tmp_path)
    rates = guard.scheduler(torch.optim.lr_scheduler.StepLR(guard.optimizer, step_size=1, gamma=0.5))
    guard.attach(Deaf())
    first, second = batches(2)
    for b in (first, second):
        with pytest.raises(Boom):
            take(guard, model, b)
    assert rates.last_epoch == 2
    guard.close()
    assert len(fl.Ledger.read(tmp_path).applied) == 2 == guard.attempts


def by_hand(guard, model, *some):
    for b in some:
        with guard.autocast():
            loss = nn.functional.cross_entropy(model(b[0]), b[1])
        guard.backward(loss)
    return guard.update()


def in_the_forward_pass(guard, model):
    return model[4].register_forward_hook(boom)


@pytest.mark.parametrize("plant", [in_the_forward_pass, in_backward])
def test_a_micro_batch_that_raises_in_a_loop_of_ones_own_leaves_nothing_of_its_step(plant):
    (model, guard), (other, alone) = make_guard(), make_guard()
    first, second, third = batches(3)
    for m, g in ((model, guard), (other, alone)):
        torch.manual_seed(1)
        by_hand(g, m, first)
    state, before = torch.get_rng_state(), bits(model)
    with guard.autocast():
        loss = nn.functional.cross_entropy(model(second[0]), second[1])
    guard.backward(loss)
    handle = plant(guard, model)
    with pytest.raises(Boom):
        by_hand(guard, model, third)
    handle.remove()
    assert torch.equal(bits(model), before)
    assert all(p.grad is None for p in model.parameters())
    outcomes = []
    for m, g in ((model, guard), (other, alone)):
        torch.set_rng_state(state)
        outcomes.append(by_hand(g, m, third))
    assert outcomes[0].micro_batches == 1
    assert outcomes[0].grad_norm == outcomes[1].grad_norm
    assert torch.equal(bits(model), bits(other))


def test_half_a_step_of_a_loop_that_was_interrupted_is_dropped_by_a_skip():
    (model, guard), (other, alone) = make_guard(), make_guard()
    first, second = batches(2)
    before = bits(model)
    with guard.autocast():
        loss = nn.functional.cross_entropy(model(first[0]), first[1])
    guard.backward(loss)  # and here Ctrl-C comes, in code of the user's
    assert guard.update(skip=True).reason == "requested"
    assert torch.equal(bits(model), before)
    for m, g in ((model, guard), (other, alone)):
        torch.manual_seed(1)
        assert by_hand(g, m, second).applied
    assert torch.equal(bits(model), bits(other))


@pytest.mark.parametrize("give", [lambda loss: loss.repeat(2), lambda loss: loss.detach(), lambda loss: "loss"])
def test_a_loss_that_is_refused_leaves_nothing_of_its_step(give):
    model, guard = make_guard()
    first, second = batches(2)
    guard.backward(nn.functional.cross_entropy(model(first[0]), first[1]))
    with pytest.raises(fl.FloatlineError):
        guard.backward(give(nn.functional.cross_entropy(model(second[0]), second[1])))
    assert all(p.grad is None for p in model.parameters())
    assert model[1].num_batches_tracked == 0


def test_weights_that_add_up_to_nothing_leave_nothing_of_the_step():
    model, guard = make_guard()
    with pytest.raises(fl.FloatlineError, match="add up to 0"):
        guard.step(lambda b: (nn.functional.cross_entropy(model(b[0]), b[1]), 0), next(batches(1)))
    assert all(p.grad is None for p in model.parameters())
    assert model[1].num_batches_tracked == 0


# Ctrl-C, wherever it comes.


class Presses:
    """Presses Ctrl-C before the n-th line of floatline's that is run."""

    def __init__(self, at):
        self.at, self.num = at, 0

    def __call__(self, frame, event, arg):
        if "/floatline/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.num += 1
            if self.num == self.at:
                signal.raise_signal(signal.SIGINT)
        return self


@contextlib.contextmanager
def pressing(at):
    presses, before = Presses(at), sys.gettrace()
    sys.settrace(presses)
    try:
        yield presses
    finally:
        sys.settrace(before)


def interrupted(folder, at, *, num=4, which=2):
    """A run of a few steps, one of them interrupted: what it leaves, and how many lines that step has."""
    model, guard = make_guard(folder=folder)
    heard = False
    for i, b in enumerate(batches(num)):
        torch.manual_seed(i)
        if i != which:
            take(guard, model, b)
            continue
        with contextlib.suppress(KeyboardInterrupt):
            with pressing(at) as presses:
                take(guard, model, b)
            heard = True
        assert all(p.grad is None for p in model.parameters())
    guard.close()
    applied = fl.Ledger.read(folder).applied
    assert applied == [True] * guard.attempts
    return bits(model), guard.attempts, presses.num, not heard


def without(*left_out, num=4):
    model, guard = make_guard()
    for i, b in enumerate(batches(num)):
        torch.manual_seed(i)
        if i not in left_out:
            take(guard, model, b)
    return bits(model)


def check_interrupts(folder, share):
    whole, less = without(), without(2)
    num = interrupted(folder / "none", 0)[2]
    found = set()
    for at in range(1, num, max(1, int(num * share))):
        left, attempts, _, heard = interrupted(folder / str(at), at)
        assert heard, at
        assert torch.equal(left, whole if attempts == 4 else less), at
        found.add(attempts)
    assert found == {3, 4}  # the step was made, or it was not


def test_ctrl_c_finds_a_step_made_or_not_begun(tmp_path):
    check_interrupts(tmp_path, 0.07)


@slow
def test_ctrl_c_finds_it_so_before_many_lines(tmp_path):
    check_interrupts(tmp_path, 0.005)


def test_a_run_without_the_wait_would_be_torn_apart(tmp_path, monkeypatch):
    for name in ("__enter__", "__exit__"):
        monkeypatch.setattr(f"floatline.base.interrupts.Undisturbed.{name}", lambda *_: None)
    with pytest.raises(AssertionError):
        check_interrupts(tmp_path, 0.02)
