"""A diagnosis for people: the finding first, its line of code shown, nothing read as markup."""

import io

import pytest
from rich.console import Console

from floatline.causes import CAUSES
from floatline.diagnosis.result import Diagnosis
from floatline.findings import Finding
from floatline.report.diagnosis import print_diagnosis


def written(diagnosis: Diagnosis, *, width: int = 100, terminal: bool = False) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False)
    print_diagnosis(diagnosis, console)
    return console.file.getvalue().splitlines()


def overflow(**changes) -> Finding:
    fields = {
        "seen": "output reaches 1.02e+05, float16 holds 65504; in FP32 it is finite",
        "fix": "run blocks.1.ff.wo in FP32",
        "module": "blocks.1.ff.wo",
        "op": "aten.mm",
    }
    return Finding(CAUSES["activation-overflow"], **{**fields, **changes})


def diagnosis(*findings: Finding, **changes) -> Diagnosis:
    return Diagnosis("net.py", "fp16-mixed", findings, 2.5, **changes)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\n\n    return self.wo(h[red][/red])  # \N{GREEK SMALL LETTER BETA}\n", encoding="utf-8"
    )
    return path


def test_the_finding_comes_first_and_takes_nine_lines(source):
    found = overflow(file=str(source), line=3)
    tried = ("with blocks.1.ff.wo in FP32 the step is finite", "at loss scale 1 it is not finite", "third")
    lines = written(diagnosis(found, tried=tried))
    assert lines[0] == f"activation-overflow  {CAUSES['activation-overflow'].title}"
    assert len(lines) == 9
    text = "\n".join(lines)
    for part in (found.seen, found.fix, found.op, *tried[:2], "floatline explain activation-overflow", "2.5 s"):
        assert part in text
    assert "third" not in text


def test_a_fix_of_several_lines_stands_one_below_the_other(source):
    code = "with torch.autocast('cuda', enabled=False):\n    y = x @ w  # wide\n    z = y"
    lines = written(diagnosis(overflow(file=str(source), line=3, fix=code)), width=30)
    at = next(number for number, line in enumerate(lines) if line.startswith("  fix "))
    assert "\n".join(line[9:] for line in lines[at : at + 3]) == code
    assert lines[at + 3].startswith("  why ")
    assert str(overflow(fix=code)).splitlines()[2:5] == [f"  fix:  {code.splitlines()[0]}"] + [
        f"        {line}" for line in code.splitlines()[1:]
    ]


def test_what_came_of_the_fix_is_told_before_other_trials(source):
    found = overflow(file=str(source), line=3, tried="With this change net.py is healthy.")
    lines = written(diagnosis(found, tried=("in BF16 the step is finite",)))
    tried = [line.split("tried")[1].strip() for line in lines if "  tried" in line]
    assert tried == ["With this change net.py is healthy.", "in BF16 the step is finite"]


def test_the_line_of_code_is_shown_as_it_is(source):
    lines = written(diagnosis(overflow(file=str(source), line=3)))
    assert "3 | return self.wo(h[red][/red])  # \N{GREEK SMALL LETTER BETA}" in lines[2]


@pytest.mark.parametrize(("file", "line"), [("gone.py", 3), ("", 0), ("net.py", 400)])
def test_a_line_that_cannot_be_read_is_left_out(source, file, line):
    place = str(source.parent / file) if file else ""
    assert not any(" | " in text for text in written(diagnosis(overflow(file=place, line=line))))


def test_a_file_below_this_folder_is_named_from_here(source, monkeypatch):
    monkeypatch.chdir(source.parent)
    assert "net.py:3 in blocks.1.ff.wo, aten.mm" in written(diagnosis(overflow(file=str(source), line=3)))[1]
    assert str(source.parent) not in "\n".join(written(diagnosis(overflow(file=str(source), line=3))))


def test_a_file_elsewhere_keeps_its_whole_path(source, monkeypatch, tmp_path_factory):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert f"{source}:3" in written(diagnosis(overflow(file=str(source), line=3)))[1]


def test_what_the_target_says_cannot_move_the_cursor():
    lines = written(diagnosis(overflow(seen="boom \x1b[2J\x07\r\nsecond", fix="[bold]x[/bold]")), terminal=True)
    text = "\n".join(lines)
    assert "\x1b[2J" not in text
    assert "\x07" not in text
    assert "[bold]x[/bold]" in text


def test_code_is_never_broken_and_prose_is():
    fix = "with torch.autocast('cuda', enabled=False): y = F.linear(x.float(), self.weight.float(), self.bias.float())"
    lines = written(diagnosis(overflow(fix=fix, seen="word " * 40)), width=60)
    assert any(fix in line for line in lines)
    assert max(len(line) for line in lines if "word" in line) <= 60


def test_further_findings_take_one_line_each():
    second = Finding(CAUSES["eps-underflow"], seen="1e-08 is 0 in float16", fix="eps=1e-4", module="norm")
    third = Finding(CAUSES["cancellation"], seen="error as large as the result", fix="two passes")
    lines = written(diagnosis(overflow(), second, third))
    assert lines[-2:] == [
        "  2. eps-underflow  norm  1e-08 is 0 in float16",
        "  3. cancellation  the model  error as large as the result",
    ]


def test_it_says_whether_precision_is_to_blame():
    data = Finding(CAUSES["bad-input-data"], seen="1 NaN in batches[2]", fix="drop the row")
    assert "; not a precision problem" in "\n".join(written(diagnosis(data)))
    assert "; a precision problem" in "\n".join(written(diagnosis(overflow())))


def test_healthy_takes_one_line():
    assert written(diagnosis()) == ["healthy  No finding: net.py in fp16-mixed, 2.5 s."]


def test_notes_come_last():
    assert written(diagnosis(notes=("4 steps skipped while the scale settled",)))[1:] == [
        "note: 4 steps skipped while the scale settled"
    ]
