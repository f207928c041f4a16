"""A baseline knows old findings by what their lines say."""

import json

import pytest

from floatline.errors import LintError
from floatline.lint import RULES, lint_text
from floatline.lint.baseline import drop_known, read_baseline, write_baseline

BAD = "y = torch.log(torch.softmax(x.half(), dim=-1))\n"
RULE = [RULES["FL101"]]


def findings(text, file="train.py"):
    return lint_text("import torch\n" + text, file, rules=RULE)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "baseline.json"

    def save(found):
        write_baseline(path, found, root=tmp_path)
        return read_baseline(path)

    return save


def test_what_is_known_is_dropped(saved, tmp_path):
    found = findings(BAD, str(tmp_path / "train.py"))
    assert len(found) == 1
    assert drop_known(found, saved(found), root=tmp_path) == []
    assert drop_known(found, saved([]), root=tmp_path) == found


def test_a_line_that_moved_is_still_known(saved, tmp_path):
    file = str(tmp_path / "train.py")
    known = saved(findings(BAD, file))
    moved = findings("\n\nif x is not None:\n    " + BAD, file)
    assert len(moved) == 1
    assert drop_known(moved, known, root=tmp_path) == []


def test_a_line_that_changed_is_new(saved, tmp_path):
    file = str(tmp_path / "train.py")
    known = saved(findings(BAD, file))
    assert len(drop_known(findings(BAD.replace("-1", "1"), file), known, root=tmp_path)) == 1


def test_a_second_copy_of_a_known_line_is_new(saved, tmp_path):
    file = str(tmp_path / "train.py")
    known = saved(findings(BAD, file))
    new = drop_known(findings(BAD * 2, file), known, root=tmp_path)
    assert [one.line for one in new] == [3]
    assert drop_known(findings(BAD * 2, file), saved(findings(BAD * 2, file)), root=tmp_path) == []


def test_the_same_line_in_another_file_is_new(saved, tmp_path):
    known = saved(findings(BAD, str(tmp_path / "train.py")))
    assert drop_known(findings(BAD, str(tmp_path / "other.py")), known, root=tmp_path)


def test_files_are_named_from_the_root_so_that_a_baseline_can_be_shared(saved, tmp_path, monkeypatch):
    (tmp_path / "src").mkdir()
    known = saved(findings(BAD, str(tmp_path / "src" / "train.py")))
    assert [key[0] for key in known] == ["src/train.py"]
    monkeypatch.chdir(tmp_path / "src")
    assert drop_known(findings(BAD, "train.py"), known, root=tmp_path) == []


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        '"text"',
        '{"floatline_baseline": 99, "findings": []}',
        '{"floatline_baseline": 1}',
        '{"floatline_baseline": 1, "findings": [{"file": "a.py", "code": "FL101", "text": "x"}]}',
        '{"floatline_baseline": 1, "findings": [{"file": "a.py", "code": "FL101", "text": "x", "count": "2"}]}',
        '{"floatline_baseline": 1, "findings": [{"file": "a.py", "code": "FL101", "text": "x", "count": -1}]}',
        '{"floatline_baseline": 1, "findings": [["a.py", "FL101", "x", 1]]}',
        "[" * 100_000,
    ],
    ids=range(11),
)
def test_a_damaged_file_is_told_in_one_line(tmp_path, damage):
    path = tmp_path / "baseline.json"
    path.write_text(damage)
    with pytest.raises(LintError) as error:
        read_baseline(path)
    assert "\n" not in str(error.value)
    assert "--write-baseline" in str(error.value)


def test_a_file_that_is_not_text_or_not_there_is_told(tmp_path):
    (tmp_path / "baseline.json").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "baseline.json", tmp_path / "none.json", tmp_path):
        with pytest.raises(LintError, match=r"damaged|cannot be read"):
            read_baseline(path)


def test_writing_fails_whole_and_the_old_file_stays(tmp_path):
    path = tmp_path / "baseline.json"
    write_baseline(path, findings(BAD))
    before = path.read_text()
    with pytest.raises(LintError, match="cannot be written"):
        write_baseline(tmp_path / "missing" / "baseline.json", [])
    assert path.read_text() == before
    assert [one.name for one in tmp_path.iterdir()] == ["baseline.json"]


def test_the_same_findings_make_the_same_file(tmp_path):
    found = [*findings(BAD, "b.py"), *findings(BAD, "a.py")]
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    write_baseline(one, found)
    write_baseline(other, list(reversed(found)))
    assert one.read_text() == other.read_text()
    assert json.loads(one.read_text())["findings"][0]["text"] == BAD.strip()
