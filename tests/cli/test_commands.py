"""The commands as a whole: groups, help, words of a wrong use, `--json`, and what each does where there is no torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.slow import slow
from typer.testing import CliRunner

import floatline
from floatline.cli.main import GROUPS, app

ROOT = Path(__file__).parents[2]
NAMES = [function.__name__ for functions in GROUPS.values() for function in functions]
ALONE = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in %r:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refused())
from floatline.cli.main import main
main()
"""
NOT_IN_THE_WHEEL = ("torch", "triton", "scipy", "pandas", "lightning", "transformers", "ray")


def ask(*words: str, columns: int = 80):
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, list(words))


def ask_alone(*words: str, refused=NOT_IN_THE_WHEEL, cwd=None) -> subprocess.CompletedProcess:
    """The command where only what the wheel brings can be imported."""
    code = ALONE % (refused,)
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=250, cwd=cwd)


def test_the_help_has_the_commands_by_what_one_wants_the_first_first():
    lines = ask("-h").stdout.splitlines()
    assert [line for line in lines if line in GROUPS] == list(GROUPS)
    assert [m[1] for line in lines if (m := re.match(r"  ([a-z]+)  ", line))] == NAMES
    assert NAMES[0] == "diagnose"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [80, 200])
def test_help_is_whole_within_its_width_and_names_no_type(name, columns):
    text = ask(name, "-h", columns=columns).stdout
    assert text == ask(name, "--help", columns=columns).stdout
    assert text.startswith("Usage: ")
    assert max(map(len, text.splitlines())) <= min(columns, 96)
    assert "…" not in text
    assert not re.search(r"<(bool|int|str|float|list|Path)\b|\[\[|x>=|\]\.\.\.\]", text)


def test_the_check_above_can_fail():
    assert re.search(r"<(bool|int|str|float|list|Path)\b|\[\[|x>=|\]\.\.\.\]", "lint [OPTIONS] [[PATH]...]...")


def test_a_narrow_terminal_cuts_no_cell_of_a_table():
    text = ask("doctor", str(ROOT / "examples" / "small_gpt.py"), columns=60).stdout
    assert "Expected memory of one step" in text and "…" not in text


def test_the_options_of_validate_are_grouped():
    text = ask("validate", "-h").stdout
    titles = [line for line in text.splitlines() if re.match(r"[A-Z][a-zA-Z ]+$", line)]
    assert titles == [
        "Arguments", "What is compared", "How long it is trained", "What counts as a PASS", "Seeds",
        "What else is measured", "Where it runs", "Options",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["diagnose", "net.py", "--steps", "0"], "--steps takes a whole number of at least 1, not '0'."),
        (
            ["validate", "--steps", "0", "--", "python", "net.py"],
            "--steps takes a whole number of at least 1, not '0'.",
        ),
        (["train", "net.py", "--steps=abc"], "--steps takes a whole number of at least 1, not 'abc'."),
        (["rescue", "net.py", "--budget", "soon"], "--budget takes a number of at least 1, not 'soon'."),
        (["compare", "a", "b", "--margin", "1", "x"], "--margin takes 2 numbers, not '1 x'."),
        (["validate", "a.py", "--margin", "5%", "10%"], "--margin takes 2 numbers, not '5% 10%': write 0.05 0.1."),
        (["diagnose", "a.py", "--", "python", "b.py"], "A target and a command after -- are given. Give one of them."),
        (["diagnose", "net.py", "--bundle"], "Option '--bundle' requires an argument."),
        (["doctor", "--format", "xml"], "--format takes text or json, not 'xml'."),
        (["validate", "net.py", "--engine", "slurm"], "--engine takes local or ray, not 'slurm'."),
        (["diagnose", "net.py", "--stps", "4"], "No such option: --stps"),
        (["diagnos", "net.py"], "No such command 'diagnos'"),
    ],
)
def test_a_wrong_word_is_told_in_ours_with_the_value(words, says):
    done = ask_alone(*words, refused=())
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"floatline: {says}")
    command = f" {words[0]}" if words[0] in NAMES else ""
    assert done.stderr.endswith(f"Try 'floatline{command} -h'.\n")


def test_without_a_word_the_help_is_printed_and_the_exit_code_is_2():
    done = ask_alone(refused=())
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout == ask_alone("-h", refused=()).stdout


@slow
def test_json_is_short_for_format_json_and_is_left_alone_behind_two_dashes():
    long = ask("explain", "eps-underflow", "--format", "json")
    assert long.exit_code == 0 and ask("explain", "eps-underflow", "--json").stdout == long.stdout
    assert json.loads(ask("version", "--json").stdout)["floatline"] == floatline.__version__
    assert "'--json'" in ask_alone("explain", "--", "--json", refused=()).stderr


@slow
def test_an_unknown_id_has_three_others_named():
    (words,) = re.findall(r"The nearest of \d+: (.*?)\. 'floatline", ask_alone("explain", "foobar").stderr)
    assert len(words.split(", ")) == 3


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_commands(shell):
    asked = {"_FLOATLINE_COMPLETE": f"complete_{shell}", "COMP_WORDS": "floatline dia", "COMP_CWORD": "1",
             "_TYPER_COMPLETE_ARGS": "floatline dia", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}  # fmt: skip
    done = CliRunner(env=asked).invoke(app, [], prog_name="floatline")
    assert "diagnose" in done.stdout and "rescue" not in done.stdout
