"""Every example runs, and ends as its text says; those for torchrun are run by tests/integrations/test_torchrun.py."""

from pathlib import Path

import pytest
from tests.preloaded import run_preloaded
from tests.slow import mostly_slow

FOLDER = Path(__file__).parents[2] / "examples"
ENDINGS = {
    "guard_loop": [
        "78 applied, 2 skipped (2 forward-nonfinite)",
        "resumed at step 40: the weights are the same, bit for bit",
    ],
    "drop_in_scaler": ["torch.amp.GradScaler: scale 0, weights NaN", "fl.LossScaler: scale 1, weights finite"],
    "half_weights": ["float16, torch.optim.AdamW: loss nan", "14.01 a parameter"],
    "compare_runs": ["fp32 on val/loss: PASS", "fp32 on val/loss: FAIL"],
    "custom_workload": ["60 of 60 steps applied"],
    "lightning_fit": ["49 applied, 1 skipped (1 forward-nonfinite)", "global_step 49, schedule at 49"],
    "hf_trainer": ["fp16-true with floatline.optim.algorithms", "15 applied, 1 skipped", "weights finite"],
    "grpo_loop": ["fp32: 0 % of ratios outside", "What this does not show", "fp32-head: "],
}
NEEDS = {"lightning_fit": "lightning", "hf_trainer": "transformers"}


@pytest.mark.parametrize("name", mostly_slow(ENDINGS, every=3))
def test_the_example_runs_and_ends_as_it_says(name, tmp_path):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    run = run_preloaded([str(FOLDER / f"{name}.py")], cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    for ending in ENDINGS[name]:
        assert ending in run.stdout


# how_low is longer: it writes a page of its own.
SHORT = [path for path in sorted(FOLDER.glob("*.py")) if path.stem != "how_low"]


@pytest.mark.parametrize("path", SHORT, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_what_it_is(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 100
    assert lines[0].startswith('"""')
