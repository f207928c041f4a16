"""Loops that carry a value, and layers that a large input enters: in FP32, with the same result."""

import pytest
import torch
from tests.fixes.sources import spans

from floatline.numerics.half_on_cpu import HalfOnCPU

DIFFUSE = """

class Diffuse(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.eye_(self.mix.weight)

    def forward(self, field, hops=18):
        # every hop doubles it
        for hop in range(hops):
            push = self.mix(
                field,
            )
            field = field + push  # here
        return field
"""
STACK = """

class Stack(torch.nn.Module):
\tdef __init__(self):
\t\tsuper().__init__()
\t\tself.cells = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(18))
\t\tfor cell in self.cells:
\t\t\ttorch.nn.init.eye_(cell.weight)

\tdef forward(self, h):
\t\tstate = torch.relu(h)
\t\tfor i, cell in enumerate(self.cells):
\t\t\tif i >= 0:
\t\t\t\tstate += state @ cell.weight.t()  # here
\t\treturn state
"""


def run(text, name, x, dtype=None):
    values = {}
    exec(text, values)
    model = values[name]()
    with HalfOnCPU(), torch.autocast("cpu", dtype=dtype or torch.float16, enabled=dtype is not None):
        return model(x)


@pytest.mark.parametrize(("text", "name"), [(DIFFUSE, "Diffuse"), (STACK, "Stack")])
def test_a_loop_that_carries_a_growing_tensor_runs_in_fp32(tmp_path, text, name):
    after = spans(tmp_path, "activation-overflow", text, op="aten.add")["fp32-loop"]
    x = torch.ones(2, 4)
    head = "import torch\n"
    assert not run(head + text, name, x, torch.float16).isfinite().any()
    torch.testing.assert_close(run(after, name, x, torch.float16), run(head + text, name, x))
    assert "enabled=False):" in after


def test_comments_stay_above_the_region(tmp_path):
    after = spans(tmp_path, "activation-overflow", DIFFUSE, op="aten.add")["fp32-loop"]
    assert "        # every hop doubles it\n        with torch.autocast(field.device.type" in after


@pytest.mark.parametrize(
    "text",
    [
        # a number at first
        "def f(xs):\n    acc = 0.0\n    for x in xs:\n        acc = acc + x  # here\n    return acc\n",
        # None at first, for all that can be seen
        "def f(xs, acc=None):\n    for x in xs:\n        acc = acc + x  # here\n    return acc\n",
        # a training loop
        "def f(x, net):\n    for _ in range(3):\n        x = x + net(x)  # here\n        x.sum().backward()\n",
        # no loop, and nothing that is carried
        "def f(x, y):\n    x = x + y  # here\n    return x\n",
        "def f(x, y):\n    for i in range(3):\n        z = x + y  # here\n    return z\n",
        # a generator would leave the region open
        "def f(x, y):\n    for i in range(3):\n        x = x + y  # here\n        yield x\n",
    ],
)
def test_a_loop_that_is_not_known_to_carry_a_tensor_stays(tmp_path, text):
    assert "fp32-loop" not in spans(tmp_path, "activation-overflow", text, op="aten.add")


READER = """
from torch import nn


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))

    def forward(self, counts):
        logits = torch.tanh(self.trunk(counts))  # here
        return logits
"""


def test_the_layer_that_a_large_input_enters_is_fp32_and_the_rest_is_not(tmp_path):
    after = spans(tmp_path, "input-out-of-range", READER, part="net.trunk.0")["fp32-first"]
    assert "first = self.trunk[:1](counts.float())" in after
    assert "logits = torch.tanh(self.trunk[1:](first))  # here" in after
    x = torch.full((2, 4), 70000.0)
    torch.manual_seed(0)
    before = run("import torch\n" + READER, "Reader", x)
    torch.manual_seed(0)
    torch.testing.assert_close(run(after, "Reader", x), before)
    assert run(after, "Reader", x, torch.float16).isfinite().all()
    assert run("import torch\n" + READER, "Reader", x, torch.float16).isnan().any()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))", "nn.Linear(4, 2)"),
        ("nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))", "nn.Sequential(*make())"),
        ("torch.tanh(self.trunk(counts))", "self.trunk(counts) if counts.ndim else counts"),
        ("torch.tanh(self.trunk(counts))", "self.gate(counts) * self.trunk(counts)"),  # gate would run later
        ("logits", "first"),  # the name is taken
        ("self.trunk(counts)", "self.trunk(*counts)"),
    ],
)
def test_a_module_that_is_no_plain_sequential_is_not_split(tmp_path, old, new):
    assert old in READER
    text = READER.replace(old, new)
    assert "fp32-first" not in spans(tmp_path, "input-out-of-range", text, part="trunk.0")
