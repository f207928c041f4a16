"""JSON has no NaN and no infinity: every writer of floatline's puts them down as the ledger does."""

import ast
import json
import math
from pathlib import Path

import pytest
from tests.report.run.runs import make_run
from typer.testing import CliRunner

import floatline as fl
from floatline.base.json_values import decode_number, plain_json
from floatline.base.plain_records import to_plain
from floatline.cli.main import app
from floatline.cli.output import print_json
from floatline.validation.study.store import Store

SOURCE = Path(fl.__file__).parent
SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
# Calls that may leave out allow_nan=False, each with what it is for.
OTHERS = {
    "agreement/compiled/runs.py": "a message from one process of a command to another",
    "agreement/compiled/script_main.py": "a message from one process of a command to another",
    "diagnosis/scripts/fp32_runs.py": "a message from one process of a command to another",
    "diagnosis/scripts/main.py": "a message from one process of a command to another",
    "diagnosis/scripts/script.py": "a message from one process of a command to another",
    "diagnosis/changed_runs.py": "a message from one process of a command to another",
    "diagnosis/islands/log.py": "keys, hashes and answers, which search_judge turns into texts",
    "guard/checkpoints/run_files.py": "a hash of what was encoded before",
    "probe/trace/trace.py": "texts and settings inside a trace",
    "cli/run.py": "a message from one process of a command to another",
    "diagnosis/forward/script_main.py": "a message from one process of a command to another",
    "rescuing/script_rescue.py": "a hash",
    "rescuing/trials.py": "a hash",
    "running/loss_log.py": "a message from one process of a command to another",
    "running/main.py": "a message from one process of a command to another",
    "running/quiet_runs.py": "a message from one process of a command to another",
    "running/read_values.py": "a message from one process of a command to another",
    "validation/study/script_arms.py": "a message from one process of a command to another",
    "validation/signoff/approval.py": "a hash",
    "validation/running/child.py": "the text of an error",
    "validation/running/processes.py": "a message from one process of a command to another",
    "validation/study/store.py": "a text for a message",
    "systems/audio_lora/espeak.py": "a message from one process of a command to another",
    "systems/audio_lora/speech.py": "a message from one process of a command to another",
}


def lax_writers(sources: dict[str, str]) -> set[str]:
    """Files that call json.dump or json.dumps and let NaN through."""
    found = set()
    for name, source in sources.items():
        if "json.dump" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            is_dump = isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.dump", "json.dumps")
            if is_dump and "allow_nan=False" not in ast.unparse(node):
                found.add(name)
    return found


def refuse_literal(text):
    raise AssertionError(f"{text} is not JSON")


def read_strictly(text):
    return json.loads(text, parse_constant=refuse_literal)


def test_no_other_writer_lets_nan_through():
    sources = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in SOURCE.rglob("*.py")}
    assert lax_writers(sources) == OTHERS.keys()


def test_the_check_above_sees_a_writer_that_does():
    assert lax_writers({"a.py": "json.dumps(x)", "b.py": "json.dumps(x, allow_nan=False)"}) == {"a.py"}


@pytest.mark.parametrize(("text", "value"), SPECIAL.items())
def test_commands_and_files_write_the_ledgers_words(text, value, capsys):
    print_json({"loss": value, "rows": [(value, 1.5)], "by": {3: value}})
    printed = read_strictly(capsys.readouterr().out)
    assert printed == {"loss": text, "rows": [[text, 1.5]], "by": {"3": text}}
    assert to_plain(value) == plain_json(value) == text
    assert decode_number(printed["loss"]) == value or math.isnan(value)


@pytest.mark.parametrize("text", [*SPECIAL, "nan", "inf", "-inf"])
def test_what_was_written_before_is_read_as_the_same_number(text):
    assert math.isnan(float(text)) or math.isinf(float(text))


@pytest.mark.parametrize("value", [0.1, -0.0, 5e-324, 3, True, None, "nan"])
def test_everything_else_stays_as_it_is(value):
    assert repr(plain_json(value)) == repr(value)


def test_a_float_of_another_library_becomes_a_plain_one():
    import numpy as np

    assert type(plain_json(np.float64(0.5))) is float


@pytest.mark.parametrize("loss", SPECIAL.values())
@pytest.mark.parametrize("command", ["watch", "report"])
def test_a_run_with_a_loss_that_is_not_finite_is_told_in_strict_json(command, loss, tmp_path):
    ledger = fl.Ledger.create(tmp_path / "run")
    ledger.append(loss=loss, scale=1.0, grad_norm=math.inf, lr=1e-3, layer_norms={"head.weight": math.inf})
    ledger.close()
    words = [command, str(tmp_path / "run"), "--format", "json"]
    words += ["--out", str(tmp_path / "page.html")] if command == "report" else []
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    runs = read_strictly(found.stdout)["runs"]
    assert {"nan", "inf", "-inf"}.isdisjoint(strings_of(runs))
    assert strings_of(runs) & SPECIAL.keys()


def test_a_sound_run_has_none_of_these_words(tmp_path):
    make_run(tmp_path / "run", skips=False)
    found = CliRunner().invoke(app, ["watch", str(tmp_path / "run"), "--format", "json"])
    assert not strings_of(read_strictly(found.stdout)) & SPECIAL.keys()


def strings_of(value):
    """Every text in a JSON value."""
    if isinstance(value, dict):
        return {text for item in value.values() for text in strings_of(item)}
    if isinstance(value, list):
        return {text for item in value for text in strings_of(item)}
    return {value} if isinstance(value, str) else set()


def test_a_study_with_a_nan_among_its_settings_is_resumed(tmp_path):
    asked = {"config": {"lr": math.nan, "clip": math.inf}}
    with Store(tmp_path, asked=asked) as store:
        store.settle({})
    Store(tmp_path, asked=asked, resume=True).close()
    assert [read_strictly(file.read_text())["asked"] for file in tmp_path.rglob("*.json")] == [
        {"config": {"lr": "NaN", "clip": "Infinity"}}
    ]
