"""Logarithms and quotients under CUDA's autocast lists, which compute them in FP32: as scripts and as targets."""

import pytest
from tests.cases.both_ways import LISTS, LOOP, diagnose_as_script, diagnose_target, under
from tests.slow import slow

# Build() as users write it; the line to blame ends with a mark. What a GPU's autocast computes in FP32 differs from the
# CPU's, and so may the cause.
HEAD = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, outputs, gain):
        super().__init__()
        self.head = nn.Linear(8, outputs)
        with torch.no_grad():
            self.head.weight.mul_(gain)

    def forward(self, x):
        return self.head(x)


def make(loss_fn, outputs, gain):
    g = torch.Generator().manual_seed(3)
    batches = [((torch.randn(32, 8, generator=g),), (torch.randint(0, max(outputs, 2), (32,), generator=g),))]
    return Net(outputs, gain), batches, loss_fn, "fp16-mixed", lambda m: torch.optim.SGD(m.parameters(), 1e-3)

"""
LOSSES = {
    "log of a probability and a guard": """
def loss_fn(out, y):
    p = torch.sigmoid(out)
    return -torch.log(p + 1e-8).mean()  # !


def build():
    return make(loss_fn, 1, 20.0)
""",
    "log of a sigmoid": """
def loss_fn(margin, y):
    return -torch.log(torch.sigmoid(margin)).mean()  # !


def build():
    return make(loss_fn, 1, 20.0)
""",
    "log of a sigmoid that is 0 in FP32, too": """
def loss_fn(margin, y):
    return -torch.log(torch.sigmoid(margin)).mean()  # !


def build():
    return make(loss_fn, 1, 80.0)
""",
    "log of a softmax in the dtype of its input": """
def loss_fn(x, y):
    return -torch.log(torch.softmax(x, 1).to(x.dtype)).gather(1, y[:, None]).mean()  # !


def build():
    return make(loss_fn, 6, 12.0)
""",
    "quotient by a spread and a guard": """
def loss_fn(x, y):
    flat = x * 0 + 1
    return ((x - x.mean()) / (flat.std() + 1e-8)).square().mean()  # !


def build():
    return make(loss_fn, 1, 1.0)
""",
}
# Guards are lost in 16 bits, and probabilities become 0: none of it happens in FP32, but for the one that says so.
CAUSES = {
    "log of a probability and a guard": ("precision", "eps-underflow"),
    "log of a sigmoid": ("precision", "rounded-onto-singularity"),
    "log of a sigmoid that is 0 in FP32, too": ("not-precision", "singular-gradient"),
    "log of a softmax in the dtype of its input": ("precision", "rounded-onto-singularity"),
    "quotient by a spread and a guard": ("precision", "eps-underflow"),
}


@slow
@pytest.mark.parametrize("lists", LISTS)
@pytest.mark.parametrize("way", [pytest.param("target", marks=pytest.mark.slow), "script"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_line_and_the_cause_are_named(name, way, lists, tmp_path):
    text = HEAD + LOSSES[name]
    file = tmp_path / "case.py"
    file.write_text(text + (LOOP.format(name="build", device="cpu") if way == "script" else ""), encoding="utf-8")
    with under(lists):
        said = diagnose_as_script(file) if way == "script" else diagnose_target(str(file))
    assert (said.verdict, said.cause) == CAUSES[name], said.text
    line = text[: text.index("# !")].count("\n") + 1
    assert said.line == f"case.py:{line}"
