"""What a change is shown as: code that can be copied, whole statements where it is more than one line."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fixes.sources import HEAD, finding, write

from floatline.base.texts import on_one_line
from floatline.fixes import CodeFix, find_fixes
from floatline.fixes.code_fix import merge_fixes

BLOCK = """

class Net(torch.nn.Module):
    def forward(self, x, book):
        y = x * 2  # twice

        # how far apart
        far = (x.pow(2).sum(1)
               + book.pow(2).sum(1)  # the book's own
               - 2 * x @ book.t())  # here
        return self.head(far)
"""


def change(before, after, line=1, name="code.py"):
    return CodeFix(Path(name), name, line, "kind", "what is done", True, before, after)


def fixes_of(tmp_path, text, cause, op):
    path = write(tmp_path, text)
    (line,) = [at for at, one in enumerate(path.read_text().splitlines(), 1) if one.endswith("# here")]
    return {fix.kind: fix for fix in find_fixes(finding(path, line, cause, op))}


def test_one_line_is_itself_as_it_stands_there():
    text = "def f(x):\n    return g(\n        x,\n        1,\n    )\n"
    assert change(text, text.replace("x,\n", "x.float(),  # wide\n")).new_code == "x.float(),  # wide"
    assert change(text, text.replace("        1,\n", "")).new_code == "what is done"


def test_a_statement_of_several_lines_is_shown_whole(tmp_path):
    fix = fixes_of(tmp_path, BLOCK, "choice-flipped", "aten.mm")["fp32-island"]
    assert fix.new_code.splitlines()[:3] == [
        "with torch.autocast(x.device.type, enabled=False):",
        "    far = (x.pow(2).sum(1)",
        "       + book.pow(2).sum(1)  # the book's own",
    ]
    assert ast.unparse(ast.parse(fix.new_code)) in ast.unparse(ast.parse(fix.after)).replace("\n        ", "\n")


@pytest.mark.parametrize("text", [BLOCK, BLOCK.replace("\n", "\r\n")])
def test_a_function_is_shown_with_its_comments_on_lines_of_their_own(tmp_path, text):
    fix = fixes_of(tmp_path, BLOCK, "choice-flipped", "aten.mm")["fp32-function"]
    ends = "\r\n" if "\r" in text else "\n"
    fix = replace(fix, before=fix.before.replace("\n", ends), after=fix.after.replace("\n", ends))
    lines = fix.new_code.split("\n")
    assert lines[0] == "with torch.autocast(x.device.type, enabled=False):"
    assert "    # how far apart" in lines and "    y = x * 2  # twice" in lines and "    return self.head(far)" in lines
    (region,) = ast.parse(fix.new_code).body
    assert isinstance(region, ast.With) and len(region.body) == 5
    # The twin: on one line all that stands behind the first comment is gone.
    assert len(ast.parse("with a: " + "; ".join(line.strip() for line in lines[1:-3] if line.strip())).body[0].body) < 5


def test_of_a_statement_with_a_block_that_stays_the_head_is_shown():
    text = "with a:\n    # why\n    x = 1\nfor i in r:\n    y = 2\nz = 3\n"
    after = text.replace("with a:", "with (\n    b,\n    c,\n):").replace("for i", "for j")
    assert change(text, after).new_code == "# line 1\nwith (\n    b,\n    c,\n):\n# line 4\nfor j in r:"


def test_several_places_stand_under_their_lines_of_the_file_as_it_is():
    text = "a = 1\nb = 2\n\n\ndef f():\n    c = 3\n    return c\n\n\nd = 4\n"
    after = text.replace("a = 1\n", "a = 1\na += 1\n").replace("c = 3", "c = (\n        5\n    )").replace("4", "6")
    shown = change(text, after).new_code
    assert shown == "# line 2\na += 1\n# line 6\nc = (\n    5\n)\n# line 10\nd = 6"
    assert len(ast.parse(shown).body) == 3


def test_what_cannot_be_read_is_shown_by_its_lines():
    assert change("a = (\n", "b = (\nc\n").new_code == "b = (\nc"


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("y = x", "y = x"),
        ("with a:\n    y = x  # why", "with a: y = x  # why"),
        ("with a:\n    y = x\n    z = y", "with a: …"),
        ("y = (\n    x)", "y = ( …"),
        ("# line 3\ny = x\n# line 7\nz = y", "y = x …"),
        ("# alone", "# alone"),
        ("", ""),
    ],
)
def test_where_one_line_must_do_it_is_the_first(code, line):
    assert on_one_line(code) == line


KINDS = [
    ("choice-flipped", "aten.mm", BLOCK),
    ("changed-in-16-bits", "aten.mul", BLOCK.replace("# twice", "# here").replace("t())  # here", "t())")),
    ("update-lost-to-rounding", "", "\n\nmodel = torch.nn.Linear(2, 2).half()\nx = model(\n    y)\nopt = 1  # here\n"),
]  # fmt: skip


@pytest.mark.parametrize(("cause", "op", "text"), KINDS)
def test_whole_statements_are_python(tmp_path, cause, op, text):
    found = fixes_of(tmp_path, text, cause, op)
    assert any("\n" in fix.new_code for fix in found.values()) or cause.startswith("update")
    for fix in found.values():
        ast.parse(fix.new_code.removeprefix("return "))


LINES = "a = 1\nb = 2\nc = 3\nd = 4\n"
WRAPPED = "a = 1\nwith r:\n    b = 22\n    c = 3\nd = 4\n"


def test_a_change_inside_another_one_is_no_change_of_its_own():
    first = change(LINES, LINES.replace("b = 2", "b = 22"), line=2)
    second = change(first.after, WRAPPED, line=3)
    (one,) = merge_fixes([first, second])
    assert (one.before, one.after, one.line) == (LINES, WRAPPED, 3)
    assert one.new_code == "with r:\n    b = 22\n    c = 3"
    # In the other order: what comes later is a line of what is there already.
    wide = change(LINES, WRAPPED.replace("22", "2"), line=3)
    inner = change(wide.after, WRAPPED, line=3)
    (one,) = merge_fixes([wide, inner])
    assert (one.before, one.after) == (LINES, WRAPPED)


def test_changes_of_other_lines_and_files_stay():
    first = change(LINES, LINES.replace("d = 4", "d = 44"), line=4)
    second = change(first.after, WRAPPED.replace("22", "2").replace("d = 4", "d = 44"), line=3)
    assert merge_fixes([first, second]) == [first, second]
    other = replace(change(LINES, LINES.replace("b = 2", "b = 22"), line=2), file=Path("other.py"))
    assert merge_fixes([other, second]) == [other, second]


def test_the_other_changes_begin_and_end_with_the_same_texts():
    first = change(LINES, LINES.replace("b = 2", "b = 22"), line=2)
    apart = change(first.after, first.after.replace("d = 4", "d = 44"), line=4)
    last = change(apart.after, WRAPPED.replace("d = 4", "d = 44"), line=3)
    left = merge_fixes([first, apart, last])
    assert [one.line for one in left] == [4, 3]
    assert (left[0].before, left[-1].after) == (LINES, last.after)


def test_the_head_of_these_files_is_not_shown(tmp_path):
    fix = fixes_of(tmp_path, BLOCK, "choice-flipped", "aten.mm")["fp32-function"]
    assert HEAD.strip() not in fix.new_code
