"""Scripts that train nothing: calls of models are looked into, and what is computed between them."""

import sys

import pytest
from tests.slow import slow

from floatline.diagnosis.forward.script import diagnose_forward_script
from floatline.errors import TargetError

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
"""
GENERATES = """
class Net(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.emb, self.up, self.down = nn.Embedding(40, 16), nn.Linear(16, 32), nn.Linear(32, 40)
        self.size = size
    def forward(self, ids):
        x = self.emb(ids)
        h = self.up(x) * self.size
        return self.down(h * h / self.size / self.size)
@torch.inference_mode()
def main():
    net, ids = Net(SIZE).bfloat16(), torch.zeros(1, 3, dtype=torch.long)
    for _ in range(6):
        ids = torch.cat([ids, net(ids)[:, -1:].argmax(-1)], 1)
    print("made", ids.shape)
main()
"""
BETWEEN = """
net = nn.Linear(16, 8).half()
with torch.no_grad():
    logits = net(torch.randn(4, 16).half())
    weights = (logits * FACTOR).exp()
    print((weights / weights.sum(-1, keepdim=True)).argmax(-1))
"""
POSITIONS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, 8)
    def forward(self, place):
        angle = place[:, None].float() * torch.logspace(0, -3, 16)
        return self.out(angle.sin().to(self.out.weight.dtype))
net = Net().half()
with torch.no_grad():
    place = torch.arange(6000).CAST
    print(net(place).float().mean())
"""


def run(tmp_path, text):
    script = tmp_path / "script.py"
    script.write_text(HEAD + text)
    return diagnose_forward_script([sys.executable, str(script)], keep_stdout=True), (HEAD + text).splitlines()


def line_of(code, lines):
    return next(number for number, text in enumerate(lines, start=1) if code in text)


@slow
def test_a_model_that_generates_is_explained_where_fp16_breaks_it(tmp_path):
    found, lines = run(tmp_path, GENERATES.replace("SIZE", "2000.0"))
    assert (found.verdict, found.status, found.exit_code) == ("precision", 1, 0)
    assert (found.primary.cause.id, found.primary.line) == ("product-overflow", line_of("h * h", lines))
    assert "3 of 6 calls of modules looked into (Net)" in found.notes


@slow
def test_the_same_with_numbers_that_fit_is_healthy(tmp_path):
    found, _ = run(tmp_path, GENERATES.replace("SIZE", "2.0"))
    assert (found.verdict, found.status) == ("healthy", 0)
    assert [row.arm for row in found.outputs] == ["fp16", "bf16", "floor"]


@slow
def test_what_overflows_between_calls_is_named_and_its_twin_is_healthy(tmp_path):
    found, lines = run(tmp_path, BETWEEN.replace("FACTOR", "40"))
    assert (found.primary.cause.id, found.primary.line) == ("exp-overflow", line_of(".exp()", lines))
    assert run(tmp_path, BETWEEN.replace("FACTOR", "1"))[0].verdict == "healthy"


@slow
def test_positions_that_were_rounded_before_the_call_are_named_and_their_twin_is_healthy(tmp_path):
    found, lines = run(tmp_path, POSITIONS.replace("CAST", "half()"))
    assert (found.primary.cause.id, found.primary.line) == ("integer-not-exact", line_of("torch.arange(6000)", lines))
    assert run(tmp_path, POSITIONS.replace("CAST", "float()"))[0].verdict == "healthy"


@slow
def test_a_script_without_a_model_has_no_verdict(tmp_path):
    found, _ = run(tmp_path, "print('nothing')\n")
    assert (found.verdict, found.status) == ("no-verdict", 2)
    assert "no module was called" in found.no_verdict


@slow
def test_a_script_that_ends_with_an_error_keeps_its_exit_code(tmp_path):
    found, _ = run(tmp_path, GENERATES.replace("SIZE", "2000.0") + "raise SystemExit(7)\n")
    assert (found.exit_code, found.status, found.verdict) == (7, 7, "precision")


def test_a_command_that_is_no_python_is_refused():
    with pytest.raises(TargetError, match="is not Python"):
        diagnose_forward_script(["ls"])
