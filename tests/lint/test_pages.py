"""docs/lint/ says what the rules say."""

from tools.lint_pages import FOLDER, pages

from floatline.causes import CAUSES
from floatline.lint import RULES
from floatline.lint.rule import read_examples


def test_the_committed_pages_are_up_to_date():
    written = {path: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    assert written == pages(), "run: python tools/lint_pages.py"


def test_every_rule_has_a_page_with_all_its_examples():
    made = pages()
    for rule in RULES.values():
        text = made[FOLDER / f"{rule.code}.md"]
        assert all(bad.source in text for bad in read_examples(rule.bad))


def test_no_rule_has_the_name_of_a_cause():
    assert not {rule.name for rule in RULES.values()} & set(CAUSES)
