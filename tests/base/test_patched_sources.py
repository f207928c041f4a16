"""Patched sources: a process imports changed texts, and the files stay as they are."""

import json
import os
import subprocess
import sys

import pytest

RUN = """
import json, sys
from floatline.base.patched_sources import patch_sources, read_source
patch_sources(json.loads(sys.argv[2]))
sys.path.insert(0, sys.argv[1])
import whole.part
import traceback
print(whole.part.answer(), read_source(whole.part.__file__) == open(whole.part.__file__, "rb").read())
try:
    whole.part.fail()
except ZeroDivisionError:
    print(traceback.format_exc().replace("\\n", " "))
"""


@pytest.fixture
def package(tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "__init__.py").write_text("")
    file = tmp_path / "whole" / "part.py"
    file.write_text("def answer():\n    return 1\n\n\ndef fail():\n    return 1 / 0  # as it is\n")
    return file


def run(file, sources: str) -> list[str]:
    words = [sys.executable, "-c", RUN, str(file.parents[1]), sources]
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=env)
    return done.stdout.splitlines()


def changed(file) -> str:
    return json.dumps({str(file): file.read_text().replace("return 1\n", "return 2\n").replace("as it is", "changed")})


def test_a_changed_text_is_imported_and_shown_in_errors_while_the_file_stays(package):
    before = package.read_bytes()
    said = run(package, changed(package))
    assert said[0] == "2 False" and "changed" in said[1]
    assert package.read_bytes() == before


def test_without_a_change_the_file_itself_is_imported(package):
    said = run(package, "{}")
    assert said[0] == "1 True" and "as it is" in "".join(said[1:])


def test_compiled_forms_are_neither_read_nor_made(package):
    run(package, "{}")  # makes the .pyc of the file as it is
    (compiled,) = (package.parent / "__pycache__").glob("part.*")
    stored = compiled.read_bytes()
    assert run(package, changed(package))[0] == "2 False"
    assert compiled.read_bytes() == stored
    assert run(package, "{}")[0] == "1 True"
