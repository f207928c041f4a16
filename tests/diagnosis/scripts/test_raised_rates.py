"""A run that diverges is blamed on the line that sets the learning rate: where the optimizer is made, or later."""

import pytest
from tests.diagnosis.scripts.test_scripts import observe

LOOP = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr={rate})  # made
for group in optimizer.param_groups:
    group["lr"] {change}  # set
for step in range(40):
    x = torch.randn(64, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    loss = (out.float() - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step(){more}
"""


@pytest.mark.parametrize(
    ("rate", "change", "more", "mark"),
    [
        ("1e-2", "*= 1e4", "", "# set"),
        ("1e-2", "= 100.0", "", "# set"),
        ("200.0", "*= 0.5", "", "# made"),
        ("1e-2", "*= 1e4", '\n    group["lr"] *= 0.99', "# made"),  # two lines set it: which is to blame is not known
    ],
)
def test_a_rate_that_is_raised_before_the_first_step_is_told_where_it_is_raised(rate, change, more, mark, tmp_path):
    script = tmp_path / "train.py"
    text = LOOP.format(rate=rate, change=change, more=more)
    script.write_text(text)
    found = observe(str(script))["findings"][0]
    assert found["cause"] == "optimization-divergence"
    assert text.splitlines()[found["line"] - 1].endswith(mark)
