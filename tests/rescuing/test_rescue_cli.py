"""`floatline rescue` from end to end: an island, an optimizer, not precision, healthy, a loop of its own."""

import importlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.preloaded import COMMAND, run_preloaded
from tests.slow import slow
from typer.testing import CliRunner

from floatline.cli.main import app
from floatline.diagnosis.result import Diagnosis
from floatline.errors import ApprovalError, TargetError
from floatline.plans import Plan
from floatline.validation.result import Validation

TARGETS = Path(__file__).parent / "targets.py"


def invoke(*words):
    more = ["--format", "json"] if words[0] == "train" else []
    return CliRunner().invoke(app, [*words, *more])


def rescue(name, folder, *words):
    done = CliRunner().invoke(
        app,
        [
            "rescue",
            f"{TARGETS}:{name}",
            "--steps",
            "60",
            "--folder",
            str(folder),
            "--format",
            "json",
            "--budget",
            "600",
            *words,
        ],
    )
    return done.exit_code, json.loads(done.stdout)


def command(*words):
    return [sys.executable, "-c", COMMAND, *words]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with the targets and a rescue of `island` that was ended twice by Ctrl-C, and then came to its end."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copy(TARGETS, folder)
    words = command(
        "rescue", "targets.py:island", "--steps", "60", "--folder", "out", "--format", "json", "--budget", "600"
    )
    stages = folder / "out" / "stages"
    ended = []
    for mark in ("diagnose.json", "short-1/runs/fp32/0.json"):
        (folder / "hold").write_text(str(stages / mark))  # the target waits there, so that the end is not near
        with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            while process.poll() is None and not (stages / mark).exists():
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            said, complained = process.communicate(timeout=250)
            ended.append((process.returncode, said, complained))
    (folder / "hold").unlink()
    before = {path.name: path.read_bytes() for path in stages.glob("*.json")}
    run = (stages / "short-1/runs/fp32/0.json").read_bytes()
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert (stages / "short-1/runs/fp32/0.json").read_bytes() == run
    return SimpleNamespace(folder=folder, out=folder / "out", ended=ended, before=before, done=done)


@slow
@pytest.mark.slow
def test_ctrl_c_is_one_line_after_those_of_the_stages_and_130(project):
    assert [code for code, _, _ in project.ended] == [130, 130]
    for _, said, complained in project.ended:
        *stages, last = complained.splitlines()
        assert said == "" and last == "floatline: interrupted. What is finished is kept: the same command goes on."
        assert stages and all(stage.startswith("floatline: ") for stage in stages)


@slow
def test_the_same_command_goes_on_with_what_was_finished(project):
    assert {"asked.json", "diagnose.json", "island.json", "trials.json"} <= set(project.before)
    for name, data in project.before.items():
        assert (project.out / "stages" / name).read_bytes() == data
    said = json.loads(project.done.stdout)
    kept = json.loads(project.before["diagnose.json"])["seconds"]
    assert said["stages"][0]["seconds"] == round(kept, 3)


@slow
def test_an_overflow_in_one_module_is_rescued_by_that_module_in_fp32(project):
    said = json.loads(project.done.stdout)
    assert (project.done.returncode, said["outcome"], said["verdict"]) == (0, "rescued", "PASS")
    assert [kept["pattern"] for kept in said["plan"]["fp32_modules"]] == ["energy"]
    assert "65504" in said["plan"]["fp32_modules"][0]["reason"]
    assert [stage["name"] for stage in said["stages"]] == ["diagnose", "island", "plan", "validate", "patch"]
    assert "short validation (5 seeds, margin 5 %)" in said["words"] and not said["proved"]
    assert Plan.load(project.out / "plan.yaml").model_dump(mode="json") == said["plan"]
    assert "+++ b/" in (project.out / "fix.patch").read_text()
    tried = "With this change it is healthy: 60 steps without a finding, compared with FP32."
    assert (said["diagnosis"]["findings"][0]["tried"], said["stages"][-1]["text"]) == (tried, tried)
    page = (project.out / "report.html").read_text()
    assert all(words in page for words in ("product-overflow", "energy in FP32", "What is wrong", "PASS"))


@slow
def test_rescue_json_is_what_was_printed_and_the_whole_validation(project):
    full, said = json.loads((project.out / "rescue.json").read_text()), json.loads(project.done.stdout)
    assert {name: full[name] for name in said} == said and set(full) - set(said) == {"asked", "validation"}
    validation = Validation.from_json(full["validation"])
    assert (validation.verdict, validation.target) == ("PASS", "targets.py:island")
    assert list(full["asked"]["code"]["fp16-mixed-rescued"]) == ["targets.py"]
    assert set(said) == {
        *("target", "outcome", "words", "diagnosis", "plan", "does", "island", "tried", "fixes", "verdict", "margin"),
        *("proved", "seeds", "stages", "notes", "by_patch", "seconds", "files"),
    }


@slow
@pytest.mark.parametrize("report", ["out", "out/rescue.json", "out/report.html"])
def test_a_rescue_is_approved_and_train_uses_its_plan(project, monkeypatch, tmp_path, report):
    shutil.copytree(project.folder, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    nothing = invoke("train", "targets.py:island", "--steps", "2", "--folder", "before")
    assert json.loads(nothing.stdout)["plan"] == "fp16-mixed" and "approved" not in nothing.stderr
    assert invoke("approve", report, "--by", "Ada").exit_code == 0
    assert invoke("status", "targets.py:island").exit_code == 0
    used = invoke("train", "targets.py:island", "--steps", "2", "--folder", "used")
    assert json.loads(used.stdout)["plan"] == "fp16-mixed-rescued"
    assert re.fullmatch(
        r"floatline: plan fp16-mixed-rescued: approved \S+ by Ada\. --plan overrides it\.\n", used.stderr
    )
    assert Plan.load(Path("used/plan.yaml")).fp32_modules[0].pattern == "energy"


@slow
def test_what_is_said_goes_before_what_is_approved(project, monkeypatch, tmp_path):
    shutil.copytree(project.folder, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    invoke("train", "targets.py:island", "--steps", "2", "--folder", "before")
    assert invoke("approve", "out", "--by", "Ada").exit_code == 0
    given = invoke("train", "targets.py:island", "--steps", "2", "--folder", "given", "--plan", "bf16-mixed")
    assert json.loads(given.stdout)["plan"] == "bf16-mixed" and given.stderr == ""
    on = invoke("train", "targets.py:island", "--steps", "3", "--folder", "before", "--resume")
    assert json.loads(on.stdout)["plan"] == "fp16-mixed"  # a run goes on as it was begun
    Path("targets.py").write_text(Path("targets.py").read_text() + "# changed\n")
    stale = invoke("train", "targets.py:island", "--steps", "2", "--folder", "stale")
    assert json.loads(stale.stdout)["plan"] == "fp16-mixed-rescued"
    assert "CHANGED since: targets.py was changed" in stale.stderr
    assert invoke("rollback", "targets.py:island", "--reason", "NaN").exit_code == 0
    back = invoke("train", "targets.py:island", "--steps", "2", "--folder", "back")
    assert json.loads(back.stdout)["plan"] == "fp32" and "rolled back" in back.stderr


@slow
@pytest.mark.slow
def test_code_that_was_changed_since_is_not_signed(project, monkeypatch, tmp_path):
    shutil.copytree(project.folder, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    Path("targets.py").write_text(Path("targets.py").read_text() + "# changed\n")
    assert "was changed after the study began" in str(invoke("approve", "out", "--by", "Ada").exception)


@slow
@pytest.mark.slow
def test_an_approved_plan_that_was_edited_is_not_trained_with(project, monkeypatch, tmp_path):
    shutil.copytree(project.folder, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    assert invoke("approve", "out", "--by", "Ada").exit_code == 0
    file = Path("floatline-approvals.yaml")
    file.write_text(file.read_text().replace("pattern: energy", "pattern: body"))
    refused = invoke("train", "targets.py:island", "--steps", "2")
    assert isinstance(refused.exception, ApprovalError) and "was edited" in str(refused.exception)
    assert not Path("runs").exists()


@slow
def test_a_rescue_without_a_plan_cannot_be_signed(tmp_path):
    rescue("divergence", tmp_path)
    refused = CliRunner().invoke(app, ["approve", str(tmp_path), "--by", "Ada"])
    assert isinstance(refused.exception, ApprovalError)
    assert "the rescue ended 'not-precision'" in str(refused.exception)


@slow
def test_adam_on_fp16_weights_is_rescued_by_exact_updates(tmp_path):
    code, said = rescue("optimizer", tmp_path)
    assert (code, said["outcome"]) == (0, "rescued"), said
    assert said["plan"]["update"] == "exact"
    assert said["plan"]["weights"] == "fp16" and said["island"] is None
    assert "fp16-mixed" in (tmp_path / "fix.patch").read_text()  # FP32 weights are the change of the code


@slow
def test_what_is_not_precision_gets_no_plan_but_a_word_and_what_an_earlier_rescue_left_is_taken_away(tmp_path):
    (tmp_path / "plan.yaml").write_text("weights: fp32\ncompute: fp16\n")
    (tmp_path / "rescue.json").write_text("{}")
    code, said = rescue("divergence", tmp_path)
    assert (code, said["outcome"], said["plan"]) == (1, "not-precision", None)
    assert said["words"].startswith("This is not precision") and "learning rate" in said["words"]
    assert [stage["name"] for stage in said["stages"]] == ["diagnose"]
    assert not (tmp_path / "plan.yaml").exists() and (tmp_path / "report.html").exists()


@slow
def test_healthy_training_needs_no_plan(tmp_path):
    code, said = rescue("healthy", tmp_path)
    assert (code, said["outcome"], said["plan"], said["tried"]) == (0, "healthy", None, [])


@slow
def test_a_loop_of_its_own_gets_a_diagnosis_and_a_patch(tmp_path):
    code, said = rescue("train", tmp_path)
    assert (code, said["outcome"], said["plan"]) == (1, "code-change", None)
    assert "only train()" in said["notes"][0] and "scaler.step(optimizer)" in (tmp_path / "fix.patch").read_text()


@slow
def test_a_patch_that_does_not_hold_is_not_written_and_is_tried_once(tmp_path, monkeypatch):
    module, runs = importlib.import_module("floatline.rescuing.rescue"), []

    def run_without_effect(target, sources, *, steps, seed):
        runs.append((target, *sources, steps, seed))
        return Diagnosis(target, "fp16-mixed", (), 1.0, unexplained="the loss is not finite")

    monkeypatch.setattr(module, "run_changed_target", run_without_effect)
    first = module.rescue(f"{TARGETS}:train", folder=tmp_path, steps=60)
    again = module.rescue(f"{TARGETS}:train", folder=tmp_path, steps=60)  # it was not written, so it goes on
    assert runs == [(f"{TARGETS}:train", str(TARGETS), 60, 0)]
    assert first.diagnosis.primary == again.diagnosis.primary and first.stages == again.stages
    assert again.diagnosis.primary.tried == ("scaler.step(optimizer) … does not help: the loss is not finite.")
    assert (again.outcome, again.fixes, again.patch) == ("code-change", (), "")
    assert "fix.patch" not in again.words


@pytest.mark.parametrize("words", [["--folder", str(TARGETS)], ["--steps", "0"], ["--folder", "foreign"]])
def test_wrong_use_is_one_line_and_exit_code_2(words, tmp_path):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "plan.yaml").write_text("mine")
    done = run_preloaded(["-c", COMMAND, "rescue", str(TARGETS), *words], cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("floatline: ") and done.stderr.count("\n") == 1


def test_a_target_that_is_not_there_is_said_before_anything_is_written(tmp_path):
    done = CliRunner().invoke(app, ["rescue", "no_such.py", "--folder", str(tmp_path / "here")])
    assert isinstance(done.exception, TargetError) and not (tmp_path / "here").exists()
