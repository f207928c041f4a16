"""Sign-off: only a PASS goes without a reason, and whatever changes afterwards is seen."""

import hashlib
import json
import multiprocessing
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tests.preloaded import COMMAND, run_preloaded
from tests.slow import slow
from tests.validation.studies import arms
from typer.testing import CliRunner

from floatline.base.files import find_root
from floatline.cli.main import app
from floatline.errors import ApprovalError
from floatline.plans.presets import PLANS
from floatline.validation.result import Validation
from floatline.validation.signoff import status
from floatline.validation.signoff.approval import approve, find_current, name_target, roll_back
from floatline.validation.signoff.records import APPROVALS, ISSUES, append_issue, read_records
from floatline.validation.signoff.status import approved_plan, check_all, check_target
from floatline.validation.verdict.terms import Terms
from floatline.validation.verdict.verdict import decide

TARGET = "from helper import width\n\n\ndef build(seed=0):\n    raise NotImplementedError(width)\n"
ENVIRONMENT = {"torch": "2.13", "python": "3.11", "devices": "CPU", "commit": "abc", "date": "today"}


@pytest.fixture
def repository(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    (tmp_path / "train.py").write_text(TARGET)
    (tmp_path / "helper.py").write_text("width = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(status, "describe_environment", lambda target: dict(ENVIRONMENT, commit="def"))
    return tmp_path


def study(root: Path, excess=0.001, *, name="study", target="train.py", code=None) -> Path:
    """A study folder as a validation leaves it; the verdict is that of its runs."""
    folder = root / name
    folder.mkdir(exist_ok=True)
    runs = arms([excess + 1e-4 * seed for seed in range(3)])
    comparison = decide(runs, candidate="fp16-mixed", terms=Terms())
    plans = {"fp16-mixed": PLANS["fp16-mixed"].model_dump(mode="json")}
    validation = Validation(target, (comparison,), tuple(runs), plans=plans, environment=ENVIRONMENT)
    digest = hashlib.sha256((root / "train.py").read_bytes()).hexdigest()
    (folder / "study.json").write_text(json.dumps({"asked": {"code": digest if code is None else code}}))
    save(folder, validation)
    return folder


def save(folder: Path, validation: Validation) -> None:
    (folder / "validation.json").write_text(json.dumps(validation.as_json()))


def load(folder: Path) -> Validation:
    return Validation.from_json(json.loads((folder / "validation.json").read_text()))


def test_a_pass_is_signed_and_everything_is_kept(repository):
    folder = study(repository)
    record = approve(folder, by="Ada", note="for the nightly run")
    assert read_records(repository) == [record]
    assert (record.target, record.verdict, record.override) == ("train.py", "PASS", "")
    assert record.report_sha256 == hashlib.sha256((folder / "validation.json").read_bytes()).hexdigest()
    assert set(record.code) == {"train.py", "helper.py"}
    assert "margins 1.00 % and 2.00 %, 3 paired seeds" in record.result
    assert check_target("train.py").approved
    assert approved_plan("train.py") == PLANS["fp16-mixed"]


def test_report_json_and_validation_json_are_both_taken(repository):
    folder = study(repository)
    wrapped = {"verdict": "PASS", "validation": load(folder).as_json()}
    (folder / "report.json").write_text(json.dumps(wrapped))
    assert approve(folder, by="Ada").report == "study/report.json"
    assert approve(folder / "validation.json", by="Ada").report == "study/validation.json"


@pytest.mark.parametrize(
    ("excess", "verdict"), [(0.05, "FAIL"), (0.014, "MARGINAL"), (0.0098, "INCONCLUSIVE"), (float("nan"), "REFUSED")]
)
def test_no_other_verdict_is_signed_without_a_reason(repository, excess, verdict):
    folder = study(repository, excess)
    if verdict == "REFUSED":
        runs = arms([0.001])
        comparison = decide(runs, candidate="fp16-mixed", terms=Terms())
        save(folder, replace(load(folder), comparisons=(comparison,), runs=tuple(runs)))
    assert load(folder).verdict == verdict
    with pytest.raises(ApprovalError, match=f"verdict on 'fp16-mixed' is {verdict}: .* --override REASON"):
        approve(folder, by="Ada")
    with pytest.raises(ApprovalError, match="--override REASON"):
        approve(folder, by="Ada", override="  ")
    assert read_records(repository) == []
    record = approve(folder, by="Ada", override="a demo, never deployed")
    assert (record.verdict, record.override) == (verdict, "a demo, never deployed")
    assert "override: a demo, never deployed" in str(check_target("train.py"))


def test_a_verdict_that_was_written_into_a_report_is_found(repository):
    folder = study(repository, 0.05)
    validation = load(folder)
    save(folder, replace(validation, comparisons=(replace(validation.best, verdict="PASS"),)))
    with pytest.raises(ApprovalError, match="says PASS of 'fp16-mixed', and its own runs say FAIL"):
        approve(folder, by="Mallory")


def test_code_that_changed_after_the_study_began_is_not_signed(repository):
    folder = study(repository)
    (repository / "train.py").write_text(TARGET + "# changed\n")
    with pytest.raises(ApprovalError, match="was changed after the study began"):
        approve(folder, by="Ada")
    assert approve(folder, by="Ada", override="a comment only").override == "a comment only"


def test_an_override_of_a_pass_is_not_kept_since_none_was_needed(repository):
    assert approve(study(repository), by="Ada", override="why not").override == ""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: root / "nowhere", "is not there"),
        (lambda root: root, "has neither report.json nor validation.json"),
        (lambda root: root / "train.py", "is not JSON"),
        (lambda root: _write(root / "x.json", "{}"), "is not the report of a validation"),
        (lambda root: _write(root / "x.json", "[" * 100_000), "is not the report of a validation"),
        (lambda root: _write(root / "x.json", "not JSON"), "is not the report of a validation"),
    ],
)
def test_what_is_no_report_is_refused(repository, make, message):
    with pytest.raises(ApprovalError, match=message):
        approve(make(repository), by="Ada")


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_report_without_candidates_or_plan_or_name_is_refused(repository):
    folder = study(repository)
    with pytest.raises(ApprovalError, match="no candidate 'fp16-mixd'. Did you mean 'fp16-mixed'"):
        approve(folder, by="Ada", candidate="fp16-mixd")
    with pytest.raises(ApprovalError, match="needs a name"):
        approve(folder, by=" ")
    save(folder, replace(load(folder), plans={}))
    with pytest.raises(ApprovalError, match="has no plan for 'fp16-mixed'"):
        approve(folder, by="Ada")
    save(folder, replace(load(folder), comparisons=()))
    with pytest.raises(ApprovalError, match="compares nothing"):
        approve(folder, by="Ada")


def change_file(name):
    return lambda root: (root / name).write_text("width = 4\n")


def remove_file(root):
    (root / "helper.py").unlink()


def change_plan(root):
    path = root / APPROVALS
    path.write_text(path.read_text().replace("weights: fp32", "weights: fp16"))


def change_report(root):
    (root / "study" / "validation.json").write_text("{}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_file("train.py"), "train.py was changed"),
        (change_file("helper.py"), "helper.py was changed"),
        (remove_file, "helper.py is gone"),
        (change_plan, "the plan in the sign-off file was edited"),
        (change_report, "the report 'study/validation.json' was changed"),
    ],
)
def test_a_change_is_seen_and_stops_approved_training(repository, change, message):
    approve(study(repository), by="Ada")
    assert check_target("train.py").changed == ()
    change(repository)
    standing = check_target("train.py")
    assert not standing.approved
    assert message in standing.changed[0]
    with pytest.raises(ApprovalError, match=f"is not as it was approved: {message}"):
        approved_plan("train.py")


@pytest.mark.parametrize(("name", "counts"), [("torch", True), ("devices", True), ("date", False), ("commit", False)])
def test_the_environment_counts_but_not_date_and_commit(repository, monkeypatch, name, counts):
    approve(study(repository), by="Ada")
    monkeypatch.setattr(status, "describe_environment", lambda target: {**ENVIRONMENT, name: "other"})
    changed = check_target("train.py").changed
    assert changed == ((f"{name} is other, and was {ENVIRONMENT[name]}",) if counts else ())


def test_a_preset_that_means_something_else_now_is_seen(repository, monkeypatch):
    approve(study(repository), by="Ada")
    other = PLANS["fp16-mixed"].model_copy(update={"accumulate": 2})
    monkeypatch.setitem(PLANS, "fp16-mixed", other)
    assert "plan 'fp16-mixed' of this floatline is not the one" in check_target("train.py").changed[0]
    reworded = PLANS["bf16-mixed"].reasons
    monkeypatch.setitem(PLANS, "fp16-mixed", other.model_copy(update={"accumulate": 1, "reasons": reworded}))
    assert check_target("train.py").approved


def test_a_report_that_is_not_here_is_said_and_stops_nothing(repository):
    folder = study(repository)
    approve(folder, by="Ada")
    (folder / "validation.json").unlink()
    standing = check_target("train.py")
    assert standing.approved
    assert "the report: 'study/validation.json' is not here" in standing.unchecked


def test_a_target_is_found_however_it_is_written(repository, monkeypatch):
    approve(study(repository), by="Ada")
    for text in ("train.py", "./train.py", "train.py:build", str(repository / "train.py")):
        assert check_target(text).approved, text
    (repository / "deep").mkdir()
    monkeypatch.chdir(repository / "deep")
    assert check_target("../train.py").approved
    assert check_target("train.py").approved  # as the sign-off file has it
    (repository / "deep" / "train.py").write_text(TARGET)
    assert not check_target("train.py").approved  # another file of that name
    assert name_target("../train.py:tiny", find_root()) == "train.py:tiny"


def test_nothing_approved_is_said(repository):
    assert check_all() == []
    standing = check_target("train.py")
    assert (standing.record, standing.plan, standing.approved) == (None, "fp32", False)
    with pytest.raises(ApprovalError, match="No plan is approved for 'train.py'"):
        approved_plan("train.py")


def test_a_rollback_makes_fp32_current_and_is_written_down(repository):
    approve(study(repository), by="Ada")
    roll_back("train.py", reason="loss went NaN in week 3", by="Grace")
    standing = check_target("train.py")
    assert (standing.plan, standing.approved) == ("fp32", False)
    assert approved_plan("train.py") == PLANS["fp32"]
    log = (repository / ISSUES).read_text()
    assert "loss went NaN in week 3" in log and "by: Grace" in log and "fp16-mixed, PASS, sha256" in log
    with pytest.raises(ApprovalError, match="was rolled back by Grace"):
        roll_back("train.py", reason="again")
    approve(study(repository), by="Ada")
    assert approved_plan("train.py") == PLANS["fp16-mixed"]


def test_a_rollback_needs_something_to_roll_back_and_a_reason(repository):
    with pytest.raises(ApprovalError, match="Nothing is approved for 'train.py'"):
        roll_back("train.py", reason="panic")
    approve(study(repository), by="Ada")
    with pytest.raises(ApprovalError, match="needs a reason"):
        roll_back("train.py", reason=" ")
    with pytest.raises(ApprovalError, match="Did you mean 'train.py'"):
        roll_back("trian.py", reason="panic")
    assert not (repository / ISSUES).exists()


def test_text_stays_text(repository):
    note = "line\n- action: rollback\n  target: train.py\n\x1b[31mred\u2028 'quoted' \"twice\" # no: comment"
    approve(study(repository), by="A\nB: <b>", note=note)
    (record,) = read_records(repository)
    assert (record.by, record.note) == ("A\nB: <b>", note)
    assert check_target("train.py").approved
    shown = str(check_target("train.py"))
    assert "\x1b" not in shown and "\\n- action: rollback" in shown
    roll_back("train.py", reason="# heading\n\n<script>alert(1)</script> [x](y) `z`", by="M")
    body = [line for line in (repository / ISSUES).read_text().splitlines() if "reason" in line]
    assert body == ["- reason: \\# heading\\\\n\\\\n\\<script\\>alert(1)\\</script\\> \\[x\\](y) \\`z\\`"]


def test_a_record_adds_lines_and_changes_none(repository):
    approve(study(repository), by="Ada")
    before = (repository / APPROVALS).read_text()
    approve(study(repository), by="Grace")
    after = (repository / APPROVALS).read_text()
    assert after.startswith(before)
    assert [entry["by"] for entry in yaml.safe_load(after)] == ["Ada", "Grace"]
    assert not list(repository.glob(".*tmp"))


@pytest.mark.parametrize("text", ["{", "a: 1", "- 3", "- action: dance", "- action: approve\n  unknown: 1", "\0"])
def test_a_sign_off_file_that_was_damaged_is_refused(repository, text):
    (repository / APPROVALS).write_text(text)
    with pytest.raises(ApprovalError, match=f"{APPROVALS}.*Restore it from version control"):
        check_all()
    with pytest.raises(ApprovalError, match="Restore it"):
        approve(study(repository), by="Ada")
    assert (repository / APPROVALS).read_text() == text


def _many(root: str, who: int) -> None:
    os.chdir(root)
    for number in range(5):
        approve(Path("study"), by=f"{who}-{number}")
        append_issue(Path(root), f"{who}-{number}", {})


@slow
def test_records_that_are_added_at_once_are_all_kept(repository):
    study(repository)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_many, args=(str(repository), who)) for who in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    names = {record.by for record in read_records(repository)}
    assert names == {f"{who}-{number}" for who in range(3) for number in range(5)}
    assert (repository / ISSUES).read_text().count("\n## ") == 15


def test_outside_of_a_repository_the_current_folder_is_the_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_root() == tmp_path
    (tmp_path / ".git").mkdir()
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert find_root(tmp_path / "a" / "b") == tmp_path


def test_the_newest_record_of_a_target_counts(repository):
    approve(study(repository), by="Ada")
    approve(study(repository), by="Grace")
    record = find_current("train.py", repository)
    assert record is not None and record.by == "Grace"
    assert [standing.target for standing in check_all()] == ["train.py"]


def command(root: Path, *words: str) -> subprocess.CompletedProcess:
    return run_preloaded(["-c", COMMAND, *words], cwd=root)


@slow
def test_the_commands_exit_with_what_they_found(repository):
    folder, bad = study(repository), study(repository, 0.05, name="bad")
    validation = load(folder)
    save(folder, replace(validation, environment={}))
    assert command(repository, "status").returncode == 1
    refused = command(repository, "approve", str(bad), "--by", "Ada")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "is FAIL" in refused.stderr
    assert command(repository, "approve", str(folder), "--by", "Ada").returncode == 0
    good = command(repository, "status", "train.py")
    assert good.returncode == 0 and "fp16-mixed is approved, as approved" in good.stdout
    fields = json.loads(command(repository, "status", "--format", "json").stdout)
    assert fields["approved"] is True and fields["targets"][0]["record"]["by"] == "Ada"
    assert command(repository, "rollback", "train.py", "--reason", "NaN", "--by", "Ada").returncode == 0
    again = command(repository, "status", "train.py")
    assert again.returncode == 1 and "fp32 is current" in again.stdout


WORKLOAD = """
import torch
from torch import nn


def build(seed=0):
    model = nn.Linear(4, 1)
    batches = [((torch.randn(8, 4),), (torch.randn(8, 1),)) for _ in range(2)]
    return model, batches, nn.functional.mse_loss, "bf16-mixed", lambda m: torch.optim.SGD(m.parameters(), lr=0.01)
"""


def test_train_takes_the_approved_plan_or_none(repository):
    (repository / "train.py").write_text(WORKLOAD)
    options = ["train", "train.py", "--approved-only", "--steps", "2", "--format", "json"]
    none = command(repository, *options)
    assert (none.returncode, none.stderr.count("\n")) == (2, 1)
    assert "No plan is approved for 'train.py'" in none.stderr
    approve(study(repository), by="Ada")
    trained = CliRunner().invoke(app, [*options, "--folder", "one"])
    assert json.loads(trained.stdout)["plan"] == "fp16-mixed"
    (repository / "helper.py").write_text("width = 4\n")
    (repository / "train.py").write_text(WORKLOAD + "# changed\n")
    changed = CliRunner().invoke(app, [*options, "--folder", "two"])
    assert isinstance(changed.exception, ApprovalError)
    roll_back("train.py", reason="NaN")
    back = CliRunner().invoke(app, [*options, "--folder", "two"])
    assert json.loads(back.stdout)["plan"] == "fp32"


def test_train_refuses_a_plan_beside_the_approved_one():
    result = CliRunner().invoke(app, ["train", "x.py", "--plan", "fp32", "--approved-only"])
    assert result.exit_code == 2
    assert "--plan and --approved-only say two things" in result.output
