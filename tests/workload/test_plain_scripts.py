"""A plain script where a target belongs: no command runs it, and each names the one for scripts."""

import pytest
from tests.preloaded import COMMAND, run_preloaded

SCRIPT = "from pathlib import Path\nPath('ran').touch()\n"
COMMANDS = [
    ("diagnose",),
    ("diagnose", "--would-fit", "fp16"),
    ("doctor",),
    ("rescue",),
    ("train", "--steps", "1"),
    ("validate",),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_plain_script_is_not_run_and_the_command_for_it_is_named_in_one_line(tmp_path, words):
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    command, *options = words
    run = run_preloaded(["-c", COMMAND, command, "script.py", *options], cwd=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.endswith("floatline diagnose -- python script.py\n")
    assert run.stderr.count("\n") == 1
    assert not (tmp_path / "ran").exists()


def test_what_may_be_a_target_is_still_run(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT + "def build(): ...\n", encoding="utf-8")
    run_preloaded(["-c", COMMAND, "doctor", "script.py"], cwd=tmp_path)
    assert (tmp_path / "ran").exists()
