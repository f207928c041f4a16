"""Sources, folders and settings that want to hurt: none hangs, none escapes, none ends in a traceback."""

import os

import pytest
from tests.slow import slow
from typer.testing import CliRunner

from floatline.cli.main import app
from floatline.lint import RULES, lint_text
from floatline.lint.paths import find_files

BAD = "import torch\ny = torch.log(torch.softmax(x, dim=-1))\n"
LONG = {
    "a name assigned thousands of times": "import torch\n" + "x = torch.log(x * x + x)\n" * 3000,
    "the same in a loop": "import torch\nfor i in j:\n" + "    x = torch.log(x * x + x)\n" * 3000,
    "branches": "import torch\n" + "if a:\n    x = x.half()\nelse:\n    x = torch.log(x)\n" * 300,
    "signs": "import torch\nx = " + "-" * 45000,
    "lambdas": "import torch\n" + "lambda: " * 5000 + "1",
    "a function that calls itself everywhere": (
        "import torch\ndef walk(x, eps=None):\n" + "    walk(x, eps)\n" * 200 + "    return torch.sqrt(x + eps)\n"
    ),
    "dots": "import torch\nscaler.scale(loss).backward()\ny" + ".half()" * 900,
}


@slow
@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_a_source_that_is_made_to_take_long_does_not(text):
    assert {one.rule.code for one in lint_text(text, rules=list(RULES.values()))} <= {"FL001"}  # nested too deeply


def test_a_link_in_a_folder_is_not_followed_but_one_that_is_given_is(tmp_path):
    outside = tmp_path / "mine.py"
    outside.write_text(BAD)
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "a.py").symlink_to(outside)
    assert CliRunner().invoke(app, ["lint", "--fix", str(folder)]).exit_code == 0
    assert outside.read_text() == BAD
    assert find_files([folder / "a.py"]) == [str(folder / "a.py")]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.py")
    os.mkfifo(tmp_path / "known.json")
    assert find_files([tmp_path]) == []
    run = CliRunner().invoke(app, ["lint", str(tmp_path), "--baseline", str(tmp_path / "known.json")])
    assert run.exit_code != 0
    assert "no plain file" in str(run.exception)


@pytest.mark.parametrize("text", ["tool = 3", "[tool]\nfloatline = 3", "[tool.floatline]\nlint = []"])
def test_settings_of_another_shape_are_none(tmp_path, text):
    (tmp_path / "pyproject.toml").write_text(text)
    assert CliRunner().invoke(app, ["lint", str(tmp_path), "--select", "FL101"]).exit_code == 0
