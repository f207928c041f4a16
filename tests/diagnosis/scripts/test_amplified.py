"""Rounding that an operation makes large is told, in most steps or not at all."""

import pytest
from tests.diagnosis.scripts.test_scripts import observe

LOOP = """
import torch, math
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear({width}, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    def forward(self, x):
{forward}
        return self.body(x)
net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(40):
    x = torch.rand(64, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        guess = net(x)
    loss = (guess.float() - torch.sin(20 * x[:, :1])).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
ANGLES = """
        angles = {cast}[:, :1] * {top} * 2.0 ** -torch.arange(8.0){low}
        x = angles.sin().float()  # here
"""
CENTRED = """
        x = ({offset} + x).bfloat16()
        mean = x.mean()
        x = (x - mean).float() * ((x * x).mean() - mean * mean).clamp(min=0).add(1e-3).rsqrt().float()  # here
"""


@pytest.mark.parametrize(
    ("forward", "width", "cause"),
    [
        (ANGLES.format(cast="x.bfloat16()", top=800, low=".bfloat16()"), 8, "integer-not-exact"),
        (CENTRED.format(offset=40), 4, "cancellation"),
        (ANGLES.format(cast="x", top=800, low=""), 8, ""),
        (ANGLES.format(cast="x.bfloat16()", top=3, low=".bfloat16()"), 8, ""),
        (CENTRED.format(offset=0), 4, ""),
    ],
    ids=["angles of 800", "a variance far from 0", "angles in FP32", "small angles", "a variance at 0"],
)
def test_an_operation_that_makes_a_large_error_of_rounding_is_told(tmp_path, forward, width, cause):
    path = tmp_path / "train.py"
    path.write_text(LOOP.format(forward=forward.strip("\n"), width=width), encoding="utf-8")
    found = observe(str(path))["findings"]
    assert [finding["cause"] for finding in found][:1] == ([cause] if cause else [])
    if cause:
        assert "# here" in path.read_text(encoding="utf-8").splitlines()[found[0]["line"] - 1]
