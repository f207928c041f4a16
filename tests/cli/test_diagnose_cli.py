"""`floatline diagnose`: exit codes, one JSON object, one line for a wrong use, and the example end to end."""

import json
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
from tests.preloaded import COMMAND, run_preloaded
from tests.slow import slow
from typer.testing import CliRunner

from floatline.causes import CAUSES
from floatline.cli.main import app
from floatline.diagnosis.result import Diagnosis
from floatline.findings import Finding

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "broken_mask.py"


@pytest.fixture
def asked(monkeypatch):
    """Stands in for the diagnosis itself: records how it is called, answers with `asked.findings`."""
    asked = types.SimpleNamespace(findings=(), target=None, options=None)

    def diagnose(target, *, steps, seed, on_progress, trace_path, bundle, with_data, tries_fixes, as_device):
        asked.target = target
        asked.options = {
            "steps": steps,
            "seed": seed,
            "trace_path": trace_path,
            "tries_fixes": tries_fixes,
            "as_device": as_device,
        }
        sys.stdout.write("the target says hello\n")
        on_progress("replay in FP32")
        return Diagnosis(target, "fp16-mixed", asked.findings, 1.0)

    stand_in = types.ModuleType("floatline.diagnosis.target_diagnosis")
    stand_in.diagnose = diagnose
    monkeypatch.setitem(sys.modules, "floatline.diagnosis.target_diagnosis", stand_in)
    return asked


def invoke(*words: str):
    return CliRunner().invoke(app, ["diagnose", *words])


def run(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return run_preloaded(["-c", COMMAND, "diagnose", *words], cwd=cwd)


def test_a_healthy_target_exits_with_0(asked):
    result = invoke("net.py")
    assert result.exit_code == 0
    assert result.stdout.startswith("healthy")


def test_a_finding_exits_with_1(asked):
    asked.findings = (Finding(CAUSES["exp-overflow"], seen="exp(12)", fix="sigmoid"),)
    result = invoke("net.py")
    assert result.exit_code == 1
    assert result.stdout.startswith("exp-overflow")


def test_json_is_one_object_on_stdout_whatever_the_target_prints(asked):
    asked.findings = (Finding(CAUSES["exp-overflow"], seen="exp(12)", fix="sigmoid"),)
    result = invoke("net.py", "--format", "json")
    assert json.loads(result.stdout)["findings"][0]["cause"] == "exp-overflow"
    assert "the target says hello" in result.stderr


def test_the_options_reach_the_diagnosis(asked, tmp_path):
    trace = str(tmp_path / "step.npz")
    assert invoke("net.py:fixed", "--steps", "7", "--seed", "3", "--trace", trace, "--no-try").exit_code == 0
    assert asked.target == "net.py:fixed"
    assert asked.options == {"steps": 7, "seed": 3, "trace_path": trace, "tries_fixes": False, "as_device": "cuda"}


def test_settings_behind_a_target_are_kept_with_it(asked):
    assert invoke("conditioned:broken", "learning_rate=0.1", "--steps", "7", "data_file=my data.npz").exit_code == 0
    assert asked.target == "conditioned:broken learning_rate=0.1 'data_file=my data.npz'"
    assert invoke("conditioned", "broken").exit_code == 2  # no setting


def test_without_options_forty_steps_are_looked_at(asked):
    invoke("net.py")
    assert asked.options == {"steps": 40, "seed": 0, "trace_path": None, "tries_fixes": True, "as_device": "cuda"}


def test_each_stage_is_a_line_where_stderr_is_no_terminal(asked):
    assert "floatline: replay in FP32\n" in invoke("net.py").stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["net.py", "--steps", "0"], "--steps"),
        (["net.py", "--trace", "."], "is a folder. Name a file in it."),
        (["net.py", "--trace", "no_such_folder/step.npz"], "there is no folder 'no_such_folder'. Make it first."),
        (["net.py", "--diff", "--no-try"], "--fix and --diff give changes that were tried."),
        (["net.py", "--diff", "--fix"], "--diff writes nothing."),
        (["no_such_file.py"], "does not exist"),
        (["conditioned", "broken"], "Got unexpected extra argument (broken)"),
        (["conditioned", "no_such=1"], "Setting 'no_such' is not known."),
        (["net.py", "lr=1"], "Target 'net.py' takes no settings, but lr=1 was given."),
        (["pyproject.toml"], "is not a Python file"),
        ([], "Missing argument"),
    ],
)
def test_wrong_use_is_one_line_and_exits_with_2(words, said):
    result = run(*words)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert said in result.stderr


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import no_such_module_qqq\ndef build(): ...\n", "importing it failed: ModuleNotFoundError"),
        ("x = 1\n", "neither build() nor train()"),
        ("def build():\n    raise ValueError('no data')\n", "build() failed: ValueError: no data"),
    ],
)
def test_a_target_that_cannot_be_run_is_one_line_and_exits_with_2(tmp_path, code, said):
    (tmp_path / "net.py").write_text(textwrap.dedent(code), encoding="utf-8")
    result = run("net.py", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    *stages, last = result.stderr.splitlines()
    assert said in last
    assert stages in ([], ["floatline: running the target as it is"])


def test_the_broken_example_is_explained():
    result = run(str(EXAMPLE), "--format", "json")
    assert result.returncode == 1, result.stderr
    answer = json.loads(result.stdout)
    first = answer["findings"][0]
    assert (answer["verdict"], first["cause"]) == ("precision", "scalar-out-of-range")
    assert "masked_fill" in EXAMPLE.read_text(encoding="utf-8").splitlines()[first["line"] - 1]


def test_the_fixed_example_is_healthy():
    result = run(f"{EXAMPLE}:fixed")
    assert result.returncode == 0, result.stdout
    assert result.stdout.startswith("healthy")


@slow
def test_a_step_is_kept_as_a_bundle_that_can_be_replayed(tmp_path):
    folder = tmp_path / "bundle"
    given = run(str(EXAMPLE), "--bundle", str(folder), "--with-data", "--format", "json")
    assert given.returncode == 1, given.stderr
    assert {path.name for path in folder.iterdir()} == {"bundle.json", "state.safetensors", "data.safetensors"}
    assert json.loads((folder / "bundle.json").read_text())["findings"][0]["cause"] == "scalar-out-of-range"


def test_an_exception_that_no_cause_explains_is_not_called_healthy(tmp_path):
    target = tmp_path / "raises.py"
    text = EXAMPLE.read_text().replace("scores = scores.masked_fill(future, self.hidden)", 'raise KeyError("lost")')
    target.write_text(text)
    given = run(str(target))
    assert given.returncode == 2
    *stages, last = given.stderr.splitlines()
    assert "KeyError" in last and "FP32 raises it, too" in last
    assert stages[:2] == ["floatline: running the target as it is", "floatline: running it in FP32"]


@slow
def test_what_would_not_fit_a_format_is_told(tmp_path):
    target = tmp_path / "wide.py"
    wide = EXAMPLE.read_text().replace('"fp16-mixed"', '"fp32"')
    target.write_text(wide)
    given = run(str(target), "--would-fit", "fp16", "--steps", "4", "--format", "json")
    assert given.returncode == 1, given.stderr
    (fit,) = json.loads(given.stdout)["formats"]
    assert fit["format"] == "fp16"
    assert run(str(target), "--would-fit", "bf16", "--steps", "4").returncode == 0
