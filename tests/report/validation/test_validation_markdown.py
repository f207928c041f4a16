"""report.md: names cannot become markup, tables keep their columns, code keeps its fence."""

import re

import pytest
from tests.report.reading import read_markdown
from tests.report.validation.validations import EVIL, make_validation

from floatline.report.document.document import Code, Table
from floatline.report.document.markdown import _block, code, escape, markdown_of
from floatline.report.validation.report import document_of, write_report


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a|b", r"a\|b"),
        ("<b>x</b>", "&lt;b&gt;x&lt;/b&gt;"),
        ("a & b", "a &amp; b"),
        ("one\ntwo", "one two"),
        ("[x](y) *b* _c_ `d`", r"\[x\](y) \*b\* \_c\_ \`d\`"),
        (r"back\slash", r"back\\slash"),
    ],
)
def test_plain_text_stays_plain(text, shown):
    assert escape(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("fp16-mixed", "`fp16-mixed`"),
        ("a`b", "``a`b``"),
        ("`a``", "``` `a`` ```"),
        ("a|b", r"`a\|b`"),
        ("", ""),
    ],
)
def test_a_name_is_a_code_span(text, shown):
    assert code(text) == shown


def test_every_row_of_a_table_has_its_columns(tmp_path):
    write_report(make_validation(dict.fromkeys(EVIL, 0.0), evil=True), tmp_path)
    lines = (tmp_path / "report.md").read_text(encoding="utf-8").splitlines()
    widths = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if not line.startswith("|"):
            continue
        widths.append(len(re.split(r"(?<!\\)\|", line)))
        if following.startswith("|"):
            continue
        assert len(set(widths)) == 1, line
        widths = []


def test_no_name_opens_an_element(tmp_path):
    write_report(make_validation(dict.fromkeys(EVIL, 0.0), evil=True), tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    tags = {tag for tag, _ in read_markdown(text).elements}
    assert {"details", "summary"} <= tags
    assert not tags & {"script", "img", "b"}


def test_an_element_that_a_name_opens_would_be_found():
    assert ("img", {"src": "x"}) in read_markdown("a name <img src=x> as it is").elements


def test_a_fence_is_longer_than_any_in_its_text():
    assert _block(Code("```\nx", "yaml"))[0] == "````yaml"


def test_a_long_table_is_folded():
    lines = _block(Table("<all>", ("a",), (("1",),), folded=True))
    assert lines[0] == "<details><summary>&lt;all&gt;</summary>"
    assert lines[-2] == "</details>"


def test_code_in_a_sentence_keeps_its_spaces():
    text = markdown_of(document_of(make_validation()))
    assert "→ Sign it off: `floatline approve FOLDER --by NAME`." in text
