"""Bombs: small files that claim or become much are refused in one line, within 600 MiB and in bounded time."""

import json
import os
import re
from pathlib import Path

import pytest
from tests.preloaded import run_preloaded

REFUSED = {
    "plan of aliases": "more than 100,000 values",
    "plan of merges": "more than 100,000 values",
    "setting of aliases": "the value cannot be read",
    "sign-offs of aliases": "more than 5,000,000 values",
    "plan that is too large": "more than 4,194,304 bytes",
    "trace that unpacks to 400 MiB": "unpacked it has more than 256 MiB",
    "trace that claims 1 TiB": "not as large as it says",
    "checkpoint of 400 copies": "is a second copy",
    "checkpoint of huge strides": "strides that do not fit",
    "checkpoint of a huge shape": "more elements than bytes",
    "checkpoint with a head of 4 EiB": "is damaged",
    "database that never ends": "interrupted",
    "database of huge texts": "too big",
    "bundle of a million brackets": "bundle.json is not JSON",
    "checkpoint of a million brackets": "state.json is not JSON",
    "kept of a million brackets": "cannot be read: maximum recursion depth",
    "ledger of a million brackets": "no whole header line",
    "study of a million brackets": "is not the report",
    "texts of a million brackets": "No metric was found",
    "W&B run of 100,000 empty pieces": "No metric was found",
}
READ = {"lint of aliases": "[]", "lint of merges": "[]", "log of 1 GiB": "200000"}


@pytest.fixture(scope="module")
def found():
    """What came of each bomb, in one process that has little room."""
    # With so little memory no GPU can be reached.
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = run_preloaded([str(Path(__file__).with_name("bombs.py"))], timeout=600, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_the_memory_was_limited(found):
    assert found.pop("the limit") == "is there"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_bomb_is_refused_in_one_line(found, name):
    assert found[name].startswith("refused: ") and "\n" not in found[name]
    assert re.search(REFUSED[name], found[name]), found[name]


@pytest.mark.parametrize("name", sorted(READ))
def test_what_is_long_is_read_within_bounds(found, name):
    assert found[name] == f"read: {READ[name]}"


def test_every_bomb_is_judged(found):
    assert set(found) - {"the limit"} == {*REFUSED, *READ}
