"""`floatline rescue -- python train.py`: a script is rescued as it is, by a change of its line or by a plan."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.preloaded import COMMAND, run_preloaded
from tests.slow import exhaustive, slow

from floatline.causes import find_cause
from floatline.diagnosis.scripts.script_report import ScriptDiagnosis
from floatline.errors import ComparisonError, RescueError, TargetError
from floatline.findings import Finding
from floatline.rescuing import script_rescue as module
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
    print(f"val loss {nn.functional.mse_loss(model(x), y).item():.5f}")
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


@exhaustive
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


@exhaustive
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


def rescue_by(metric, *words):
    start = ["rescue", "--metric", metric, "--folder", "out", "--format", "json"]
    return run_preloaded(["-c", COMMAND, *start, "--", *words], cwd=Path.cwd())


@exhaustive
def test_a_script_is_validated_by_what_it_prints(script):
    run = rescue_by(r"val loss (?P<value>[0-9.]+)", *script(BROKEN))
    found = json.loads(run.stdout)
    assert (found["outcome"], run.returncode) in (("rescued", 0), ("not-verified", 1)), run.stderr
    assert found["margin"] == "5 %"  # FP32's losses say nothing of another metric
    runs = json.loads(Path("out/rescue.json").read_text())["validation"]["runs"]
    files = Path("out/stages/short-1/scripts").glob("*/0/stdout.txt")
    printed = {path.parent.parent.name: path.read_text().split() for path in files}
    assert {one["arm"]: one["metric"] for one in runs if one["seed"] == 0} == {
        arm: float(words[-1]) for arm, words in printed.items() if arm != "seeds"
    }


@exhaustive
def test_a_metric_that_is_never_printed_is_told_with_what_to_do(script, monkeypatch):
    def diagnose(words, **_):
        line = next(n for n, text in enumerate(Path("train.py").read_text().splitlines(), 1) if "half()" in text)
        found = Finding(find_cause("product-overflow"), "seen", "fix", file=str(Path("train.py").resolve()), line=line)
        return ScriptDiagnosis(" ".join(words), "fp16-mixed", (found,), 0.0)

    monkeypatch.setattr(module, "diagnose_script", diagnose)
    found = rescue_script(script(BROKEN), folder="out", metric=r"accurate to (?P<value>[0-9.]+)")
    assert (found.outcome, found.validation.verdict) == ("not-verified", "REFUSED")
    said = found.validation.best.reason
    assert "matches nothing that the script prints. Its last line is 'val loss " in said
    assert "Write an expression for a line that it prints, such as 'val loss" in said
    assert "\n" not in said
    assert {run.seed for run in found.validation.runs} == {0}  # no other seed is tried for nothing


NO_GROUP = "has no group that holds the value. Write 'val loss (?P<value>[0-9.]+)'."
WRONG = [
    ("val loss [0-9.]+", NO_GROUP),
    (r"val loss (?:\d+)", NO_GROUP),
    ("val loss (", "Escape its brackets."),
    ("accuracy ([0-9.]+)", "Say --higher-is-better or --lower-is-better."),
]


@pytest.mark.parametrize(("metric", "said"), WRONG)
def test_a_metric_that_no_study_can_be_made_by_is_refused_before_anything_runs(script, metric, said):
    words, heard = script(BROKEN), []
    with pytest.raises(ComparisonError, match=re.escape(said)):
        rescue_script(words, folder="out", metric=metric, on_progress=heard.append)
    assert heard == []


def test_the_command_says_what_is_wrong_with_a_metric_in_one_line(script):
    run = rescue_by(WRONG[0][0], *script(BROKEN))
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == f"floatline: --metric '{WRONG[0][0]}' {NO_GROUP}\n"


@pytest.mark.slow
def test_a_metric_that_can_be_compared_by_is_taken(script, tmp_path):
    words = script(HEALTHY)
    (tmp_path / "train.py").write_text("print('nothing')\n")
    with pytest.raises(RescueError, match="no backward pass was seen"):
        rescue_script(words, folder="out", metric=WRONG[3][0], higher_is_better=True)


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


@exhaustive
def test_a_healthy_script_needs_no_rescue(script):
    found = rescue_script(script(HEALTHY), folder="out")
    assert found.outcome == "healthy"
    assert found.tried == ()


@slow
def test_a_script_about_which_nothing_can_be_said_is_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('nothing')\n")
    with pytest.raises(RescueError, match="no backward pass was seen"):
        rescue_script([sys.executable, "train.py"], folder="out")


def test_a_command_that_is_none_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    heard = []
    for words in ([], ["bash", "train.sh"]):
        with pytest.raises(TargetError, match="Give 'python train.py"):
            rescue_script(words, folder="out", on_progress=heard.append)
    assert heard == []
    assert not Path("out").exists()


@pytest.mark.parametrize(("seconds", "is_told"), [(130.0, True), (3.0, False)])
def test_a_script_that_takes_minutes_before_its_first_step_is_told_what_follows(script, monkeypatch, seconds, is_told):
    words, heard = script(BROKEN), []
    found = Finding(find_cause("product-overflow"), "", "", file=str(Path("train.py").resolve()), line=15)
    made = ScriptDiagnosis("train.py", "fp16-mixed", (found,), 0.0, start_seconds=seconds)
    monkeypatch.setattr(module, "diagnose_script", lambda *_, **__: made)
    monkeypatch.setattr(module._ScriptRescuer, "_look_at_seeds", lambda _: None)
    monkeypatch.setattr(module._ScriptRescuer, "_try", lambda *_: (None, None, None))
    result = rescue_script(words, folder="out", on_progress=heard.append)
    said = [text for text in heard if "before its first step" in text]
    assert [text.partition(" in each")[0] for text in said] == (
        ["the script takes 130 s before its first step,"] if is_told else []
    )
    assert all(f"{option} " in text for text in said for option in ("--steps", "--budget", "--limit"))
    assert any("takes 130 s" in note for note in result.notes) == is_told
