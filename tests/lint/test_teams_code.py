"""What the pages of the reference workloads say that lint finds in the teams' own code."""

from pathlib import Path

import pytest

from floatline.lint.paths import lint_paths

HALF_WEIGHTS = """import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype=torch.float16)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-6)
for ids in batches:
    ce_loss = F.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten())
    ce_loss = torch.clamp(ce_loss, 0, 6)
    ce_loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
NO_BATCHES = """uv run python runners/train.py \\
  trainer=fp16_safe \\
  trainer.max_epochs=3 \\
  trainer.limit_train_batches=0 \\
  exp_name=fp16_validation
"""
WITH_TEMPERATURE = """import torch
import torch.nn.functional as F


def train(model, teacher, batches, optimizer, temperature=1.5):
    for ids in batches:
        logits = model(ids).logits
        logits = torch.clamp(logits, -5, 5)
        kd = F.kl_div(F.log_softmax(logits / temperature, -1), teacher(ids))
        ce_loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        if torch.isnan(ce_loss) or torch.isinf(ce_loss):
            continue
        ce_loss = torch.clamp(ce_loss, 0, 6)
        total_loss = 0.05 * kd + 0.95 * ce_loss
        total_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
ISLAND = """import torch
from torch import nn


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.problematic_layer = nn.Conv2d(3, 8, 3), nn.Linear(8, 1)

    def forward(self, x):
        input = self.body(x).mean((2, 3))
        with torch.autocast("cuda", enabled=False):
            return self.problematic_layer(input)
"""
CASES = {
    "distill.py": (HALF_WEIGHTS, ["FL110", "FL128", "FL216"]),
    "distill_in_fp32.py": (
        HALF_WEIGHTS.replace("float16", "float32").replace("clamp(ce_loss, 0, 6)", "abs(ce_loss)"),
        [],
    ),
    "distill_loss.py": (WITH_TEMPERATURE, ["FL128"]),
    "distill_loss_without_clamps.py": (WITH_TEMPERATURE.replace("torch.clamp", "wrap"), []),
    "dbnet_island.py": (ISLAND, ["FL211"]),
    "dbnet_island_with_cast.py": (ISLAND.replace("(input)", "(input.float())"), []),
    "dbnet.sh": (NO_BATCHES, ["FL305"]),
    "dbnet_with_batches.sh": (NO_BATCHES.replace("batches=0", "batches=50"), []),
}


@pytest.mark.parametrize("name", CASES)
def test_the_teams_code_has_the_findings_that_the_pages_name(tmp_path: Path, name: str) -> None:
    text, codes = CASES[name]
    (tmp_path / name).write_text(text)
    assert sorted({finding.rule.code for finding in lint_paths([tmp_path / name]).findings}) == codes


def test_each_clamp_of_the_teams_loss_is_named(tmp_path: Path) -> None:
    (tmp_path / "loss.py").write_text(WITH_TEMPERATURE)
    lines = [finding.text for finding in lint_paths([tmp_path]).findings]
    assert lines == ["logits = torch.clamp(logits, -5, 5)", "ce_loss = torch.clamp(ce_loss, 0, 6)"]


def test_the_cast_that_an_island_lacks_is_spelled_with_its_names(tmp_path: Path) -> None:
    (tmp_path / "head.py").write_text(ISLAND)
    (finding,) = lint_paths([tmp_path]).findings
    assert finding.advice == "cast at the border: self.problematic_layer(input.float())"
    (tmp_path / "head.py").write_text(ISLAND.replace("(input)", "(input * 2)"))  # no name to spell it with
    (finding,) = lint_paths([tmp_path]).findings
    assert finding.advice == "cast at the border: self.head(x.float())"
