"""docs/causes.md and docs/causes/ say what the catalogue says."""

from __future__ import annotations

import re

from tools.causes_page import EXAMPLE, FOLDER, PAGE, pages
from typer.testing import CliRunner

from floatline.causes import CAUSES
from floatline.cli.main import app


def test_the_committed_pages_are_up_to_date():
    for path, text in pages().items():
        assert path.read_text(encoding="utf-8") == text, "run: python tools/causes_page.py"
    assert {path.stem for path in FOLDER.glob("*.md")} == set(CAUSES)


def test_the_check_above_can_fail():
    assert PAGE.read_text(encoding="utf-8") != pages(causes=list(CAUSES.values())[1:])[PAGE]


def test_every_cause_is_linked_and_every_link_has_a_page():
    made = pages()
    linked = set(re.findall(r"\]\(causes/([\w-]+)\.md\)", made[PAGE]))
    among = {name for path, text in made.items() if path != PAGE for name in re.findall(r"\]\(([\w-]+)\.md\)", text)}
    assert linked == set(CAUSES) and among <= set(CAUSES)


def test_the_output_on_the_page_is_what_the_command_prints():
    output = CliRunner().invoke(app, ["explain", EXAMPLE]).stdout
    assert f'$ floatline explain "{EXAMPLE}"\n{output}```\n' in pages()[PAGE]
