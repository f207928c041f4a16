"""Whole scripts whose numbers arrive late, as from a GPU: what fails is known a step afterwards, and explained."""

import math

import pytest
import torch
from tests.cases.both_ways import diagnose_as_script, write_script
from tests.cases.harness import all_cases
from tests.diagnosis.scripts.test_scripts import line_of, observe, observe_script

from floatline.probe.scripts.steps import StepCapture
from floatline.probe.scripts.weight_copies import LateSteps
from floatline.probe.watch.events import LoopEvent
from floatline.probe.watch.health import LateHealth, LateNumbers, ScaledLoss
from floatline.probe.watch.loop import Watch


@pytest.fixture(autouse=True)
def far(monkeypatch):
    for module in ("health", "scaler_calls", "steps"):
        monkeypatch.setattr(f"floatline.probe.watch.{module}.is_far", lambda tensor: True)


@pytest.mark.parametrize(
    ("name", "cause", "code"),
    [
        ("late_exp", "exp-overflow", "torch.exp(heights)"),
        ("late_product", "product-overflow", ".square()"),
        ("always_skipped", "product-overflow", "(h * h)"),
        ("large_rate", "optimization-divergence", "torch.optim.SGD("),
        ("nan_batch", "bad-input-data", "guess = model(row)"),
    ],
)
def test_a_failure_that_is_known_late_is_named_at_its_line(name, cause, code):
    first = observe_script(name)["findings"][0]
    assert first["cause"] == cause, first
    assert code in line_of(first), first


@pytest.mark.parametrize("name", ["037_adam_on_half_weights", "039_adagrad_ctr_half"])
def test_an_update_that_spoils_16_bit_weights_is_told_when_it_comes_again(name, tmp_path):
    case = next(case for case in all_cases() if case.name == name)
    said = diagnose_as_script(write_script(case, tmp_path))
    assert (said.verdict, said.cause) == ("precision", "optimizer-state-underflow"), said


@pytest.mark.parametrize("name", ["healthy_mixed", "healthy_gan", "healthy_bf16_weights"])
def test_a_healthy_script_is_left_in_peace(name):
    answer = observe_script(name)
    assert (answer["findings"], answer["unexplained"]) == ([], "")


LOOP = """
import torch
from torch import nn
torch.manual_seed(0)
body, head = nn.Linear(8, 8), nn.Linear(8, 1)
opts = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (body, head)]
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=SCALED)
for step in range(50):
    for opt in opts:
        opt.zero_grad()
    x = torch.randn(4, 8)
    loss = head(body(x)).square().mean()
    if step >= BAD:
        loss = loss + (head.weight.sum() * 0 + HIGH).log()
    scaler.scale(loss).backward()
    for opt in opts:
        scaler.step(opt)
    scaler.update()
"""


def run_loop(tmp_path, **given):
    script = tmp_path / "loop.py"
    script.write_text("\n".join(f"{name} = {value!r}" for name, value in given.items()) + LOOP, encoding="utf-8")
    return observe(str(script))


@pytest.mark.parametrize("bad", [30, 41, 49])
def test_a_bad_loss_of_two_optimizers_is_dated_by_its_own_step(tmp_path, bad):
    answer = run_loop(tmp_path, SCALED=False, BAD=bad, HIGH=-1.0)
    assert f"step {bad}" in str(answer["findings"] or answer["unexplained"]), answer


def test_a_step_that_fails_when_the_script_is_all_but_over_is_explained(tmp_path):
    script = tmp_path / "short.py"
    script.write_text(
        "import torch\n"
        "class Gate(torch.nn.Linear):\n"
        "    def forward(self, x, level):\n"
        "        return torch.exp(super().forward(x).half() + level)\n"
        "net = Gate(4, 4)\n"
        "opt = torch.optim.SGD(net.parameters(), lr=1e-6)\n"
        "for step in range(60):\n"
        "    opt.zero_grad()\n"
        "    net(torch.ones(3, 4), 20.0 if step > 57 else 0.0).float().mean().backward()\n"
        "    opt.step()\n",
        encoding="utf-8",
    )
    first = observe(str(script))["findings"][0]
    assert (first["cause"], line_of(first).strip()[:16]) == ("exp-overflow", "return torch.exp"), first


def test_a_loss_that_is_not_finite_behind_a_scaler_is_seen(tmp_path):
    # Its gradients are finite: the scaler lets the step through.
    answer = run_loop(tmp_path, SCALED=True, BAD=30, HIGH=0.0)
    assert answer["findings"] or answer["unexplained"], answer


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_leaves_out_a_step_with_a_lost_loss_has_the_next_ones_recorded(tmp_path, fused):
    script = tmp_path / "skipped.py"
    script.write_text(
        "import torch\n"
        "net = torch.nn.Linear(4, 4)\n"
        f"opt = torch.optim.SGD(net.parameters(), lr=1e-6, fused={fused})\n"
        'scaler = torch.amp.GradScaler("cpu", init_scale=1.0)\n'
        "for step in range(60):\n"
        "    opt.zero_grad()\n"
        "    likely = torch.sigmoid(net(torch.ones(3, 4)) + (9.0 if step in (46, 50, 53) else 0.0)).half()\n"
        "    scaler.scale(-torch.log(1 - likely + 1e-8).float().mean()).backward()\n"
        "    scaler.step(opt)\n"
        "    scaler.update()\n",
        encoding="utf-8",
    )
    answer = observe(str(script))
    assert [first["cause"] for first in answer["findings"][:1]] == ["eps-underflow"], answer


def test_the_same_loop_without_it_is_left_in_peace(tmp_path):
    answer = run_loop(tmp_path, SCALED=True, BAD=99, HIGH=0.0)
    assert (answer["findings"], answer["unexplained"]) == ([], "")


def test_numbers_are_told_in_order_and_only_those_of_earlier_steps():
    told, numbers = [], LateNumbers()
    value = torch.tensor([1.0, 2.0])
    numbers.ask(value, 3, lambda found: told.append(found))
    numbers.ask(torch.tensor(float("nan")), 4, lambda found: told.append(found))
    value.zero_()  # they were taken when they were asked for
    numbers.read(before=3)
    assert told == []
    numbers.read(before=4)
    assert told == [[1.0, 2.0]]
    numbers.read()
    assert len(told) == 2


def test_a_fused_optimizer_tells_late_whether_its_step_was_applied(tmp_path):
    script = tmp_path / "fused.py"
    script.write_text(
        "import torch\n"
        "net = torch.nn.Linear(4, 1)\n"
        "opt = torch.optim.AdamW(net.parameters(), fused=True)\n"
        "scaler = torch.amp.GradScaler('cpu', init_scale=2.0**10)\n"
        "for step in range(60):\n"
        "    opt.zero_grad()\n"
        "    scaler.scale(net(torch.randn(3, 4)).square().mean()).backward()\n"
        "    if step == 40:\n"
        "        net.weight.grad.fill_(float('inf'))\n"
        "    scaler.step(opt); scaler.update()\n",
        encoding="utf-8",
    )
    answer = observe(str(script))
    assert "the scaler left out 1 of 60 steps" in answer["notes"]
    assert (answer["findings"], answer["unexplained"]) == ([], "")


def test_every_step_is_asked_about_and_the_one_that_failed_is_known():
    numbers, failed = LateNumbers(), []
    steps = LateSteps(numbers, lambda event: failed.append(event.step))
    loss = ScaledLoss(torch.tensor(6.0), 2.0)
    for number in range(64):
        value = torch.tensor(math.nan if number == 40 else 1.0)
        losses = [loss] if number == 50 else []
        health = LateHealth([value, *(one.value for one in losses)], losses)
        event = LoopEvent()
        event.step = number
        steps.ask(event, health)
    assert failed == []
    numbers.read()
    assert failed == [40]
    assert (loss.value, float(loss)) == (6.0, 3.0)


def test_the_weights_of_all_optimizers_are_those_from_before_the_step():
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight]) for weight in weights]
    steps = LateSteps(LateNumbers(), lambda event: None)
    for number in range(32):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.data.fill_(number)
            steps.keep(optimizer, number, detailed=False)
        assert steps.kept_step == number
        assert [copy.tolist() for copy in steps.weights.copies] == [[number] * 2] * 2


ROWS = """
import torch
torch.manual_seed(0)
table = torch.nn.Embedding(8, 4)
head = torch.nn.Linear(4, 1)
opt = torch.optim.SGD([*table.parameters(), *head.parameters()], lr=1e-3)
for step in range(60):
    rows = torch.tensor([7]) if step == BAD else torch.arange(4)
    vectors = table(rows)
    opt.zero_grad()
    loss = head(vectors).square().mean()
    if step > BAD and STOPS and not torch.isfinite(table.weight).all():
        raise SystemExit("weights are not finite")
    loss.backward()
    if step == BAD:
        table.weight.grad[7] = HIGH
    opt.step()
"""


@pytest.mark.parametrize("bad", [*range(30, 38), 59])
@pytest.mark.parametrize("stops", [False, True])
def test_a_gradient_that_spoils_a_weight_which_no_later_loss_sees_is_found(tmp_path, bad, stops):
    script = tmp_path / "rows.py"
    script.write_text(f"BAD, STOPS, HIGH = {bad}, {stops}, float('inf')\n{ROWS}", encoding="utf-8")
    answer = observe(str(script))
    assert answer["findings"] or "not finite from step" in answer["unexplained"], answer


def test_the_same_gradient_finite_is_left_in_peace(tmp_path):
    script = tmp_path / "rows.py"
    script.write_text(f"BAD, STOPS, HIGH = 33, True, 1.0\n{ROWS}", encoding="utf-8")
    answer = observe(str(script))
    assert (answer["findings"], answer["unexplained"]) == ([], "")


@pytest.mark.parametrize(("size", "held"), [(4, 4), (2**23, 2), (2**24, 1), (2**25, 1)])
def test_inputs_that_are_held_take_a_bounded_memory(size, held):
    seen = Watch(light=True)
    capture, net, batch = StepCapture(seen), torch.nn.Linear(1, 1), torch.zeros(size)
    for number in range(40):
        seen.detailed = number < 24
        event = LoopEvent()
        event.step = number
        capture.begin_forward(net, (batch,), {}, event)
    num = len(capture._held.calls)
    capture.finish()
    assert num == held
