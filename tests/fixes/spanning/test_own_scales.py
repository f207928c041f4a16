"""Loss scales of one's own: in classes and as powers of two, and gradients that still carry one."""

import pytest
import torch
from tests.fixes.sources import spans

POWER = """

class Loop:
    def __init__(self, net):
        self.log_scale, self.net = 26.0, net

    def run_step(self, x, y):
        loss = F.mse_loss(self.net(x), y)
        loss_scale = 2**self.log_scale
        (loss * loss_scale).backward()  # here
        self.optimize()

    def optimize(self):
        ok = all(torch.isfinite(p.grad).all() for p in self.net.parameters())
        if not ok:
            print("left out")
            return
        for p in self.net.parameters():
            p.grad.mul_(1.0 / (2 ** self.log_scale))
        self.opt.step()
"""


def test_a_power_of_two_falls_where_a_step_is_left_out_in_another_method(tmp_path):
    after = spans(tmp_path, "gradient-overflow", POWER, op="backward")["scale-back-off"]
    assert (
        '            print("left out")\n            self.log_scale = self.log_scale - 1\n            return\n' in after
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("            return\n", "            pass\n"),  # the step is made
        ("            return\n", "            self.log_scale -= 1\n            return\n"),  # it falls already
        ("(2 ** self.log_scale)", "65536"),
        ("torch.isfinite(p.grad).all()", "len(p)"),
        ("2**self.log_scale\n", "3**self.log_scale\n"),
    ],
)
def test_a_power_stays_where_nothing_shows_that_it_cancels(tmp_path, old, new):
    assert old in POWER
    assert "self.log_scale = " not in spans(tmp_path, "gradient-overflow", POWER.replace(old, new), op="backward").get(
        "scale-back-off", ""
    )


BY_HAND = """

def fit(params, batches, loss_scale=512.0, lr=0.1):
    for x, y in batches:
        loss = F.mse_loss(x @ params[0], y)
        (loss * loss_scale).backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in params]).norm() / loss_scale
            for p in params:
                p -= lr * p.grad.float()  # here
                p.grad = None
    return params
"""


def test_a_gradient_that_carries_the_scale_is_divided_where_it_is_read(tmp_path):
    after = spans(tmp_path, "scaler-misuse", BY_HAND)["divide-by-scale"]
    assert "p -= lr * (p.grad.float() / loss_scale)  # here\n" in after
    assert "p.grad = None" in after and ".norm() / loss_scale" in after
    values = {}
    exec(after, values)
    torch.manual_seed(0)
    x = torch.randn(32, 3)
    (found,) = values["fit"]([torch.zeros(3, 1, requires_grad=True)], [(x, x.sum(1, keepdim=True))] * 300)
    assert torch.allclose(found, torch.ones(3, 1), atol=1e-2)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("* p.grad.float()  # here", "* p.grad.float() / loss_scale  # here"),  # it is divided already
        ("(loss * loss_scale)", "(loss * 2)"),
        ("loss_scale=512.0, ", ""),  # nobody knows where it is
    ],
)
def test_a_gradient_stays_where_it_carries_no_known_scale(tmp_path, old, new):
    assert old in BY_HAND
    text = BY_HAND.replace(old, new)
    assert "divide-by-scale" not in spans(tmp_path, "scaler-misuse", text)


WITH_OPTIMIZER = """
SCALE = 1024.0


def fit(net, opt, batches):
    for x, y in batches:
        opt.zero_grad()
        loss = F.mse_loss(net(x), y) * SCALE
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()  # here
"""


def test_all_gradients_of_an_optimizer_are_divided_before_they_are_clipped(tmp_path):
    after = spans(tmp_path, "scaler-misuse", WITH_OPTIMIZER)["divide-by-scale"]
    loop = after.partition("        for group in opt.param_groups:\n")
    assert "clip_grad" not in loop[0]
    assert loop[2].startswith('            for p in group["params"]:\n')
    assert "p.grad.div_(SCALE)\n        torch.nn.utils.clip_grad_norm_" in after
