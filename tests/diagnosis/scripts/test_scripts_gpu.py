"""Whole scripts on a GPU: the failing step is known one step late, and still explained on healthy weights."""

from pathlib import Path

import pytest
import torch

from floatline.diagnosis.scripts.main import explain
from floatline.probe.scripts.run import ScriptWatch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LOOP = """
import torch
from torch import nn

class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(32, 32)

    def forward(self, x, level):
        heights = self.mix(x) + level
        return torch.exp(heights) / 1000

torch.manual_seed(0)
gate = Gate().cuda().to(WEIGHTS)
opt = torch.optim.SGD(gate.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda", enabled=SCALED)
for step in range(60):
    opt.zero_grad()
    x = torch.randn(16, 32, device="cuda", dtype=WEIGHTS)
    with torch.autocast("cuda", torch.float16, enabled=WEIGHTS == torch.float32):
        y = gate(x, min(step, LAST) * 0.4)
    loss = y.float().sub(1).abs().mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
"""


def observe(tmp_path: Path, head: str):
    script = tmp_path / "loop.py"
    script.write_text(f"import torch; {head}\n{LOOP}", encoding="utf-8")
    watched = ScriptWatch([str(script)])
    watched.run()
    return explain(watched.sum_up(), "")


def test_a_late_overflow_is_found_on_healthy_weights(tmp_path):
    answer = observe(tmp_path, "WEIGHTS, SCALED, LAST = torch.float16, False, 99")
    first = answer["findings"][0]
    assert first["cause"] == "exp-overflow", answer
    assert first["op"] == "aten.exp"


@pytest.mark.parametrize("head", ["torch.float16, False, 10", "torch.float32, True, 10"])
def test_a_healthy_loop_is_left_in_peace(tmp_path, head):
    answer = observe(tmp_path, f"WEIGHTS, SCALED, LAST = {head}")
    assert [f["cause"] for f in answer["findings"] if f["cause"] != "update-lost-to-rounding"] == [], answer
    assert answer["unexplained"] == ""
    assert "recorded (step" in answer["notes"][0]
