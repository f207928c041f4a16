"""16-bit weights that are trained: FP32 weights under autocast, by the precision that is named or by the casts."""

import pytest
import torch
from tests.fixes.sources import spans
from tests.slow import slow

from floatline.fixes.spanning.precisions import find_precision_line

BUILD = """
PRECISIONS = ["fp16-true", "fp32"]


def _parts(kind):
    return Net(), BATCHES, loss, kind, torch.optim.Adam


def unused():
    return _parts("fp16-true")


def build(seed=0):
    if seed == "bf16-true":
        raise ValueError
    return _parts(kind="bf16-true")  # here
"""


def test_the_precision_that_build_names_becomes_mixed(tmp_path):
    (after,) = spans(tmp_path, "update-lost-to-rounding", BUILD).values()
    assert 'return _parts(kind="bf16-mixed")  # here' in after
    assert after.count("fp16-true") == 2


def test_it_is_found_from_another_line_of_the_file(tmp_path):
    text = BUILD.replace("  # here", "").replace("kind, torch.optim.Adam", "kind, torch.optim.Adam  # here")
    (after,) = spans(tmp_path, "gradient-underflow", text).values()
    assert 'kind="bf16-mixed")' in after


def test_two_precisions_are_not_guessed_between(tmp_path):
    text = BUILD.replace("  # here", "").replace("raise ValueError", 'return _parts("fp16-true")')
    text = text.replace("kind, torch.optim.Adam", "kind, torch.optim.Adam  # here")
    assert spans(tmp_path, "gradient-underflow", text) == {}
    assert find_precision_line(text, entry="build") == 0
    assert find_precision_line(text, entry="unused") == 10


LOOP = """

def fit(loader, device="cpu"):
    net = torch.nn.Linear(3, 1, bias=False).to(device).bfloat16()  # here
    torch.nn.init.ones_(net.weight)
    opt = torch.optim.SGD(net.parameters(), lr=4e-4)
    for x, y in loader:
        # forward
        out = net(x.bfloat16())
        loss = F.mse_loss(out.float(), y)
        opt.zero_grad(); loss.backward(); opt.step()
    return net, loss
"""


@slow
def test_a_model_stays_in_fp32_and_its_forward_pass_runs_under_autocast(tmp_path):
    after = spans(tmp_path, "update-lost-to-rounding", LOOP)["autocast-forward"]
    assert "net = torch.nn.Linear(3, 1, bias=False).to(device).float()  # here" in after
    region = "with torch.autocast(next(net.parameters()).device.type, dtype=torch.bfloat16):"
    assert f"        # forward\n        {region}\n            out = net(x.bfloat16())\n" in after
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    weights = []
    for text in ("import torch\nimport torch.nn.functional as F\n" + LOOP, after):
        values = {}
        exec(text, values)
        weights.append(values["fit"]([(x, 2 * x.sum(1, keepdim=True))] * 50)[0].weight)
    assert weights[0].tolist() == [[1.0, 1.0, 1.0]]  # every update was lost
    assert weights[1].min() > 1.01


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    return net, loss", "    return evaluate(net), loss"),  # which may hand it 16 bits
        ("    return net, loss", "    return net.encode(x), loss"),
        (".bfloat16()  # here", ".to(kind)  # here"),
        ("        out = net(x.bfloat16())\n", "        out = x\n"),
        ("        out = net(x.bfloat16())\n", "        if net(x).sum(): out = x\n"),
        ("    for x, y in loader:", "    with torch.autocast('cpu'):\n        net(1)\n    for x, y in loader:"),
        ("    net = torch.nn", "    net = other = torch.nn"),
    ],
)
def test_a_model_that_other_code_may_call_stays(tmp_path, old, new):
    assert old in LOOP
    assert "autocast-forward" not in spans(tmp_path, "update-lost-to-rounding", LOOP.replace(old, new))


def test_a_backward_pass_stands_behind_the_region(tmp_path):
    text = """

class Fit:
    def fit(self, loader):
        self.net = Net().to(dtype=torch.float16)  # here
        for x, y in loader:
            F.mse_loss(self.net(x), y).backward(retain_graph=True)  # all of it
"""
    after = spans(tmp_path, "optimizer-state-underflow", text)["autocast-forward"]
    assert "self.net = Net().float()  # here" in after
    assert "            loss = F.mse_loss(self.net(x), y)\n" in after
    assert "            loss.backward(retain_graph=True)  # all of it\n" in after
    taken = text.replace("for x, y", "for loss, y")
    assert spans(tmp_path, "optimizer-state-underflow", taken) == {}


def test_gradients_that_underflow_in_16_bit_weights_lead_to_the_cast(tmp_path):
    text = LOOP.replace("  # here", "").replace("bfloat16", "half")
    text = text.replace("        opt.zero_grad(); loss.backward()", "        loss.backward()  # here\n        0")
    after = spans(tmp_path, "gradient-underflow", text)["autocast-forward"]
    assert ".to(device).float()" in after
    two = text.replace(
        "    torch.nn.init", "    other = torch.nn.Linear(3, 1).half()\n    other(net.weight)\n    torch.nn.init"
    )
    assert spans(tmp_path, "gradient-underflow", two) == {}
