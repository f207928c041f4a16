"""Loops that take their gradients by torch.func: their steps are counted, their failures named, their bits kept."""

import runpy

import pytest
import torch
from tests.diagnosis.scripts.test_scripts import as_it_was, line_of, observe
from tests.probe.watch.test_own_updates import write

NET = """
from torch.func import functional_call, grad, grad_and_value, vmap
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
weights = {name: p.detach().clone() for name, p in net.named_parameters()}
def distance(weights, x):
    return (functional_call(net, weights, (x,)) - x[:, :2]).square().mean()
"""
NEW_WEIGHTS = """
for step in range(STEPS):
    gradients = grad(distance)(weights, torch.randn(16, 6))
    weights = {name: p - 0.05 * gradients[name] for name, p in weights.items()}
ends = list(weights.values())
"""
IN_PLACE = """
take = grad_and_value(lambda *given: (distance(*given), torch.ones(1)), has_aux=True)
for step in range(STEPS):
    gradients, (loss, more) = take(weights, torch.randn(16, 6))
    for name, p in weights.items():
        p.sub_(0.05 * gradients[name])
ends = list(weights.values())
"""
EACH_SAMPLE = """
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
take = vmap(grad(lambda weights, x: distance(weights, x[None])), in_dims=(None, 0))
for step in range(STEPS):
    gradients = take({name: p.detach() for name, p in net.named_parameters()}, torch.randn(16, 6))
    for name, p in net.named_parameters():
        p.grad = gradients[name].clamp(-1, 1).mean(0)
    opt.step()
    opt.zero_grad()
ends = list(net.parameters())
"""
SEVERAL = """
several = {name: torch.stack([p, 2 * p, -p]) for name, p in weights.items()}
for step in range(STEPS):
    gradients = vmap(grad(distance), in_dims=(0, None))(several, torch.randn(16, 6))
    several = {name: p - 0.05 * gradients[name] for name, p in several.items()}
ends = list(several.values())
"""
TRACKED = """
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(STEPS):
    gradients = grad(distance)(dict(net.named_parameters()), torch.randn(16, 6))
    for name, p in net.named_parameters():
        p.grad = gradients[name].detach()
    opt.step()
ends = list(net.parameters())
"""
INNER = """
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(STEPS):
    total = 0
    for task in range(3):
        own = dict(net.named_parameters())
        gradients = grad(distance)(own, torch.randn(16, 6))
        total = total + distance({name: p - 0.05 * gradients[name] for name, p in own.items()}, torch.randn(16, 6))
    opt.zero_grad()
    total.backward()
    opt.step()
ends = list(net.parameters())
"""
OF_INPUTS = """
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
slope = vmap(grad(lambda x: net(x).sum()))
for step in range(STEPS):
    loss = (slope(torch.randn(16, 6)) - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
ends = list(net.parameters())
"""
HEALTHY = {
    "new_weights": NEW_WEIGHTS,
    "in_place": IN_PLACE,
    "each_sample": EACH_SAMPLE,
    "several": SEVERAL,
    "tracked": TRACKED,
    "inner": INNER,
    "of_inputs": OF_INPUTS,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_loop_is_silent_its_steps_are_counted_and_its_bits_kept(tmp_path, name):
    alone, expected = write(tmp_path, NET + HEALTHY[name], "alone.py")
    with as_it_was():
        runpy.run_path(str(alone), run_name="__main__")
    script, target = write(tmp_path, NET + HEALTHY[name])
    answer = observe(str(script))
    assert (answer["findings"], answer["unexplained"], answer["unseen"]) == ([], "", "")
    assert (answer["num_steps"], answer["num_backward"], answer["exit_code"]) == (24, 24, 0)
    assert "3 of 24 steps recorded (step " in answer["notes"][0]
    assert len(answer["notes"]) == 1, answer["notes"]
    pairs = zip(torch.load(target), torch.load(expected), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


SQUARE = """
def distance(weights, x):
    with torch.autocast("cpu", dtype=torch.float16):
        out = functional_call(net, weights, (x,)) * SIZE
        return (out * out).float().mean() * 1e-4
"""


@pytest.mark.parametrize("name", ["new_weights", "in_place", "each_sample", "several", "tracked"])
@pytest.mark.parametrize(("size", "causes"), [(9000, ["product-overflow"]), (30, [])])
def test_an_overflow_is_named_at_its_line_and_its_twin_is_not(tmp_path, name, size, causes):
    script, _ = write(tmp_path, NET + SQUARE.replace("SIZE", f"({size} if step >= 15 else 30)") + HEALTHY[name])
    answer = observe(str(script))
    assert [finding["cause"] for finding in answer["findings"]] == causes
    assert all("(out * out)" in line_of(finding) for finding in answer["findings"])


SMALL = SQUARE.replace("SIZE", "FACTOR").replace("1e-4", "1e-7")


def test_gradients_that_are_lost_are_counted(tmp_path):
    script, _ = write(tmp_path, NET + SMALL.replace("FACTOR", "1") + NEW_WEIGHTS)
    assert [finding["cause"] for finding in observe(str(script))["findings"]] == ["gradient-underflow"]


def test_weights_that_were_replaced_are_not_kept(tmp_path):
    count = """gc.collect()
num_alive = sum(issubclass(type(t), torch.Tensor) and t.shape == (8, 6) for t in gc.get_objects())
assert num_alive < 30, num_alive
"""
    body = NET + NEW_WEIGHTS.replace("STEPS", "100").replace("ends =", count + "ends =")
    script, _ = write(tmp_path, "import gc\n" + body)
    assert observe(str(script))["exit_code"] == 0
