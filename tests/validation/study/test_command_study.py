"""A whole study of commands, and its sign-off."""

import json
import shlex
import subprocess
import sys

import pytest
from tests.preloaded import COMMAND, run_preloaded
from tests.slow import slow
from tests.validation.study.test_commands import SCRIPT
from typer.testing import CliRunner

from floatline.cli.main import app
from floatline.errors import ApprovalError, ComparisonError
from floatline.validation.command_study import validate_commands
from floatline.validation.signoff.approval import approve
from floatline.validation.signoff.status import check_all

PYTHON = shlex.quote(sys.executable)


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def study(**options):
    tail = "seed={seed} out={folder}/m.jsonl"
    return validate_commands(
        f"{PYTHON} train.py precision=32 {tail}",
        [f"{PYTHON} train.py precision=16 {tail}", f"{PYTHON} train.py precision=16 worse=0.1 {tail}"],
        metric="val/hmean",
        **{"higher_is_better": True, "jobs": 2, **options},
    )


@slow
def test_a_study_of_commands_is_kept_ranked_and_signed_off(place):
    result = study()
    assert {c.candidate: c.verdict for c in result.comparisons} == {
        "precision=16": "PASS",
        "precision=16-worse=0.1": "FAIL",
    }
    assert result.best.candidate == "precision=16"
    assert result.target == result.plans["precision=16"]["command"]
    assert "--higher-is-better" in result.reproduce and "{folder}" in result.reproduce
    folder = place / "floatline-runs" / "validate" / "train"
    assert json.loads((folder / "validation.json").read_text())["target"] == result.target
    assert (folder / "commands" / "fp32" / "0" / "m.jsonl").is_file()
    with pytest.raises(ApprovalError, match="is FAIL"):
        approve(folder, by="Ada", candidate="precision=16-worse=0.1")
    record = approve(folder, by="Ada")
    assert set(record.code) == {"train.py"}
    assert [standing.approved for standing in check_all()] == [True]
    (place / "train.py").write_text(SCRIPT + "# changed\n")
    assert check_all()[0].changed == ("train.py was changed",)
    with pytest.raises(ApprovalError, match="'train.py' was changed after the study began"):
        approve(folder, by="Ada")


def test_a_metric_that_reads_like_higher_is_better_is_asked_about(place):
    with pytest.raises(ComparisonError, match="--higher-is-better or --lower-is-better"):
        study(higher_is_better=None)
    assert not (place / "floatline-runs").exists()


@slow
def test_a_script_that_lacks_the_metric_is_refused_with_the_nearest_name(place):
    result = validate_commands(
        f"{PYTHON} train.py precision=32 seed={{seed}}",
        [f"{PYTHON} train.py precision=16 seed={{seed}}"],
        metric="val/hmaen",
    )
    assert result.verdict == "REFUSED"
    assert "Did you mean 'val/hmean'" in result.best.reason
    assert len(result.runs) <= 2


def command(*words: str) -> subprocess.CompletedProcess:
    return run_preloaded(["-c", COMMAND, "validate", *words])


@slow
def test_the_command_line_takes_commands_and_writes_the_report(place):
    words = [
        "validate",
        "--baseline", f"{PYTHON} train.py precision=32 seed={{seed}}",
        "--candidate", f"{PYTHON} train.py precision=16 seed={{seed}}",
        "--metric", "val/hmean", "--higher-is-better", "--folder", "one", "--format", "json",
    ]  # fmt: skip
    good = CliRunner().invoke(app, words)
    assert good.exit_code == 0, good.stderr
    fields = json.loads(good.stdout)
    assert (fields["verdict"], fields["candidate"], fields["seeds"]) == ("PASS", "precision=16", 3)
    assert "train.py precision=16" in (place / "one" / "report.md").read_text()


def test_a_wrong_use_is_one_line_and_leaves_nothing_behind(place):
    wrong = command("--baseline", "python train.py", "--candidate", "python t.py", "--metric", "a", "--folder", "two")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "has no {seed}" in wrong.stderr
    assert not (place / "two").exists()


@slow
def test_a_script_that_ignores_the_seed_is_refused(place):
    script = SCRIPT.replace('int(args["seed"])', "0")
    (place / "train.py").write_text(script)
    result = study()
    assert result.verdict == "REFUSED"
    assert "give the same training" in result.best.reason


@slow
def test_a_script_that_learns_nothing_is_refused(place):
    (place / "train.py").write_text(SCRIPT.replace("0.01 * s", "0.0"))
    result = study()
    assert result.verdict == "REFUSED"
    assert "a gain below 10 %" in result.best.reason
