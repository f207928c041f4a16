"""Loop faults: each is named at its line, and its healthy twin is left in peace."""

import copy
import inspect
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from floatline.diagnosis.detectors.exceptions import find_exceptions
from floatline.diagnosis.detectors.loop import find_loop_faults
from floatline.probe.runs.runs import run_target
from floatline.workload import Target

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(7))
Y = X[:, :1] * 2 - X[:, 1:2]


class Setup:
    """A small regression with autocast, scaler and SGD."""

    def __init__(self, lr=0.05, **scaling):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr)
        self.scaler = torch.amp.GradScaler("cpu", **scaling)

    def loss(self, x=X, y=Y):
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.model(x)
        return (out.float() - y).pow(2).mean()


def find(train):
    target = Target("loop", None, train, Path())
    given, fp32 = run_target(target), run_target(target, precision="fp32")
    return find_exceptions(given, fp32) + find_loop_faults(given, fp32)


def causes(train):
    return [finding.cause.id for finding in find(train)]


def line_of(train, text):
    """Line in this file of the only line of a function that holds a text."""
    lines, first = inspect.getsourcelines(train)
    (number,) = [first + index for index, line in enumerate(lines) if text in line]
    return number


def assert_names(train, cause, mark="# here"):
    found = find(train)
    assert [finding.cause.id for finding in found] == [cause]
    assert (Path(found[0].file).name, found[0].line) == ("test_loop.py", line_of(train, mark))
    assert found[0].seen and found[0].fix
    return found[0]


# --- clipping ---------------------------------------------------------------------------------------


def clip_scaled(steps=6):
    s = Setup()
    for _ in range(steps):
        s.optimizer.zero_grad()
        s.scaler.scale(s.loss()).backward()
        clip_grad_norm_(s.model.parameters(), 0.5)  # here
        s.scaler.step(s.optimizer)
        s.scaler.update()


def clip_by_value(steps=6):
    s = Setup()
    for _ in range(steps):
        s.optimizer.zero_grad()
        s.scaler.scale(s.loss()).backward()
        clip_grad_value_(s.model.parameters(), 0.5)  # here
        s.scaler.step(s.optimizer)
        s.scaler.update()


def clip_by_hand(steps=6):
    s = Setup()
    for _ in range(steps):
        s.optimizer.zero_grad()
        s.scaler.scale(s.loss()).backward()
        for p in s.model.parameters():
            p.grad.data.clamp_(-1, 1)  # here
        s.scaler.step(s.optimizer)
        s.scaler.update()


def clip_unscaled(steps=6):
    s = Setup()
    for _ in range(steps):
        s.optimizer.zero_grad()
        s.scaler.scale(s.loss()).backward()
        s.scaler.unscale_(s.optimizer)
        clip_grad_norm_(s.model.parameters(), 0.5)
        s.scaler.step(s.optimizer)
        s.scaler.update()


def clip_with_a_scaled_limit(steps=6):
    s = Setup()
    for _ in range(steps):
        s.optimizer.zero_grad()
        s.scaler.scale(s.loss()).backward()
        clip_grad_norm_(s.model.parameters(), 0.5 * s.scaler.get_scale())
        s.scaler.step(s.optimizer)
        s.scaler.update()


def log_a_scaled_norm(steps=6):
    s = Setup()
    for _ in range(steps):
        s.optimizer.zero_grad()
        s.scaler.scale(s.loss()).backward()
        sum(p.grad.norm() ** 2 for p in s.model.parameters())
        s.scaler.step(s.optimizer)
        s.scaler.update()


@pytest.mark.parametrize("train", [clip_scaled, clip_by_value, clip_by_hand])
def test_clipping_scaled_gradients_is_named(train):
    assert_names(train, "clip-before-unscale")


@pytest.mark.parametrize("train", [clip_unscaled, clip_with_a_scaled_limit, log_a_scaled_norm])
def test_clipping_that_knows_the_scale_is_fine(train):
    assert causes(train) == []


# --- misuse of the scaler ---------------------------------------------------------------------------


def step_directly(steps=6):
    s = Setup()
    for _ in range(steps):
        s.optimizer.zero_grad()
        s.scaler.scale(s.loss()).backward()
        s.optimizer.step()  # here


def unscale_by_hand(steps=6, init_scale=2.0**10):
    s = Setup(init_scale=init_scale)
    for _ in range(steps):
        s.optimizer.zero_grad()
        s.scaler.scale(s.loss()).backward()
        for p in s.model.parameters():
            p.grad = p.grad / s.scaler.get_scale()
        clip_grad_norm_(s.model.parameters(), 0.5)
        s.optimizer.step()


def unscale_each_micro_batch(steps=4):
    s = Setup()
    for _ in range(steps):
        s.optimizer.zero_grad()
        for part in range(4):
            s.scaler.scale(s.loss(X[part::4], Y[part::4]) / 4).backward()
            s.scaler.unscale_(s.optimizer)  # here
            s.scaler.update()
        s.optimizer.step()


def unscale_before_the_last_micro_batch(steps=4):
    s = Setup()
    for _ in range(steps):
        s.optimizer.zero_grad()
        s.scaler.scale(s.loss(X[:8], Y[:8]) / 2).backward()
        s.scaler.unscale_(s.optimizer)  # here
        s.scaler.scale(s.loss(X[8:], Y[8:]) / 2).backward()
        s.scaler.step(s.optimizer)
        s.scaler.update()


def backward_of_the_unscaled_loss(steps=6):
    s = Setup()
    for _ in range(steps):
        s.optimizer.zero_grad()
        loss = s.loss()
        s.scaler.scale(loss)
        loss.backward()  # here
        s.scaler.step(s.optimizer)
        s.scaler.update()


def forget_update(steps=6):
    s = Setup()
    for _ in range(steps):
        s.optimizer.zero_grad()
        s.scaler.scale(s.loss()).backward()
        s.scaler.step(s.optimizer)  # here


def clear_before_the_step(steps=6):
    s = Setup()
    for _ in range(steps):
        s.scaler.scale(s.loss()).backward()
        s.optimizer.zero_grad()  # here
        s.scaler.step(s.optimizer)
        s.scaler.update()


def accumulate_well(steps=4):
    s = Setup()
    for _ in range(steps):
        for part in range(4):
            (s.scaler.scale(s.loss(X[part::4], Y[part::4])) / 4).backward()
        s.scaler.unscale_(s.optimizer)
        s.scaler.step(s.optimizer)
        s.scaler.update()
        for p in s.model.parameters():
            p.grad.zero_()


@pytest.mark.parametrize(
    "train",
    [
        step_directly,
        unscale_each_micro_batch,
        unscale_before_the_last_micro_batch,
        backward_of_the_unscaled_loss,
        forget_update,
        clear_before_the_step,
    ],
)
def test_wrong_calls_of_the_scaler_are_named(train):
    assert_names(train, "scaler-misuse")


def unscale_overflow_by_hand():
    unscale_by_hand(init_scale=2.0**24)


@pytest.mark.parametrize("train", [unscale_by_hand, unscale_overflow_by_hand, accumulate_well])
def test_unusual_but_right_calls_are_fine(train):
    assert causes(train) == []


# --- the scale over time ----------------------------------------------------------------------------


def resume(keep, steps=8):
    state = None
    for _ in range(3):
        s = Setup(1e-6)
        if state:
            s.model.load_state_dict(state["model"])
            if keep:
                s.scaler.load_state_dict(state["scaler"])
        for _ in range(steps):
            s.optimizer.zero_grad()
            s.scaler.scale(s.loss() * 4000).backward()
            s.scaler.step(s.optimizer)
            s.scaler.update()
        state = {"model": copy.deepcopy(s.model.state_dict()), "scaler": s.scaler.state_dict() if keep else None}


def resume_without_the_scaler():
    resume(keep=False)


def resume_with_the_scaler():
    resume(keep=True)


def folds_of_a_cross_validation(steps=8):
    start = copy.deepcopy(Setup().model.state_dict())
    for _ in range(3):
        s = Setup(1e-6)
        s.model.load_state_dict(start)
        for _ in range(steps):
            s.optimizer.zero_grad()
            s.scaler.scale(s.loss() * 4000).backward()
            s.scaler.step(s.optimizer)
            s.scaler.update()


def new_scaler_each_epoch(steps=8):
    s = Setup(1e-6)
    for _ in range(3):
        scaler = torch.amp.GradScaler("cpu")  # here
        for _ in range(steps):
            s.optimizer.zero_grad()
            scaler.scale(s.loss() * 4000).backward()
            scaler.step(s.optimizer)
            scaler.update()


def new_scaler_after_loading(steps=8):
    s, scaler = Setup(1e-6), torch.amp.GradScaler("cpu")
    for _ in range(3):
        for _ in range(steps):
            s.optimizer.zero_grad()
            scaler.scale(s.loss() * 4000).backward()
            scaler.step(s.optimizer)
            scaler.update()
        state = {"model": copy.deepcopy(s.model.state_dict()), "scaler": scaler.state_dict()}
        s.model.load_state_dict(state["model"])
        scaler = torch.amp.GradScaler("cpu")  # here


def test_a_scale_that_is_not_resumed_is_named():
    found = find(resume_without_the_scaler)
    assert [finding.cause.id for finding in found] == ["scaler-state-lost"]
    assert found[0].line == line_of(resume, "state_dict() if keep")
    assert_names(new_scaler_each_epoch, "scaler-state-lost")
    assert_names(new_scaler_after_loading, "scaler-state-lost")


def test_a_scale_that_is_resumed_is_fine_and_so_is_a_new_training():
    assert causes(resume_with_the_scaler) == []
    assert causes(folds_of_a_cross_validation) == []


def schedule(steps, init_scale, guard=False):
    s = Setup(init_scale=init_scale)
    scheduler = torch.optim.lr_scheduler.LinearLR(s.optimizer, 1.0, 0.0, total_iters=16)
    for _ in range(steps):
        before = s.scaler.get_scale()
        s.optimizer.zero_grad()
        s.scaler.scale(s.loss()).backward()
        s.scaler.step(s.optimizer)
        s.scaler.update()
        if not guard or s.scaler.get_scale() >= before:
            scheduler.step()  # here


def schedule_runs_ahead():
    schedule(40, 2.0**34)


def schedule_waits():
    schedule(40, 2.0**34, guard=True)


def few_skips_in_a_schedule():
    schedule(40, 2.0**18)


def two_schedules():
    s = Setup(init_scale=2.0**34)
    slow = torch.optim.lr_scheduler.LinearLR(s.optimizer, 1.0, 0.5, total_iters=400)
    quick = torch.optim.lr_scheduler.LinearLR(s.optimizer, 1.0, 0.01, total_iters=8)
    for _ in range(40):
        s.optimizer.zero_grad()
        s.scaler.scale(s.loss()).backward()
        s.scaler.step(s.optimizer)
        s.scaler.update()
        slow.step()
        quick.step()  # this one


def test_of_two_schedules_that_outrun_the_steps_the_one_that_moves_the_rate_is_named():
    (finding,) = find(two_schedules)
    assert finding.line == line_of(two_schedules, "# this one")
    assert "80 scheduler steps" in finding.seen


def test_a_schedule_that_outruns_the_steps_is_named():
    (finding,) = find(schedule_runs_ahead)
    assert finding.cause.id == "scheduler-vs-skipped-step"
    assert finding.line == line_of(schedule, "# here")


@pytest.mark.parametrize("train", [schedule_waits, few_skips_in_a_schedule])
def test_a_schedule_that_waits_or_loses_little_is_fine(train):
    assert causes(train) == []


# --- penalties and autocast -------------------------------------------------------------------------


def penalty(divide, steps=6):
    s = Setup()
    for _ in range(steps):
        s.optimizer.zero_grad()
        x = X.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.float16):
            out = s.model(x).sum()
        (grad,) = torch.autograd.grad(s.scaler.scale(out), x, create_graph=True)  # here
        if divide:
            grad = grad / s.scaler.get_scale()
        loss = s.loss() + (grad.float().norm(dim=1) - 1).pow(2).mean()
        s.scaler.scale(loss).backward()
        s.scaler.step(s.optimizer)
        s.scaler.update()


def penalty_of_scaled_gradients():
    penalty(divide=False)


def penalty_of_true_gradients():
    penalty(divide=True)


def test_a_penalty_of_scaled_gradients_is_named():
    (finding,) = find(penalty_of_scaled_gradients)
    assert finding.cause.id == "scaled-grad-in-penalty"
    assert finding.line == line_of(penalty, "# here")


def test_a_penalty_of_true_gradients_is_fine():
    assert causes(penalty_of_true_gradients) == []


def step_inside_autocast(steps=20):
    s = Setup(enabled=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(steps):
            s.optimizer.zero_grad()
            loss = (s.model(X).float() - Y).pow(2).mean()
            loss.backward()
            s.optimizer.step()  # here


def step_outside_autocast(steps=20):
    s = Setup(enabled=False)
    for _ in range(steps):
        s.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (s.model(X).float() - Y).pow(2).mean()
        loss.backward()
        s.optimizer.step()


def test_a_step_inside_autocast_is_named():
    finding = assert_names(step_inside_autocast, "autocast-region-misuse")
    assert "19 of 19 losses repeat" in finding.seen


def test_a_step_outside_autocast_is_fine():
    assert causes(step_outside_autocast) == []


class Island(nn.Module):
    def __init__(self, *, cast):
        super().__init__()
        self.body, self.head, self.cast = nn.Linear(4, 8), nn.Linear(8, 1), cast

    def forward(self, x):
        x = self.body(x)
        with torch.autocast("cpu", enabled=False):
            return self.head(x.float() if self.cast else x)


def island_without_cast(cast=False):
    model = Island(cast=cast)
    with torch.autocast("cpu", dtype=torch.float16):
        model(X).mean().backward()


def island_with_cast():
    island_without_cast(cast=True)


def buffer_of_another_dtype():
    model = nn.Linear(4, 8).half()
    model(X).mean().backward()  # here


def slogdet_in_half():
    weight = nn.Parameter(torch.eye(4))
    with torch.autocast("cpu", dtype=torch.float16):
        torch.linalg.slogdet(weight @ weight)[1].backward()  # here


def large_constant():
    model = nn.Linear(4, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        model(X).masked_fill(torch.ones(16, 8) > 0, -1e9).mean().backward()  # here


def test_two_dtypes_in_a_disabled_region_are_named_by_module():
    (finding,) = find(island_without_cast)
    assert (finding.cause.id, finding.module, finding.op) == ("autocast-region-misuse", "head", "aten.addmm")
    assert causes(island_with_cast) == []


def test_exceptions_are_named_at_their_line():
    # In FP32 the cast to half does not happen, so this is a fault of precision.
    assert_names(buffer_of_another_dtype, "dtype-mismatch")
    assert assert_names(slogdet_in_half, "unsupported-half-op").op == "torch.linalg.slogdet"
    assert assert_names(large_constant, "scalar-out-of-range").op == "aten.masked_fill"


def test_an_exception_that_fp32_raises_too_is_no_fault_of_precision():
    def wrong_shapes():
        nn.Linear(3, 1)(X).mean().backward()

    assert causes(wrong_shapes) == []


# --- FP16 parameters --------------------------------------------------------------------------------


def half_weights(cast=False, steps=3):
    s = Setup()
    s.model[2].half()  # here
    if cast:
        s.model[2].float()
    for _ in range(steps):
        s.optimizer.zero_grad()
        s.scaler.scale(s.loss()).backward()
        s.scaler.step(s.optimizer)
        s.scaler.update()


def float_weights():
    half_weights(cast=True)


def test_half_weights_with_a_scaler_are_named():
    assert assert_names(half_weights, "fp16-params-with-scaler").module == "2.weight"


def test_float_weights_with_a_scaler_are_fine():
    assert causes(float_weights) == []


# --- what is not trained ----------------------------------------------------------------------------


def train_plainly(model, optimizer, steps=12, x=X, y=Y):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - y).pow(2).mean()
        loss.backward()
        optimizer.step()


def head_replaced():
    s = Setup(enabled=False)
    s.model[2] = nn.Linear(8, 1)
    train_plainly(s.model, s.optimizer)


class Listed(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = kind([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def layers_in_a_list(kind=list):
    torch.manual_seed(0)
    model = Listed(kind)
    train_plainly(model, torch.optim.SGD(model.parameters(), 0.05))


def layers_in_a_module_list():
    layers_in_a_list(nn.ModuleList)


class Moved(nn.Module):
    """`nn.Parameter(x).to("cuda")` as a CPU can have it: on the device that it is on already, `.to` changes nothing."""

    def __init__(self, *, first):
        super().__init__()
        ones = torch.ones(4)
        self.scale = nn.Parameter(ones.double().float()) if first else nn.Parameter(ones).double().float()
        self.out = nn.Linear(4, 1)
        self.doubled = self.out.bias * 2  # of a parameter that is trained

    def forward(self, x):
        self.result = self.out(x * self.scale)
        return self.result


def parameter_that_was_moved(first=False):
    torch.manual_seed(0)
    model = Moved(first=first)
    train_plainly(model, torch.optim.SGD(model.parameters(), 0.05))


class TwoHeads(nn.Module):
    def __init__(self, *, detach):
        super().__init__()
        self.a, self.b, self.detach = nn.Linear(4, 1), nn.Linear(4, 1), detach

    def forward(self, x):
        b = self.b(x)
        return self.a(x) + (b.detach() if self.detach else b)


def two_optimizers(scaled, detach=True, steps=4):
    torch.manual_seed(0)
    model = TwoHeads(detach=detach)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    optimizers = [torch.optim.SGD(head.parameters(), 0.05) for head in (model.a, model.b)]
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale((model(X) - Y).pow(2).mean()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()


def only_the_head_is_trained():
    s = Setup(enabled=False)
    train_plainly(s.model, torch.optim.SGD(s.model[2].parameters(), 0.05))


def fixed_points_with_gradients():
    s = Setup(enabled=False)
    train_plainly(s.model, s.optimizer, x=X.clone().requires_grad_())


def test_an_optimizer_that_holds_an_old_head_is_named():
    (finding,) = find(head_replaced)
    assert (finding.cause.id, finding.module) == ("params-not-trained", "2")


def test_layers_that_the_model_does_not_know_are_named():
    (finding,) = find(layers_in_a_list)
    assert (finding.cause.id, finding.module) == ("params-not-trained", "layers")


def test_what_to_makes_of_a_parameter_is_named():
    (finding,) = find(parameter_that_was_moved)
    assert (finding.cause.id, finding.module) == ("params-not-trained", "scale")
    assert "torch.nn.Parameter(x.to(device))" in finding.fix


@pytest.mark.parametrize("scaled", [True, False])
def test_an_optimizer_without_gradients_is_named(scaled):
    (finding,) = find(lambda: two_optimizers(scaled))
    assert (finding.cause.id, finding.module) == ("params-not-trained", "b")
    assert finding.cause.family == "not-precision"


@pytest.mark.parametrize(
    "train",
    [
        layers_in_a_module_list,
        lambda: parameter_that_was_moved(first=True),
        only_the_head_is_trained,
        fixed_points_with_gradients,
        lambda: two_optimizers(scaled=True, detach=False),
    ],
)
def test_training_a_part_on_purpose_is_fine(train):
    assert causes(train) == []


# --- data -------------------------------------------------------------------------------------------


def workload(bad, loss_fn=nn.functional.mse_loss, model=None):
    def build():
        batches = [((X.clone(),), (Y.clone(),)) for _ in range(3)]
        bad(batches)
        return model or nn.Linear(4, 1), batches, loss_fn, "fp16-mixed", lambda m: torch.optim.SGD(m.parameters(), 0.01)

    return Target("data", build, None, Path())


def find_in_data(target):
    given, fp32 = run_target(target, steps=6), run_target(target, steps=6, precision="fp32")
    return [(finding.cause.id, finding.module) for finding in find_loop_faults(given, fp32)]


def spoil_input(batches):
    batches[1][0][0][3, 2] = float("nan")


def spoil_target(batches):
    batches[2][1][0][5] = float("inf")


def leave_labels_out(batches):
    batches[1][1][0][4:8] = float("nan")


def masked_loss(out, y):
    known = ~y.isnan()
    return (out[known] - y[known]).pow(2).mean()


def test_a_bad_batch_is_named_by_batch_and_tensor():
    assert find_in_data(workload(spoil_input)) == [("bad-input-data", "batches[1].inputs[0]")]
    assert find_in_data(workload(spoil_target)) == [("bad-input-data", "batches[2].targets[0]")]


def test_nan_that_the_loss_leaves_out_is_fine():
    assert find_in_data(workload(leave_labels_out, masked_loss)) == []
    assert find_in_data(workload(lambda batches: None)) == []


def test_a_bad_input_of_a_training_function_is_named():
    def train():
        s = Setup(enabled=False)
        for step in range(6):
            x = X.clone()
            x[0, 0] = float("nan") if step == 3 else 0.0
            s.optimizer.zero_grad()
            (s.model(x) - Y).pow(2).mean().backward()  # here
            s.optimizer.step()

    assert_names(train, "bad-input-data")
