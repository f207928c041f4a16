"""`floatline lint` as it is called: exit codes, formats, fixes on the disk, settings."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.preloaded import COMMAND, run_preloaded
from typer.testing import CliRunner

from floatline.cli.main import app
from floatline.errors import LintError

BAD = "import torch\n\n\ndef f(x):\n    return torch.log(torch.softmax(x.half(), dim=-1))  # kept\n"
FIXED = BAD.replace("torch.log(torch.softmax(x.half(), dim=-1))", "torch.nn.functional.log_softmax(x.half(), dim=-1)")
GOOD = "import torch\n\n\ndef f(x):\n    return torch.log_softmax(x, dim=-1)\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "bad.py").write_text(BAD)
    (tmp_path / "src" / "good.py").write_text(GOOD)
    return tmp_path


def lint(*words: str):
    return CliRunner().invoke(app, ["lint", *words])


def real(*words: str) -> subprocess.CompletedProcess:
    return run_preloaded(["-c", COMMAND, "lint", *words])


def test_findings_exit_with_1_and_say_where_what_and_what_to_do(project):
    run = lint("src")
    assert run.exit_code == 1
    assert "src/bad.py:5:12: FL101" in run.stdout
    assert "floatline explain FL101" in run.stdout
    assert "1 can be fixed with --fix." in run.stdout
    assert "good.py" not in run.stdout


def test_clean_code_exits_with_0(project):
    run = lint("src/good.py")
    assert run.exit_code == 0
    assert run.stdout == "No finding in 1 file, 5 lines.\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("no_such_folder",), "floatline: Path 'no_such_folder' is not there."),
        (("src", "--select", "FL999"), "floatline: Rule 'FL999' is not known."),
        (("src", "--ignore", "log-of-softmx"), "Did you mean 'log-of-softmax'"),
        (("src", "--on", "sm_1"), "floatline: "),
        (("src", "--jobs", "0"), "floatline: "),
    ],
)
def test_wrong_use_exits_with_2_and_one_line(project, words, line):
    run = real(*words)
    assert run.returncode == 2
    assert line in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
    assert run.stdout == ""


def test_fix_writes_the_file_and_keeps_everything_else(project):
    file = project / "src" / "bad.py"
    file.chmod(0o755)
    run = lint("src", "--fix")
    assert run.exit_code == 0
    assert file.read_text() == FIXED
    assert file.stat().st_mode & 0o777 == 0o755
    assert "1 place fixed in 1 file." in run.stdout
    assert sorted(path.name for path in (project / "src").iterdir()) == ["bad.py", "good.py"]


@pytest.mark.parametrize(("mark", "end"), [("\ufeff", "\n"), ("", "\r\n"), ("\ufeff", "\r\n")])
def test_a_byte_order_mark_and_windows_line_ends_stay(project, mark, end):
    file = project / "src" / "bad.py"
    file.write_bytes((mark + BAD).replace("\n", end).encode())
    assert lint("src", "--fix").exit_code == 0
    assert file.read_bytes() == (mark + FIXED).replace("\n", end).encode()


def test_diff_writes_nothing_and_git_takes_it(project):
    run = lint("src", "--diff")
    assert run.exit_code == 1
    assert (project / "src" / "bad.py").read_text() == BAD
    (project / "fix.patch").write_text(run.stdout)
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "apply", "fix.patch"], check=True)
    assert (project / "src" / "bad.py").read_text() == FIXED


def test_a_file_that_cannot_be_written_is_as_it_was(project):
    (project / "src" / f".bad.py.{os.getpid()}.tmp").mkdir()  # where the new text would be drafted
    run = lint("src", "--fix")
    assert isinstance(run.exception, LintError)
    assert "cannot be written: Is a directory. It is as it was." in str(run.exception)
    assert (project / "src" / "bad.py").read_text() == BAD


def test_json_is_one_object_with_the_fields_of_a_finding(project):
    run = lint("src", "--format", "json")
    result = json.loads(run.stdout)
    (finding,) = result["findings"]
    assert finding["code"] == "FL101"
    assert finding["name"] == "log-of-softmax"
    assert finding["cause"] == "rounded-onto-singularity"
    assert (finding["file"], finding["line"], finding["column"]) == ("src/bad.py", 5, 12)
    assert finding["fixable"] == "safe"
    assert (result["files"], result["lines"]) == (2, 10)


def test_sarif_names_the_rule_and_the_region(project):
    report = json.loads(lint("src", "--format", "sarif").stdout)
    assert report["version"] == "2.1.0"
    (run,) = report["runs"]
    (result,) = run["results"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["FL101"]
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "src/bad.py"
    assert place["region"] == {"startLine": 5, "startColumn": 12, "endLine": 5, "endColumn": 54}


def test_github_gets_one_workflow_command_a_finding_and_text_cannot_break_out(project):
    name = "a%0A,b.py"
    (project / "src" / name).write_text(BAD)
    lines = lint("src", "--format", "github").stdout.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("::warning file=src/a%250A%2Cb.py,line=5,col=12,endLine=5,title=FL101 log-of-softmax::")


def test_settings_of_the_project_are_read_and_options_add_to_them(project):
    (project / "pyproject.toml").write_text('[tool.floatline.lint]\nignore = ["FL101"]\n')
    assert lint("src").exit_code == 0
    (project / "pyproject.toml").write_text('[tool.floatline.lint]\nexclude = ["src/bad.py"]\n')
    assert lint("src").exit_code == 0
    (project / "pyproject.toml").write_text('[tool.floatline.lint]\nselect = ["FL2"]\n')
    assert lint("src").exit_code == 0
    assert lint("src", "--select", "FL1").exit_code == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tool.floatline.lint]\nignor = []\n", "Did you mean 'ignore'"),
        ("[tool.floatline.lint]\nignore = 3\n", "Give a list of strings"),
        ("[tool.floatline\n", "cannot be read"),
    ],
)
def test_a_wrong_setting_is_told_in_one_line(project, text, said):
    (project / "pyproject.toml").write_text(text)
    run = real("src")
    assert run.returncode == 2
    assert said in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1


def test_a_known_finding_is_not_told_again_and_a_new_one_is(project):
    assert lint("src", "--write-baseline", "--baseline", "known.json").exit_code == 0
    assert lint("src", "--baseline", "known.json").exit_code == 0
    (project / "src" / "bad.py").write_text("# moved\n" + BAD)
    assert lint("src", "--baseline", "known.json").exit_code == 0
    (project / "src" / "new.py").write_text(BAD)
    run = lint("src", "--baseline", "known.json")
    assert run.exit_code == 1
    assert "new.py" in run.stdout
    assert "bad.py" not in run.stdout


def test_many_files_over_several_processes_give_the_same_findings(project):
    for number in range(40):
        (project / "src" / f"copy{number}.py").write_text(BAD)
    alone, together = (lint("src", "--jobs", jobs, "--format", "json") for jobs in ("1", "3"))
    assert len(json.loads(alone.stdout)["findings"]) == 41
    assert json.loads(alone.stdout)["findings"] == json.loads(together.stdout)["findings"]


def test_a_file_that_cannot_be_read_is_told_and_the_rest_is_looked_at(project):
    (project / "src" / "latin.py").write_bytes(b"import torch\n# \xff\n")
    run = real("src")
    assert run.returncode == 1
    assert "latin.py was not read" in run.stderr


def test_explain_tells_a_rule_by_code_and_by_name(project):
    for word in ("FL101", "fl101", "log-of-softmax"):
        run = CliRunner().invoke(app, ["explain", word])
        assert run.exit_code == 0
        assert "log-of-softmax" in run.stdout
        assert "floatline: allow[log-of-softmax]" in run.stdout
    run = CliRunner().invoke(app, ["explain", "FL101", "--format", "json"])
    assert json.loads(run.stdout)["fix_safety"] == "safe"


def test_explain_of_a_code_that_is_not_there_says_so(project):
    run = run_preloaded(["-c", COMMAND, "explain", "FL999"])
    assert run.returncode == 2
    assert "Rule 'FL999' is not known" in run.stderr


def test_hidden_and_built_folders_are_not_looked_at(project):
    for name in (".venv", "build", "node_modules", "floatline-runs"):
        (project / name).mkdir()
        (project / name / "bad.py").write_text(BAD)
    assert "1 finding in" in lint(".").stdout
    assert Path("src/bad.py").is_file()


def test_what_was_not_fixed_is_not_said_to_be_fixable(project):
    (project / "src" / "bad.py").write_text(
        "from torch import Tensor, log\n\n\ndef f(x: Tensor):\n    x = x.half()\n    return log(x + 1e-8)\n"
    )
    assert "more can be fixed with --unsafe-fixes" in lint("src").stdout
    after = lint("src", "--fix", "--unsafe-fixes")
    assert "FL104" in after.stdout
    assert "can be fixed" not in after.stdout
