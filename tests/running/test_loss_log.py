"""The losses of a script, one line for each step."""

import contextlib
import json

import pytest
import torch
from tests.running.by_hand import batches, fp16_plan, small_model
from torch.nn import functional as F

from floatline.diagnosis.gaps import Shown
from floatline.plans.presets import PLANS
from floatline.probe.watch.patches import Patches
from floatline.running.loss_log import EnoughSteps, LossLog
from floatline.running.plan_in_force import plan_in_force


@pytest.fixture
def logged(tmp_path):
    """Runs a loop, and gives its lines and what it returned."""

    def run(loop, plan=None, most=None):
        path = tmp_path / "log"
        path.unlink(missing_ok=True)
        log, patches = LossLog(path, most=most), Patches()
        log.patch(patches)
        try:
            with plan_in_force(plan or fp16_plan(), log.step):
                returned = loop()
        except EnoughSteps:
            returned = "ended"
        finally:
            patches.undo()
            log.end()
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()], returned

    return run


def loop(num=20, parts=1, closure=False, bad=None):
    model = small_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number, (x, y) in enumerate(batches(num)):

        def compute(x=x, y=y, bad=number == bad):
            opt.zero_grad()
            total = 0.0
            for _ in range(parts):
                loss = F.mse_loss(model(x), y) / parts
                (loss * float("inf") if bad else loss).backward()
                total += loss.item()
                loss.detach().zero_()  # the script goes on with its loss
            losses.append(total)

        if closure:
            opt.step(compute)
        else:
            compute()
            opt.step()
    return losses


@pytest.mark.parametrize("plan", ["fp32", "fp16-mixed", "bf16-true"])
@pytest.mark.parametrize("closure", [False, True])
def test_losses_are_those_that_the_script_computes(logged, plan, closure):
    lines, losses = logged(lambda: loop(closure=closure), PLANS[plan])
    assert [line["step"] for line in lines] == list(range(20))
    assert [line["loss"] for line in lines] == losses


def scale_by_hand(first, micro_batches=1):
    def run():
        model, factor, losses = small_model(), first, []
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in batches(6):
            loss = F.mse_loss(model(x), y)
            losses.append(loss.item())
            (loss * factor / micro_batches).backward()
            for p in model.parameters():
                p.grad /= factor
            opt.step()
            opt.zero_grad()
            factor *= 0.7
        return losses

    return run


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_loss_scale_by_hand_is_taken_out(logged, micro_batches):
    lines, losses = logged(scale_by_hand(2.0**12, micro_batches), PLANS["fp32"])
    assert [line["loss"] * micro_batches for line in lines] == pytest.approx(losses)


@pytest.mark.parametrize("weight", [1000.0, 4.0])
def test_a_weight_of_the_loss_is_not(logged, weight):
    lines, losses = logged(scale_by_hand(weight), PLANS["fp32"])
    assert lines[0]["loss"] == pytest.approx(weight * losses[0])
    assert lines[1]["loss"] == pytest.approx(0.7 * weight * losses[1])


def test_parts_of_a_step_are_added_up(logged):
    lines, losses = logged(lambda: loop(parts=2))
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-6)
    assert [line["loss"] for line in lines] != pytest.approx([loss / 2 for loss in losses], rel=1e-2)


def loop_by_hand(num=20, extra=0, rate=0.1):
    """An optimizer is made, and the weights are updated without it; then it makes some steps, if any."""
    model = small_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in batches(num):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for weight in model.parameters():
                weight -= rate * weight.grad
                weight.grad = None
    for _ in range(extra):
        opt.step()
    return losses


def test_every_pass_is_a_step_where_an_optimizer_is_made_and_never_steps(logged):
    lines, losses = logged(loop_by_hand, PLANS["fp32"])
    assert [line["loss"] for line in lines] == losses
    lines, _ = logged(lambda: loop_by_hand(extra=1), PLANS["fp32"])  # the twin: all that went backward is one step's
    assert [line["loss"] for line in lines] == pytest.approx([sum(losses)])


def test_passes_that_move_no_weight_are_no_steps(logged):
    assert logged(lambda: loop_by_hand(rate=0.0), PLANS["fp32"])[0] == []


def test_a_script_that_steps_by_hand_is_ended_after_enough_passes(logged):
    lines, returned = logged(loop_by_hand, PLANS["fp32"], most=7)
    assert (len(lines), returned) == (7, "ended")


def test_a_step_that_was_left_out_is_told(logged):
    lines, _ = logged(lambda: loop(num=5, bad=3))
    assert [line["applied"] for line in lines] == [True, True, True, False, True]


def test_a_script_is_ended_after_as_many_steps_as_were_asked_for(logged):
    lines, returned = logged(loop, most=7)
    assert len(lines) == 7
    assert returned == "ended"
    assert len(logged(loop, most=30)[0]) == 20


def test_only_the_first_optimizer_counts(logged):
    def two():
        models = small_model(), small_model(1)
        opts = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        firsts = []
        for x, y in batches(4):
            for model, opt in zip(models, opts, strict=True):
                opt.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                opt.step()
                if model is models[0]:
                    firsts.append(loss.item())
        return firsts

    lines, firsts = logged(two)
    assert [line["loss"] for line in lines] == firsts


def test_a_step_without_a_loss_has_none(logged):
    def bare():
        p = torch.nn.Parameter(torch.ones(2))
        p.grad = torch.ones(2)
        torch.optim.SGD([p], lr=0.1).step()

    assert logged(bare)[0] == [{"step": 0, "loss": None, "applied": True}]


def test_the_search_is_what_each_optimizer_left_out_in_the_first_half(tmp_path):
    made = {0: [False, False, True, False, True, True, True, True, False, True], 1: [True] * 9 + [False], 2: [False]}
    opts = [torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1) for _ in made]
    log, short = LossLog(tmp_path / "log"), LossLog(tmp_path / "short", most=6, ends=False)
    for step in range(10):
        for number, applied in made.items():
            if step < len(applied):
                log.step(opts[number], applied[step])
                short.step(opts[number], applied[step])
    assert log.search == [[0, 1, 3], [], []]
    assert short.search == [[0, 1], [], []]  # of the six steps that are compared


def by_grad(num=5, penalty=False, attack=False):
    """Updates by torch.autograd.grad, from an iterator of weights."""
    model = small_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in batches(num):
        if attack:
            delta = torch.zeros_like(x, requires_grad=True)
            torch.autograd.grad(F.mse_loss(model(x + delta), y), delta)
        loss = F.mse_loss(model(x), y)
        if penalty:
            grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            loss = loss + 0.1 * sum(g.pow(2).sum() for g in grads)
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
            p.grad = g
        opt.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("extra", [{}, {"penalty": True}, {"attack": True}])
def test_a_loss_whose_gradient_is_taken_by_autograd_grad_is_heard_and_penalties_and_attacks_are_not(logged, extra):
    lines, losses = logged(lambda: by_grad(**extra), PLANS["fp32"])
    assert [line["loss"] for line in lines] == losses


def test_the_time_before_the_first_pass_is_kept(tmp_path):
    log, patches = LossLog(tmp_path / "log"), Patches()
    log.patch(patches)
    try:
        assert log.start_seconds is None
        loop(1)
        first = log.start_seconds
        loop(1)
    finally:
        patches.undo()
        log.end()
    assert first is not None and first > 0
    assert log.start_seconds == first


@pytest.mark.parametrize("plan", [None, "fp32", "bf16-mixed"])
def test_each_call_of_a_closure_is_a_step_with_a_plan_and_without(tmp_path, plan):
    """A run under a plan is held against one without: both must count the same."""
    model, closures = small_model(), []
    x, y = batches(1)[0]
    log, patches = LossLog(tmp_path / "log"), Patches()
    with contextlib.ExitStack() as stack:
        if plan is None:
            stack.callback(log.patch_bare(patches))
        else:
            log.patch(patches)
            stack.enter_context(plan_in_force(PLANS[plan], log.step))
        opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

        def closure():
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            closures.append(loss.item())
            return loss

        for _ in range(3):
            opt.step(closure)
    patches.undo()
    log.end()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text("utf-8").splitlines()]
    assert [line["loss"] for line in lines] == closures
    assert len(closures) > 3


@pytest.mark.parametrize("most", [None, 7, 99])
@pytest.mark.parametrize("mark", [None, 5, 30])
def test_sizes_of_weights_are_those_after_a_mark_and_where_the_log_ends(tmp_path, most, mark):
    log = LossLog(tmp_path / "log", most=most, ends=False, measures=True, mark=mark)
    patches, norms = Patches(), []
    remove = log.patch_bare(patches)
    model = small_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(20):
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        norms.append([p.norm().item() for p in model.parameters()])
        opt.step()
    norms.append([p.norm().item() for p in model.parameters()])
    remove()
    patches.undo()
    log.end()
    shown = Shown.read(tmp_path / "log", tmp_path / "none")
    end = min(most or 20, 20)
    assert len(shown.losses) == end
    assert set(shown.sizes) == {end} | ({5} if mark == 5 else set())
    for after, sizes in shown.sizes.items():
        assert sizes == pytest.approx(norms[after], rel=1e-6)
        assert sizes != pytest.approx(norms[after - 1], rel=1e-4)
