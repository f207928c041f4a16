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
CASES = {
    "distill.py": (HALF_WEIGHTS, ["FL110", "FL128", "FL216"]),
    "distill_in_fp32.py": (
        HALF_WEIGHTS.replace("float16", "float32").replace("clamp(ce_loss, 0, 6)", "abs(ce_loss)"),
        [],
    ),
    "dbnet.sh": (NO_BATCHES, ["FL305"]),
    "dbnet_with_batches.sh": (NO_BATCHES.replace("batches=0", "batches=50"), []),
}


@pytest.mark.parametrize("name", CASES)
def test_the_teams_code_has_the_findings_that_the_pages_name(tmp_path: Path, name: str) -> None:
    text, codes = CASES[name]
    (tmp_path / name).write_text(text)
    assert sorted({finding.rule.code for finding in lint_paths([tmp_path / name]).findings}) == codes
