"""The score of changes for planted scripts: what does not hold stands first, and a change that holds is told so."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from tests.scripts.planted import FOLDER
from tests.slow import slow

TOOLS = FOLDER.parent.parent / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return __import__("script_fixes")


def test_a_change_that_does_not_hold_stands_first_and_is_counted(tool: ModuleType) -> None:
    good = tool.ScriptFix("good", "product-overflow", "x.float()", "", "", "With this change")
    bad = replace(good, name="bad", wrong="FP32 ends at 2 instead of 1")
    none = replace(good, name="none", code="", said="no change of the source is known")
    unread = replace(good, name="unread", unknown="losses were not read")
    lines = tool.page([good, none, bad, unread]).splitlines()
    assert lines[1].startswith("All 4 have their cure in the source.")
    assert lines[1].endswith("**2 of 4, 50 %, and 1**.")
    lines = lines[2:]
    assert lines[3:8] == [
        "| are offered a change that does not hold | 1 |",
        "| get a change | 3 |",
        "| ... that parses, is healthy in 16 bits beside FP32, and keeps FP32's result | 1 |",
        "| ... that parses and is healthy, and whose losses say nothing | 1 |",
        "| get none | 1 |",
    ]
    assert [line.split("|")[1].strip() for line in lines[11:-1]] == ["bad", "none", "good", "unread"]
    assert lines[11].endswith("| **FP32 ends at 2 instead of 1** |")


def test_a_change_that_does_not_parse_is_wrong(tool: ModuleType, tmp_path: Path) -> None:
    changed = tmp_path / "train.py"
    changed.write_text("x = (\n", encoding="utf-8")
    wrong, _ = tool.find_wrong(changed, changed, [], healthy=changed)
    assert wrong.startswith("does not parse")


OVERFLOWING = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(12):
    x = torch.randn(32, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean() {more}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@slow
@pytest.mark.parametrize(("more", "wrong"), [("+ 0.0", ""), ("* 0.5", "FP32 ends at")])
def test_a_changed_script_that_trains_another_function_is_wrong(
    tool: ModuleType, tmp_path: Path, more: str, wrong: str
) -> None:
    paths = [tmp_path / name / "train.py" for name in ("before", "after")]
    for path, text in zip(paths, ("", more), strict=True):
        path.parent.mkdir()
        path.write_text(OVERFLOWING.replace("{more}", text), encoding="utf-8")
    found, unknown = tool.find_wrong(*paths, [], healthy=paths[0])
    assert found.startswith(wrong)
    assert bool(found) == bool(wrong)
    assert not unknown


def test_losses_of_steps_that_a_scaler_skips_may_be_infinite(tool: ModuleType) -> None:
    fp32 = tool.Trial(tuple(1.0 - 0.02 * i for i in range(40)), (), "", 1.0)
    skipping = replace(fp32, losses=(1.0, float("inf"), *fp32.losses[2:]), skipped=(1,))
    assert tool.look_at_losses(skipping, fp32) == ""
    assert "not finite" in tool.look_at_losses(replace(skipping, skipped=()), fp32)


@slow
def test_a_planted_script_is_scored(tmp_path: Path) -> None:
    words = [sys.executable, str(TOOLS / "score_fixes.py"), "--scripts", "gpt/mask_of_minus_1e9", "--processes", "1"]
    run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    first = run.stdout.splitlines()[0]
    assert first.startswith("| gpt/mask_of_minus_1e9 | scalar-out-of-range | `")
    assert first.endswith("| yes |")
