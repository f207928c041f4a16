"""How many files someone reads to follow one task through the code: never more than today."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.slow import exhaustive, slow
from tools import count_files

TOOL = Path(count_files.__file__)
# Since tensors that processes share are looked at in place, one more of a diagnosis: what knows a sharded tensor. Two
# more since a command that is ended says how to go on, and help is written in sentences. One more for the clock that
# budgets are counted by, and one for the process that tries a change, which training and forward passes share.
# One more for products with 0, two for gradients that a script takes by torch.func, and one for regions that switch off
# the autocast of CUDA on a machine without it.
MOST_FILES = {"diagnose": 74, "fix": 85, "step": 27}
pytestmark = slow


def walk(task):
    shown = subprocess.run([sys.executable, TOOL, task], capture_output=True, text=True, check=True, timeout=600).stdout
    return int(re.search(r": (\d+) files, \d+ functions$", shown.strip())[1])


@pytest.mark.parametrize("task", ["diagnose", "step", pytest.param("fix", marks=exhaustive)])
def test_a_task_walks_through_no_more_files_than_it_did(task):
    assert walk(task) <= MOST_FILES[task]


def test_a_file_more_would_be_counted():
    counted = count_files.Walk()
    from floatline.errors import suggest
    from floatline.formats import find_format

    with counted.listening():
        find_format("fp16")
        with counted.counting():
            find_format("fp16")
        assert set(counted.files) == {"formats.py"}
        with counted.counting():
            suggest("fp16", ["fp16"])
    assert set(counted.files) == {"formats.py", "errors.py"}
