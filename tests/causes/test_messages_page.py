"""docs/messages.md says what the catalogue says of messages, and leaves none of its causes out."""

from __future__ import annotations

import pytest
from tools.messages_page import MESSAGES, PAGE, page

from floatline.causes import CAUSES, find_named_causes

TEXTS = [text for texts in MESSAGES.values() for text in texts]


def test_the_committed_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tools/messages_page.py"


def test_the_check_above_can_fail():
    assert PAGE.read_text(encoding="utf-8") != page({"One": TEXTS[:1]})


def test_every_cause_that_has_a_message_of_its_own_is_on_the_page():
    shown = {cause.id for text in TEXTS for cause in find_named_causes(text)}
    assert shown == {cause.id for cause in CAUSES.values() if cause.messages}


def test_a_message_that_the_catalogue_does_not_know_is_refused():
    with pytest.raises(ValueError, match="does not know 'the disk is full'"):
        page({"One": ("the disk is full",)})
