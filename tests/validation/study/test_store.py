"""Store: what is finished is on the disk, whole; a study goes on as it was begun, and one process at a time."""

import json
import math

import pytest

from floatline.errors import ComparisonError, LedgerError
from floatline.validation.study.store import Store, file_name
from floatline.validation.verdict.pairs import ArmRun

ASKED = {"target": "t.py", "seed": 0, "limits": {"steps": 5}}


def begin(folder, **more):
    with Store(folder, asked=ASKED | more) as store:
        store.settle({})


def test_a_target_that_was_wrong_leaves_no_study_behind(tmp_path):
    Store(tmp_path, asked=ASKED).close()
    Store(tmp_path, asked=ASKED | {"target": "fixed.py"}).close()


def test_runs_come_back_as_they_were(tmp_path):
    odd = ArmRun("a/b ..", 1, math.nan, diverged=True, first_losses=(0.1, math.inf))
    with Store(tmp_path, asked=ASKED) as store:
        store.settle({})
        store.add(odd)
    with Store(tmp_path, asked=ASKED, resume=True) as store:
        (found,) = store.runs().values()
    assert repr(found) == repr(odd)


def test_runs_that_raised_are_tried_again(tmp_path):
    with Store(tmp_path, asked=ASKED) as store:
        store.add(ArmRun("fp32", 0, math.nan, error="out of memory"))
        store.add(ArmRun("fp32", 1, 2.0))
        assert [seed for _, seed in store.runs()] == [1]


def test_two_at_once_are_refused(tmp_path):
    begin(tmp_path)
    with Store(tmp_path, asked=ASKED, resume=True), pytest.raises(LedgerError, match="in use by process"):
        Store(tmp_path, asked=ASKED, resume=True)
    Store(tmp_path, asked=ASKED, resume=True).close()


def test_a_study_is_resumed_on_purpose_only(tmp_path):
    with pytest.raises(ComparisonError, match="no study to resume"):
        Store(tmp_path, asked=ASKED, resume=True)
    begin(tmp_path)
    with pytest.raises(ComparisonError, match="already holds a study. Resume it"):
        Store(tmp_path, asked=ASKED)


def test_another_question_names_what_differs(tmp_path):
    begin(tmp_path)
    with pytest.raises(ComparisonError, match=r'has limits {"steps": 5}, which is not the {"steps": 6} given now'):
        Store(tmp_path, asked={**ASKED, "limits": {"steps": 6}}, resume=True)


def test_changed_code_is_another_study(tmp_path):
    begin(tmp_path, code={"t.py": "1"})
    with pytest.raises(ComparisonError, match="The code was changed since"):
        Store(tmp_path, asked={**ASKED, "code": {"t.py": "2"}}, resume=True)


def test_a_damaged_file_is_named(tmp_path):
    with Store(tmp_path, asked=ASKED) as store:
        store.add(ArmRun("fp32", 0, 2.0))
        (tmp_path / "runs/fp32/0.json").write_text("{", encoding="utf-8")
        with pytest.raises(ComparisonError, match="0.json cannot be read"):
            store.runs()


def test_what_was_found_stays(tmp_path):
    with Store(tmp_path, asked=ASKED) as store:
        assert store.found == {}
        store.settle({"steps": 5})
    with Store(tmp_path, asked=ASKED, resume=True) as store:
        assert store.found == {"steps": 5}
    assert json.loads((tmp_path / "study.json").read_text())["asked"] == ASKED


def test_no_draft_is_left_behind(tmp_path):
    with Store(tmp_path, asked=ASKED) as store:
        store.add(ArmRun("fp32", 0, 2.0))
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("name", ["fp16-mixed", "a/b", "..", ".", "ü", "a b", "CON:x"])
def test_names_of_arms_are_file_names(name, tmp_path):
    (tmp_path / file_name(name)).mkdir()
    assert [path.name for path in tmp_path.iterdir()] == [file_name(name)]
