"""A warning of torch that floatline stands in the way of names the user's line."""

import sys

from tests.preloaded import COMMAND, run_preloaded
from tests.slow import slow

SCRIPT = """import torch
from torch import nn

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.ones(2, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    last = float(loss)
"""


@slow
def test_the_number_of_a_tensor_with_a_gradient_warns_at_the_scripts_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    alone = run_preloaded([str(script)], cwd=tmp_path).stderr
    assert f"{script}:11: UserWarning" in alone
    words = ["-c", COMMAND, "diagnose", "--once", "--", sys.executable, str(script)]
    watched = run_preloaded(words, cwd=tmp_path).stderr
    assert f"{script}:11: UserWarning" in watched
    assert "read_values.py" not in watched
