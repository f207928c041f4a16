"""`floatline rescue` from end to end: an island, an optimizer, not precision, healthy, a loop of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from floatline.cli.main import app
from floatline.errors import TargetError
from floatline.plan import Plan

TARGETS = Path(__file__).parent / "targets.py"


def rescue(name, folder, *words):
    done = CliRunner().invoke(
        app, ["rescue", f"{TARGETS}:{name}", "--steps", "60", "--folder", str(folder), "--format", "json", *words]
    )
    return done.exit_code, json.loads(done.stdout)


def test_an_overflow_in_one_module_is_rescued_by_that_module_in_fp32(tmp_path):
    code, said = rescue("island", tmp_path)
    assert (code, said["outcome"], said["verdict"]) == (0, "rescued", "PASS")
    assert [kept["pattern"] for kept in said["plan"]["fp32_modules"]] == ["energy"]
    assert "65504" in said["plan"]["fp32_modules"][0]["reason"]
    assert [stage["name"] for stage in said["stages"]] == ["diagnose", "island", "plan", "validate"]
    assert "short validation (3 seeds, margin 5 %)" in said["words"] and not said["proved"]
    assert Plan.load(tmp_path / "plan.yaml").model_dump(mode="json") == said["plan"]
    assert "+++ b/" in (tmp_path / "fix.patch").read_text()
    assert json.loads((tmp_path / "rescue.json").read_text())["outcome"] == "rescued"
    page = (tmp_path / "report.html").read_text()
    assert all(words in page for words in ("product-overflow", "energy in FP32", "What is wrong", "PASS"))


def test_adam_on_fp16_weights_is_rescued_by_exact_updates(tmp_path):
    code, said = rescue("optimizer", tmp_path)
    assert (code, said["outcome"], said["plan"]["update"]) == (0, "rescued", "exact")
    assert said["plan"]["weights"] == "fp16" and said["island"] is None
    assert not (tmp_path / "fix.patch").exists()


def test_what_is_not_precision_gets_no_plan_but_a_word_and_what_an_earlier_rescue_left_is_taken_away(tmp_path):
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({"weights": "fp32", "compute": "fp16"}))
    code, said = rescue("divergence", tmp_path)
    assert (code, said["outcome"], said["plan"]) == (1, "not-precision", None)
    assert said["words"].startswith("This is not precision") and "learning rate" in said["words"]
    assert [stage["name"] for stage in said["stages"]] == ["diagnose"]
    assert not (tmp_path / "plan.yaml").exists() and (tmp_path / "report.html").exists()


def test_healthy_training_needs_no_plan(tmp_path):
    code, said = rescue("healthy", tmp_path)
    assert (code, said["outcome"], said["plan"], said["tried"]) == (0, "healthy", None, [])


def test_a_loop_of_its_own_gets_a_diagnosis_and_a_patch(tmp_path):
    code, said = rescue("train", tmp_path)
    assert (code, said["outcome"], said["plan"]) == (1, "code-change", None)
    assert "only train()" in said["notes"][0] and "scaler.step(optimizer)" in (tmp_path / "fix.patch").read_text()


@pytest.mark.parametrize("words", [["--folder", str(TARGETS)], ["--steps", "0"]])
def test_wrong_use_is_one_line_and_exit_code_2(words, tmp_path):
    command = [sys.executable, "-c", "from floatline.cli.main import main; main()", "rescue", str(TARGETS), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("floatline: ") and done.stderr.count("\n") == 1


def test_a_target_that_is_not_there_is_said_before_anything_is_written(tmp_path):
    done = CliRunner().invoke(app, ["rescue", "no_such.py", "--folder", str(tmp_path / "here")])
    assert isinstance(done.exception, TargetError) and not (tmp_path / "here").exists()
