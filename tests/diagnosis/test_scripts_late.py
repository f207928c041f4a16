"""Whole scripts whose numbers arrive late, as from a GPU: what fails is known a step afterwards, and explained."""

import pytest
import torch
from tests.diagnosis.test_scripts import line_of, observe, observe_script

from floatline.probe import late
from floatline.probe.late import LateNumbers


@pytest.fixture(autouse=True)
def _far(monkeypatch):
    monkeypatch.setattr(late, "is_far", lambda tensor: True)


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


@pytest.mark.parametrize("bad", [30, 49])
def test_a_bad_loss_of_two_optimizers_is_dated_by_its_own_step(tmp_path, bad):
    answer = run_loop(tmp_path, SCALED=False, BAD=bad, HIGH=-1.0)
    assert f"step {bad}" in str(answer["findings"] or answer["unexplained"]), answer


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
