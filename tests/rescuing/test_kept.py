"""What a rescue keeps on the disk: what is used again, what is not, and which folders it leaves alone."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from floatline.base.plain_records import to_plain
from floatline.causes import find_cause
from floatline.diagnosis.detectors.loss_scale import ScaleVerdict
from floatline.diagnosis.headroom.step_rows import Row, Span
from floatline.diagnosis.islands.errors import ReplayOutcome
from floatline.diagnosis.islands.island import Island, LineAlternative, Member
from floatline.diagnosis.result import Diagnosis
from floatline.errors import LedgerError, RescueError
from floatline.findings import Finding
from floatline.fixes import CodeFix
from floatline.formats import find_format
from floatline.rescuing.finished_stages import (
    Kept,
    finish,
    plain_diagnosis,
    plain_patch,
    read_diagnosis,
    read_island,
    read_patch,
    read_trial,
)
from floatline.rescuing.short_run import Trial

ASKED = {"target": "net.py", "code": {"net.py": "ab"}, "steps": 40, "seed": 0, "environment": {"torch": "2"}}


def test_an_ended_rescue_finds_its_stages_again(tmp_path):
    with Kept(tmp_path, asked=ASKED, prove=False) as kept:
        kept.put("diagnose", {"seconds": 1.5})
        (kept.folder("short-1") / "runs").mkdir(parents=True)
    with Kept(tmp_path, asked=ASKED, prove=False) as kept:
        assert kept.get("diagnose") == {"seconds": 1.5} and kept.get("island") is None
        assert (kept.folder("short-1") / "runs").is_dir() and kept.note == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"code": {"net.py": "cd"}}, "the code was changed"),
        ({"steps": 41}, "other steps"),
        ({"seed": 1}, "another seed"),
        ({"environment": {"torch": "3"}}, "floatline, torch or the hardware"),
    ],
)
def test_stages_of_something_else_are_thrown_away_and_that_is_said(tmp_path, change, words):
    with Kept(tmp_path, asked=ASKED, prove=False) as kept:
        kept.put("diagnose", {})
        kept.folder("short-1").mkdir()
    with Kept(tmp_path, asked={**ASKED, **change}, prove=False) as kept:
        assert kept.get("diagnose") is None and not kept.folder("short-1").exists()
        assert words in kept.note


def test_a_rescue_that_came_to_its_end_is_made_anew_but_a_proof_goes_on_from_it(tmp_path):
    def kept_after(*, prove):
        with Kept(tmp_path, asked=ASKED, prove=prove) as kept:
            found = kept.get("diagnose")
            kept.put("diagnose", {"seconds": 1.0})
        return found

    assert kept_after(prove=False) is None
    finish(tmp_path, proved=False)
    assert kept_after(prove=True) == {"seconds": 1.0}
    finish(tmp_path, proved=True)
    assert kept_after(prove=True) is None
    finish(tmp_path, proved=False)
    assert kept_after(prove=False) is None


def test_the_folder_of_another_target_is_left_alone(tmp_path):
    Kept(tmp_path, asked=ASKED, prove=False).close()
    with pytest.raises(RescueError, match=r"holds a rescue of 'net.py'. Choose another folder"):
        Kept(tmp_path, asked={**ASKED, "target": "other.py"}, prove=False)
    Kept(tmp_path, asked=ASKED, prove=False).close()  # and is given back


@pytest.mark.parametrize("name", ["plan.yaml", "report.html", "stages"])
def test_files_that_are_no_rescue_s_are_not_written_over(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(RescueError, match=f"holds a {name} that is no rescue's"):
        Kept(tmp_path, asked=ASKED, prove=False)
    assert (tmp_path / name).read_text() == "mine"


def test_files_of_other_names_are_no_matter(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    Kept(tmp_path, asked=ASKED, prove=False).close()


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, '"\x00"'])
def test_a_stage_that_cannot_be_read_is_said_in_one_line(tmp_path, text):
    with Kept(tmp_path, asked=ASKED, prove=False) as kept:
        (tmp_path / "stages" / "diagnose.json").write_text(text)
        with pytest.raises(RescueError, match=r"diagnose\.json' .*Delete it, and run the command again"):
            kept.get("diagnose")


def test_a_folder_that_cannot_be_made_is_said_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RescueError, match="cannot be used"):
        Kept(tmp_path / "file" / "folder", asked=ASKED, prove=False)


def test_two_rescues_do_not_share_a_folder(tmp_path):
    with Kept(tmp_path, asked=ASKED, prove=False), pytest.raises(LedgerError, match="in use"):
        Kept(tmp_path, asked=ASKED, prove=False)


def test_without_a_folder_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Kept(None, asked=ASKED, prove=False) as kept:
        kept.put("diagnose", {})
        assert kept.get("diagnose") is None and kept.folder("short-1") is None
    assert list(tmp_path.iterdir()) == []


def through_json(data):
    return json.loads(json.dumps(data, allow_nan=False))


def test_a_diagnosis_comes_back_as_it_was():
    span = Span(1e-9, 3e4, float("inf"), 0.25, "overflows")
    diagnosis = Diagnosis(
        "net.py", "fp16-mixed",
        (Finding(find_cause("product-overflow"), "seen", "fix", "energy", "/x/net.py", 7, "aten.mul"),),
        1.25, ("tried",), ("noted",), ScaleVerdict("underflow", 1.0, 4096.0, "at 4096"),
        (Row("energy", find_format("fp16"), span, None, True),),
    )  # fmt: skip
    assert read_diagnosis(through_json(plain_diagnosis(diagnosis))) == diagnosis
    bare = Diagnosis("net.py", "fp32", (), 0.5)
    assert read_diagnosis(through_json(plain_diagnosis(bare))) == bare


def test_what_came_of_trying_a_change_of_the_code_comes_back_as_it_was():
    finding = Finding(find_cause("product-overflow"), "seen", "advice", "energy", "/x/net.py", 7, "aten.mul")
    fix = CodeFix(Path("/x/net.py"), "net.py", 7, "float-operands", "mul in FP32", True, "x * x\n", "x.float() * x\n")
    found = Diagnosis("net.py", "fp16-mixed", (finding,), 1.25)
    tried = replace(finding, fix="x.float() * x", patch=fix.patch, tried="With this change it is healthy.")
    made = replace(found, findings=(tried,), fixes=(fix,))
    assert read_patch(found, through_json(plain_patch(made))) == made
    assert read_patch(found, through_json(plain_patch(found))) == found


def test_an_island_and_a_short_run_come_back_as_they_were():
    outcome = ReplayOutcome(False, False, float("nan"), 0.5, 1.0, "why")
    lines = LineAlternative((("net.py", 7),), 2, 3)
    island = Island((Member("a", "seen", "without"),), lines, "", True, True, outcome, None, None, 3, 9, 0.5, ("n",))
    back = read_island(through_json(to_plain(island)))
    assert str(back) == str(island) and back.members == island.members and back.lines == lines
    trial = Trial((1.0, 0.5), (3,), "", 0.25, 1024.0)
    assert read_trial(through_json(to_plain(trial))) == trial


@pytest.mark.parametrize(
    ("read", "data"),
    [
        (read_diagnosis, {"findings": [{}]}),
        (read_diagnosis, {}),
        (read_island, {}),
        (read_trial, {}),
        (partial(read_patch, None), {}),
        (partial(read_patch, None), {"fix": "", "patch": "", "tried": "", "fixes": [{}]}),
    ],
)
def test_what_is_no_such_stage_is_said_in_one_line(read, data):
    with pytest.raises(RescueError, match="among the stages cannot be read"):
        read(data)
