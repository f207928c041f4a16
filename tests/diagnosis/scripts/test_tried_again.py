"""A failed step is tried again until it fails by itself, not by what the first failure left in the optimizer."""

import pytest
import torch
from tests.diagnosis.scripts.test_scripts import observe
from tests.slow import slow

RARE = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(40):
    rows = torch.randn(32, 8)
    share = torch.tensor(0.9999 if step % 3 == 1 else 0.5)
    weight = share.half() / (1 - share.half())  # here
    loss = weight.float() / (weight.float() + 1) * (model(rows) - rows.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
LOOSE = """
import torch
class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = torch.nn.Linear(8, 16), torch.nn.Linear(8, 16)
        self.log_scale = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.{dtype}))
torch.manual_seed(0)
pair = Pair()  # its own forward is never called
optimizer = torch.optim.Adam(pair.parameters(), lr=1e-3)
for step in range(60):
    rows = torch.randn(32, 8)
    scores = pair.left(rows) @ pair.right(rows + 0.1 * torch.randn(32, 8)).T * pair.log_scale.float().exp()
    loss = torch.nn.functional.cross_entropy(scores, torch.arange(32))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@slow
def test_a_failure_of_some_batches_is_found_though_the_optimizer_is_spoilt(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(RARE, encoding="utf-8")
    (first, *_) = observe(str(path))["findings"]
    assert first["cause"] == "rounded-onto-singularity"
    assert "# here" in RARE.splitlines()[first["line"] - 1]


@slow
@pytest.mark.parametrize(("dtype", "causes"), [("bfloat16", ["update-lost-to-rounding"]), ("float32", [])])
def test_a_weight_of_a_module_that_is_never_called_is_seen_to_stand_still(tmp_path, dtype, causes):
    path = tmp_path / "train.py"
    path.write_text(LOOSE.format(dtype=dtype), encoding="utf-8")
    found = observe(str(path))["findings"]
    assert [finding["cause"] for finding in found] == causes
    assert not causes or "parameter 0 of torch.optim.Adam" in found[0]["seen"]


def test_a_script_that_ends_while_a_failure_is_tried_again_keeps_its_own_weights(tmp_path):
    path, kept = tmp_path / "train.py", tmp_path / "kept.pt"
    steps = RARE.replace("range(40)", "range(3)").replace("step % 3 == 1", "step == 1")
    path.write_text(f"{steps}\ntorch.save(model.state_dict(), {str(kept)!r})\n", encoding="utf-8")
    observe(str(path))
    assert all(weight.isnan().all() for weight in torch.load(kept).values())
