"""docs/causes.md says what the catalogue says."""

from __future__ import annotations

import re

from tools.causes_page import EXAMPLE, PAGE, page
from typer.testing import CliRunner

from floatline.causes import CAUSES
from floatline.cli.main import app


def test_the_committed_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tools/causes_page.py"


def test_the_check_above_can_fail():
    assert PAGE.read_text(encoding="utf-8") != page(causes=list(CAUSES.values())[1:])


def test_every_link_within_the_page_has_a_target():
    text = page()
    targets = set(re.findall(r"^### (\S+)$", text, re.MULTILINE))
    assert set(re.findall(r"\]\(#([\w-]+)\)", text)) <= targets
    assert set(CAUSES) <= targets


def test_the_output_on_the_page_is_what_the_command_prints():
    output = CliRunner().invoke(app, ["explain", EXAMPLE]).stdout
    assert f'$ floatline explain "{EXAMPLE}"\n{output}```\n' in page()
