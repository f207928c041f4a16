"""Where names come from: in other methods, in callers, and by casts that stand by themselves."""

import pytest
from tests.fixes.sources import spans

ACROSS = """

class Average:
    def __init__(self, net, dtype):
        self.kept = [p.detach().to(dtype) for p in net.parameters()]
        self.net = net

    def update(self):
        for kept, p in zip(self.kept, self.net.parameters()):
            kept.mul_(0.999).add_(p.detach(), alpha=0.001)  # here
"""


def test_what_a_loop_runs_over_is_found_in_another_method(tmp_path):
    after = spans(tmp_path, "accumulator-stagnation", ACROSS)["fp32-cast"]
    assert "[p.detach().float() for p in net.parameters()]" in after


CALLED = """

def epoch(net, opt, scaler, loader):
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)  # here
        scaler.step(opt)
        scaler.update()


def main(loader):
    net = torch.nn.Linear(3, 1)
    net.to("cuda", torch.float16)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    epoch(net, optimizer, torch.amp.GradScaler("cuda"), loader)
"""


def test_a_cast_is_found_behind_the_arguments_of_a_call(tmp_path):
    after = spans(tmp_path, "fp16-params-with-scaler", CALLED)["fp32-weights"]
    assert '    net.to("cuda", torch.float32)\n' in after


def test_a_name_of_another_function_is_another_name(tmp_path):
    text = CALLED.replace("epoch(net, optimizer,", "epoch(net, make(),").replace(
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)", "opt = torch.optim.SGD(net.parameters(), 0.1)"
    )
    assert "fp32-weights" not in spans(tmp_path, "fp16-params-with-scaler", text)


STEPPED = """

def fit(net, opt, scaler, loader):
    for x, y in loader:
        opt.zero_grad()
        scaler.scale(F.mse_loss(net(x), y)).backward()
        scaler.unscale_(opt)  # here
        scaler.step(opt)
"""


def test_an_update_is_missing_behind_the_step_of_the_same_function(tmp_path):
    after = spans(tmp_path, "scaler-misuse", STEPPED)["update-after-step"]
    assert after.endswith("        scaler.step(opt)\n        scaler.update()\n")
    assert "update-after-step" not in spans(tmp_path, "scaler-misuse", STEPPED + "        scaler.update()\n")


GUARDED = """
LEAST = 1e-9

class Norm:
    rest = 1e-9

    def __init__(self, floor=1e-9, wide=1e-2):
        self.floor, self.tiny = floor, wide
        self.kept = floor
        self.floor_of_all = 1e-9

    def forward(self, x, guard=1e-9):
        local = 1e-9
        return torch.log(x + NAME)  # here
"""


@pytest.mark.parametrize("name", ["LEAST", "guard", "local", "self.floor", "self.floor_of_all"])
def test_a_guard_has_the_number_that_its_name_was_given(tmp_path, name):
    after = spans(tmp_path, "eps-underflow", GUARDED.replace("NAME", name), op="aten.log")["small-eps"]
    assert f"torch.log(x.float() + {name})  # here\n" in after


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LEAST = 1e-9", "LEAST = 1e-2"),
        ("LEAST = 1e-9\n", "LEAST = 1e-9\nLEAST = 0.5\n"),
    ],
)
def test_a_name_with_another_number_or_with_two_is_no_guard(tmp_path, old, new):
    assert old in GUARDED
    text = GUARDED.replace("NAME", "LEAST").replace(old, new)
    assert "small-eps" not in spans(tmp_path, "eps-underflow", text, op="aten.log")
