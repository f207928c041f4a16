"""`floatline rescue -- python train.py`: a script is rescued as it is, by a change of its line or by a plan."""

import json
import subprocess
import sys
import textwrap

import pytest
from tests.slow import exhaustive, slow

from floatline.errors import RescueError
from floatline.rescuing.script_rescue import rescue_script

# The squares of a wide layer's outputs are summed up in FP16.
OVERFLOWING = """
    import torch
    from torch import nn

    torch.manual_seed(7)
    x = torch.randn(256, 16)
    y = x.sum(1, keepdim=True)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(60):
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
            loss = PENALTY
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.save(model.state_dict(), "model.pt")
"""
BROKEN = "nn.functional.mse_loss(out.float(), y) + 1e-6 * ((100 * out.half()) ** 2).mean()"
HEALTHY = "nn.functional.mse_loss(out.float(), y)"


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(penalty):
        (tmp_path / "train.py").write_text(textwrap.dedent(OVERFLOWING).replace("PENALTY", penalty), encoding="utf-8")
        return [sys.executable, "train.py"]

    return write


@slow
def test_a_broken_script_is_rescued_without_an_edit(script, tmp_path):
    words = script(BROKEN)
    text = (tmp_path / "train.py").read_text()
    (tmp_path / "model.pt").write_bytes(b"mine")
    found = rescue_script(words, folder="out")
    assert found.outcome == "rescued", found.words
    assert (tmp_path / "train.py").read_text() == text
    assert [tried.shortfall == "" for tried in found.tried][-1]
    assert found.tried[0].does == "nothing changed"
    assert found.tried[0].shortfall
    assert set(found.curves) == {"FP32", "as it is", "rescued"}
    assert any("own seeds" in note or "takes itself" in note for note in found.notes)


@slow
def test_a_rescue_that_was_ended_goes_on_with_what_is_finished(script, tmp_path):
    words = script(BROKEN)
    said: list[str] = []

    def stop(text):
        said.append(text)
        if text.startswith("validating"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rescue_script(words, folder="out", on_progress=stop)
    before, said = said, []
    found = rescue_script(words, folder="out", on_progress=said.append)
    assert any(text.startswith("training in FP32") for text in before)
    assert said[0].startswith("validating")
    assert found.outcome == "rescued"


@exhaustive
def test_the_command_says_what_to_do_next_and_what_it_names_trains(script, tmp_path):
    words = script(BROKEN)
    run = subprocess.run(
        [sys.executable, "-m", "floatline", "rescue", "--format", "json", "--folder", "out", "--", *words],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["outcome"] == "rescued"
    if found["by_patch"]:
        subprocess.run(["git", "init", "-q"], check=True)
        subprocess.run(["git", "apply", "out/fix.patch"], check=True)
    else:
        words = [sys.executable, "-m", "floatline", "run", "--plan", "out/plan.yaml", "--", *words]
    after = subprocess.run(words, capture_output=True, text=True, check=False)
    assert after.returncode == 0, after.stderr


@slow
def test_a_healthy_script_needs_no_rescue(script):
    found = rescue_script(script(HEALTHY), folder="out")
    assert found.outcome == "healthy"
    assert found.tried == ()


def test_a_script_about_which_nothing_can_be_said_is_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('nothing')\n")
    with pytest.raises(RescueError, match="no backward pass was seen"):
        rescue_script([sys.executable, "train.py"], folder="out")
