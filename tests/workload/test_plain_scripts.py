"""A plain script where a target belongs: no command runs it, and each names the one for scripts."""

import pytest
from tests.preloaded import COMMAND, run_preloaded

from floatline.workload.reading import may_define

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


def test_a_script_with_a_function_of_its_own_that_needs_its_model_is_not_run(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT + "def train(model, *, rate, epochs=3): ...\n", encoding="utf-8")
    run = run_preloaded(["-c", COMMAND, "doctor", "script.py"], cwd=tmp_path)
    assert "has a train() that needs model, rate, so it was not run." in " ".join(run.stderr.split())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "function",
    ["def train(steps, seed=0): ...", "@given\ndef train(cfg): ...", "from loops import train", "build = make(3)"],
)
def test_what_can_be_called_as_it_is_may_be_a_target(function):
    assert may_define(function.encode(), ["build", "train"], given=["seed", "steps"])


def test_what_may_be_a_target_is_still_run(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT + "def build(): ...\n", encoding="utf-8")
    run_preloaded(["-c", COMMAND, "doctor", "script.py"], cwd=tmp_path)
    assert (tmp_path / "ran").exists()
