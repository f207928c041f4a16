"""Loops that change their weights by themselves: their steps are counted, their failures named, their bits kept."""

import runpy
from pathlib import Path

import pytest
import torch
from tests.diagnosis.scripts.test_scripts import as_it_was, line_of, observe

from floatline.probe.watch.own_updates import _has_two_digits

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
STEPS = 24
"""
# Each ends with `ends`, what it trained.
IN_PLACE = """
w, b = torch.randn(6, 2, requires_grad=True), torch.zeros(2, requires_grad=True)
for step in range(STEPS):
    x = torch.randn(16, 6)
    loss = (x @ w + b - x[:, :2]).square().mean()
    loss.backward()
    with torch.no_grad():
        for p in (w, b):
            p -= 0.05 * p.grad
            p.grad.zero_()
ends = [w, b]
"""
DATA = """
net = nn.Linear(6, 2)
for step in range(STEPS):
    x = torch.randn(16, 6)
    net.zero_grad()
    (net(x) - x[:, :2]).square().mean().backward()
    for p in net.parameters():
        p.data.add_(p.grad, alpha=-0.05)
ends = list(net.parameters())
"""
GRAD = """
net = nn.Linear(6, 2)
for step in range(STEPS):
    x = torch.randn(16, 6)
    loss = (net(x) - x[:, :2]).square().mean()
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    with torch.no_grad():
        for p, g in zip(net.parameters(), gradients):
            p.sub_(0.05 * g)
ends = list(net.parameters())
"""
CLASS = """
class Momentum:
    def __init__(self, parameters, lr):
        self.parameters, self.lr = list(parameters), lr
        self.state = [torch.zeros_like(p) for p in self.parameters]
    @torch.no_grad()
    def step(self):
        for p, m in zip(self.parameters, self.state):
            m.mul_(0.9).add_(p.grad)
            p.add_(m, alpha=-self.lr)
    def zero_grad(self):
        for p in self.parameters:
            p.grad = None
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
opt = Momentum(net.parameters(), 0.02)
for step in range(STEPS):
    x = torch.randn(16, 6)
    opt.zero_grad()
    (net(x) - x[:, :2]).square().mean().backward()
    opt.step()
ends = list(net.parameters())
"""
FUNCTIONAL = """
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
weights = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
for step in range(STEPS):
    x = torch.randn(16, 6)
    loss = (torch.func.functional_call(net, weights, (x,)) - x[:, :2]).square().mean()
    gradients = torch.autograd.grad(loss, list(weights.values()))
    weights = {
        name: (p - 0.05 * g).detach().requires_grad_() for (name, p), g in zip(weights.items(), gradients)
    }
ends = list(weights.values())
"""
SUMMED = """
net = nn.Linear(6, 2)
for step in range(STEPS):
    for part in range(3):
        x = torch.randn(16, 6)
        ((net(x) - x[:, :2]).square().mean() / 3).backward()
    with torch.no_grad():
        for p in net.parameters():
            p -= 0.05 * p.grad
            p.grad = None
ends = list(net.parameters())
"""
EVALUATED = """
net = nn.Linear(6, 2)
for step in range(STEPS):
    x = torch.randn(16, 6)
    (net(x) - x[:, :2]).square().mean().backward()
    with torch.no_grad():
        for p in net.parameters():
            p -= 0.05 * p.grad
            p.grad = None
    if step % 2:
        with torch.no_grad():
            net(torch.randn(64, 6)).square().mean().item()
ends = list(net.parameters())
"""
BESIDE = """
net, shift = nn.Linear(6, 2), torch.zeros(2, requires_grad=True)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for step in range(STEPS):
    x = torch.randn(16, 6)
    opt.zero_grad()
    (net(x) + shift - x[:, :2]).square().mean().backward()
    opt.step()
    with torch.no_grad():
        shift -= 0.05 * shift.grad
        shift.grad = None
ends = [*net.parameters(), shift]
"""
HANDED_OVER = """
net = nn.Linear(6, 2)
opt = torch.optim.Adagrad(net.parameters(), lr=0.05)
for step in range(STEPS):
    x = torch.randn(16, 6)
    loss = (net(x) - x[:, :2]).square().mean()
    for p, g in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters()))):
        p.grad = g
    opt.step()
ends = list(net.parameters())
"""
HEALTHY = {
    "in_place": IN_PLACE,
    "data": DATA,
    "grad": GRAD,
    "class": CLASS,
    "functional": FUNCTIONAL,
    "summed": SUMMED,
    "evaluated": EVALUATED,
    "beside": BESIDE,
    "handed_over": HANDED_OVER,
}


def write(folder, body, name="train.py"):
    script = folder / name
    target = folder / f"{Path(name).stem}.pt"
    end = f"\ntorch.save([t.detach() for t in ends], {str(target)!r})\n"
    script.write_text(HEAD + body + end, encoding="utf-8")
    return script, target


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_loop_is_silent_its_steps_are_counted_and_its_bits_kept(tmp_path, name):
    alone, expected = write(tmp_path, HEALTHY[name], "alone.py")
    with as_it_was():
        runpy.run_path(str(alone), run_name="__main__")
    script, target = write(tmp_path, HEALTHY[name])
    answer = observe(str(script))
    assert (answer["findings"], answer["unexplained"], answer["unseen"]) == ([], "", "")
    assert (answer["num_steps"], answer["exit_code"]) == (24, 0)
    assert "3 of 24 steps recorded (step " in answer["notes"][0]
    assert len(answer["notes"]) == 1, answer["notes"]
    pairs = zip(torch.load(target), torch.load(expected), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_each_backward_pass_of_a_sum_is_counted_as_one(tmp_path):
    script, _ = write(tmp_path, SUMMED)
    answer = observe(str(script))
    assert (answer["num_backward"], answer["num_steps"]) == (72, 24)


# Failures. In each, `step >= 20` or a number alone makes the difference to its healthy twin.
EXP = """
w = torch.randn(6, 1, requires_grad=True)
for step in range(STEPS):
    x = torch.randn(16, 6)
    with torch.autocast("cpu", dtype=torch.float16):
        heights = x @ w * 0.1 + LIFT * (step >= 20)
        out = torch.exp(heights.half())
    loss = (out.float() * 1e-4).mean()
    loss.backward()
    with torch.no_grad():
        w -= 1e-3 * w.grad
        w.grad = None
ends = [w]
"""
EXP_OF_MODULE = """
net = nn.Linear(6, 1)
for step in range(STEPS):
    x = torch.randn(16, 6)
    net.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        heights = net(x) * 0.1 + LIFT * (step >= 20)
        out = torch.exp(heights.half())
    loss = (out.float() * 1e-4).mean()
    loss.backward()
    for p in net.parameters():
        p.data.add_(p.grad, alpha=-1e-3)
ends = list(net.parameters())
"""
RATE = """
w = torch.randn(6, 2, requires_grad=True)
for step in range(60):
    x = torch.randn(16, 6)
    loss = (x @ w - x[:, :2]).square().mean()
    loss.backward()
    with torch.no_grad():
        w -= RATE * w.grad
        w.grad = None
ends = [w]
"""
LOST = """
w = torch.randn(6, 2).bfloat16().requires_grad_()
for step in range(STEPS):
    x = torch.randn(16, 6).bfloat16()
    loss = (x @ w - x[:, :2]).square().mean()
    loss.backward()
    with torch.no_grad():
        w.add_(w.grad, alpha=-RATE)
        w.grad = None
ends = [w]
"""


@pytest.mark.parametrize("lift", [14.0, 1.0])
def test_an_overflow_in_a_loop_by_hand_is_named_at_its_line(tmp_path, lift):
    script, _ = write(tmp_path, f"LIFT = {lift}\n" + EXP_OF_MODULE)
    answer = observe(str(script))
    if lift == 1.0:
        assert (answer["findings"], answer["unexplained"]) == ([], "")
        return
    first = answer["findings"][0]
    assert first["cause"] == "exp-overflow", first
    assert Path(first["file"]) == script and "torch.exp(heights" in line_of(first)


@pytest.mark.parametrize("lift", [14.0, 1.0])
def test_an_overflow_without_a_module_is_named_at_its_line(tmp_path, lift):
    # Nothing tells that such a step begins but the first use of a weight after the update.
    script, _ = write(tmp_path, f"LIFT = {lift}\n" + EXP)
    answer = observe(str(script))
    if lift == 1.0:
        assert (answer["findings"], answer["unexplained"]) == ([], "")
        return
    first = answer["findings"][0]
    assert first["cause"] == "exp-overflow", answer
    assert "torch.exp(" in line_of(first)


FIRST = """
w = torch.randn(6, 2, requires_grad=True)
for step in range(STEPS):
    x = torch.randn(16, 6)
    y = x @ w
    distance = torch.sqrt((y[:, None] - y[None]).square().sum(-1) + GUARD)
    (distance.mean() + y.square().mean()).backward()
    with torch.no_grad():
        w -= 0.05 * w.grad
        w.grad = None
ends = [w]
"""


@pytest.mark.parametrize("guard", [0.0, 1e-6])
def test_a_first_step_that_fails_without_a_module_is_tried_again_on_healthy_weights(tmp_path, guard):
    script, target = write(tmp_path, f"GUARD = {guard}\n" + FIRST)
    answer = observe(str(script))
    causes = [finding["cause"] for finding in answer["findings"]]
    assert causes[:1] == (["singular-gradient"] if not guard else []), answer
    if not guard:
        assert "torch.sqrt(" in line_of(answer["findings"][0])
        assert torch.load(target)[0].isnan().all()  # the script has the weights that it made


SCALED = """
net = nn.Linear(6, 2)
for step in range(60):
    x = torch.randn(16, 6)
    net.zero_grad()
    loss = (net(x) - x[:, :2]).square().mean()
    (loss * SCALE).backward()
    for p in net.parameters():
        p.data.add_(p.grad, alpha=-RATE)
ends = list(net.parameters())
"""


@pytest.mark.parametrize(
    ("scale", "rate", "causes"),
    [
        (1024.0, "0.05", ["scaler-misuse"]),
        (1024.0, "0.05 / SCALE", []),
        (1024.0, "20.0 / SCALE", ["optimization-divergence"]),
        (100.0, "0.001", []),  # a factor that does no harm may be meant
        (1.0, "20.0", ["optimization-divergence"]),
    ],
)
def test_a_scale_that_is_left_in_an_update_by_hand_is_told_from_a_rate_that_is_too_large(tmp_path, scale, rate, causes):
    script, _ = write(tmp_path, f"SCALE = {scale}\nRATE = {rate}\n" + SCALED)
    answer = observe(str(script))
    assert [finding["cause"] for finding in answer["findings"]] == causes, answer
    if causes:
        assert "p.data.add_(p.grad" in line_of(answer["findings"][0])


def test_rates_that_people_write_are_not_mistaken_for_their_quotient_by_a_scale():
    for digits in range(10, 101):
        for power in range(-8, -1):
            rate = digits * 10.0**power
            for exponent in range(6, 25):
                left = rate / 2**exponent
                assert not (_has_two_digits(left) and (rate > 1.0 or not _has_two_digits(rate)))


CLEARED_LATE = """
net = nn.Linear(6, 2).half()
master = [p.detach().clone().float().requires_grad_() for p in net.parameters()]
opt = torch.optim.SGD(master, lr=0.05)
scale = 2.0**FIRST
for step in range(40):
    x = torch.randn(16, 6).half()
    loss = (net(x).float() - x[:, :2].float()).square().mean()
    net.zero_grad()  # after the forward pass
    (loss * scale).backward()
    if not all(p.grad.isfinite().all() for p in net.parameters()):
        scale /= 2 ** LOWERED
        continue
    for m, p in zip(master, net.parameters()):
        m.grad = p.grad.float() / scale
    opt.step()
    for m, p in zip(master, net.parameters()):
        p.data.copy_(m.data)
ends = list(net.parameters())
"""


@pytest.mark.parametrize("lowered", [0, 1])
def test_a_scale_that_nothing_lowers_is_named_where_gradients_are_cleared_late(tmp_path, lowered):
    script, _ = write(tmp_path, f"FIRST, LOWERED = 24, {lowered}\n" + CLEARED_LATE)
    answer = observe(str(script))
    causes = [finding["cause"] for finding in answer["findings"]]
    assert causes[:1] == ([] if lowered else ["gradient-overflow"]), answer


@pytest.mark.parametrize("rate", [1e4, 0.05])
def test_a_rate_that_is_too_large_is_named_in_a_loop_by_hand(tmp_path, rate):
    script, _ = write(tmp_path, f"RATE = {rate}\n" + RATE)
    answer = observe(str(script))
    causes = [finding["cause"] for finding in answer["findings"]]
    assert causes == (["optimization-divergence"] if rate > 1 else []), answer
    if rate > 1:
        assert "w -= RATE * w.grad" in line_of(answer["findings"][0])


@pytest.mark.parametrize("rate", [1e-5, 0.05])
def test_updates_that_bfloat16_loses_are_named_in_a_loop_by_hand(tmp_path, rate):
    script, _ = write(tmp_path, f"RATE = {rate}\n" + LOST)
    answer = observe(str(script))
    causes = [finding["cause"] for finding in answer["findings"]]
    assert causes[:1] == (["update-lost-to-rounding"] if rate < 1e-3 else []), answer
