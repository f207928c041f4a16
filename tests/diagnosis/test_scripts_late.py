"""Whole scripts whose numbers arrive late, as from a GPU: what fails is known a step afterwards, and explained."""

import math

import pytest
import torch
from tests.diagnosis.test_scripts import line_of, observe, observe_script

from floatline.probe import late, script_late, script_schedule
from floatline.probe.events import Event, Watch
from floatline.probe.late import LateHealth, LateNumbers, ScaledLoss
from floatline.probe.script_late import LateSteps
from floatline.probe.script_steps import StepCapture

# What asking may take of a step: any share, so that each step is asked about; none, so that it is many at once.
EACH, TOGETHER = math.inf, 0.0


@pytest.fixture(autouse=True, params=[EACH, TOGETHER], ids=["each", "together"])
def share(request, monkeypatch):
    monkeypatch.setattr(late, "is_far", lambda tensor: True)
    monkeypatch.setattr(script_late, "_SHARE", request.param)
    return request.param


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


def test_weights_of_another_step_than_the_failing_one_are_owned_up_to(tmp_path, monkeypatch, share):
    monkeypatch.setattr(script_schedule, "_SHARE", 0.0)  # a step that is recorded brings all answers home
    monkeypatch.setattr(script_schedule, "_LITTLE", 0.0)
    answer = run_loop(tmp_path, SCALED=False, BAD=37, HIGH=-1.0)
    said = [note for note in answer["notes"] if "the nearest that were kept" in note]
    text = "step 37 failed; its cause was looked for with the weights of step 34, the nearest that were kept"
    assert said == ([text] if share == TOGETHER else [])


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


def test_steps_are_asked_about_together_where_they_are_short_and_each_by_itself_where_not(share):
    failed, steps = [], LateSteps(LateNumbers(), lambda event: failed.append(event.step))
    loss = ScaledLoss(torch.tensor(6.0), 2.0)
    for number in range(64):
        event = Event("step", "", 0, "", number, {})
        value = torch.tensor(math.nan if number == 40 else 1.0)
        losses = [loss] if number == 50 else []
        steps.add(event, LateHealth([value, *(one.value for one in losses)], losses), detailed=False)
    assert steps.num_together == (script_late._MOST_STEPS if share == TOGETHER else 1)
    assert failed == []
    steps.read()
    assert failed == [40]
    assert (loss.value, float(loss)) == (6.0, 3.0)


def test_weights_are_copied_together_and_only_while_all_steps_before_are_known(share):
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizers, numbers = [torch.optim.SGD([weight]) for weight in weights], LateNumbers()
    steps, kept = LateSteps(numbers, lambda event: None), []
    for number in range(32):
        numbers.read(before=number)
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.data.fill_(number)
            steps.keep(optimizer, number, detailed=False)
            steps.add(Event("step", "", 0, "", number, {}), LateHealth([torch.tensor(1.0)]), detailed=False)
        assert [copy.tolist() for copy in steps.weights.copies] == [[steps.kept_step] * 2] * 2
        kept.append(steps.kept_step)
    assert kept == (list(range(32)) if share == EACH else [0, 1, 1, 3, 3, 3, 3, *[7] * 8, *[15] * 16, 31])


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


def test_gradients_are_looked_at_in_each_step_until_there_is_a_copy_of_the_weights(share):
    steps = LateSteps(LateNumbers(), lambda event: None)
    weight = torch.nn.Parameter(torch.zeros(2))
    asked = []
    for number in range(32):
        asked.append(not steps.leaves_out(number))
        if number == 15:
            steps.keep(torch.optim.SGD([weight]), number, detailed=False)
        steps.add(Event("step", "", 0, "", number, {}), LateHealth([torch.tensor(1.0)]), detailed=False)
    assert all(asked[:16])
    assert sum(asked[16:]) == (16 if share == EACH else 2)  # the first of them and the last


@pytest.mark.parametrize("end", ["with the next question", "at the end"])
def test_weights_that_are_spoilt_by_a_step_that_was_not_looked_at_fail_the_last_one(share, end):
    if share == EACH:
        pytest.skip("each step is looked at")
    failed, steps = [], LateSteps(LateNumbers(), lambda event: failed.append(event.step))
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight])
    for number in range(31 if end == "with the next question" else 20):
        steps._late.read(before=number)
        steps.keep(optimizer, number, detailed=False)
        event, left_out = Event("step", "", 0, "", number, {}), steps.leaves_out(number)
        health = LateHealth([torch.tensor(1.0)], looked=not left_out)
        if left_out:
            steps.put_off(event, health)
        else:
            steps.add(event, health, detailed=False)
        if number == 17:
            weight.data[1] = math.nan
    assert failed == []
    steps.read()
    assert failed == ([30] if end == "with the next question" else [19])
    assert steps.weights.copies[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("size", "held"), [(4, 32), (2**20, 16), (2**24, 1), (2**25, 1)])
def test_inputs_that_are_held_take_a_bounded_memory(size, held):
    seen = Watch(light=True)
    capture, net, batch = StepCapture(seen), torch.nn.Linear(1, 1), torch.zeros(size)
    capture._late.num_together = 16
    for number in range(40):
        seen.detailed = number < 24
        capture.begin_forward(net, (batch,), {}, Event("forward", "", 0, "", number, {}))
    assert len(capture._held.calls) == held
