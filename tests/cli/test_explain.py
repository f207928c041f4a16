"""`floatline explain`: lists, entries, messages, logs from standard input, wrong use."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.slow import slow
from typer.testing import CliRunner

from floatline.causes import CAUSES, FAMILIES
from floatline.cli.main import app

HALF_ERROR = "value cannot be converted to type at::Half without overflow"


def shown(*arguments: str, **options) -> str:
    result = CliRunner().invoke(app, ["explain", *arguments], **options)
    assert result.exit_code == 0, result.output
    return result.stdout


def flat(text: str) -> str:
    return " ".join(text.split())


def run(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    program = "from floatline.cli.main import main; main()"
    return subprocess.run([sys.executable, "-c", program, "explain", *arguments], capture_output=True, input=stdin)


def test_without_an_argument_all_causes_are_listed_by_family():
    lines = shown().splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(CAUSES)
    assert [line for line in lines if line in FAMILIES.values()] == list(FAMILIES.values())
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("cause", CAUSES.values(), ids=list(CAUSES))
def test_an_entry_shows_everything_within_80_columns(cause):
    text = shown(cause.id)
    for part in (cause.title, cause.mechanism, cause.told_apart, cause.wrong_fix, cause.reference):
        assert flat(part) in flat(text)
    for remedy in cause.remedies:
        assert flat(remedy) in flat(text)
    lines = [line for line in text.splitlines() if "https://" not in line]
    assert max(map(len, lines)) <= 80
    assert not any(line.endswith(" ") for line in lines)


@pytest.mark.parametrize("spelling", [["EPS_UNDERFLOW"], ["eps", "underflow"]])
def test_an_id_is_found_in_any_spelling(spelling):
    assert shown(*spelling) == shown("eps-underflow")


@pytest.mark.parametrize("arguments", [[HALF_ERROR], HALF_ERROR.split()])
def test_a_pasted_message_finds_its_cause_with_or_without_quotes(arguments):
    assert shown(*arguments) == shown("scalar-out-of-range")


def test_a_message_that_decides_nothing_says_so_and_what_to_check():
    text = flat(shown("Training loss is nan"))
    assert "The message alone does not decide the cause; 12 causes fit it." in text
    assert "Run the same batches and seed in FP32." in text
    assert flat(CAUSES["activation-overflow"].told_apart) in text
    assert text.index("activation-overflow") < text.index("fully-masked-softmax")


def test_a_second_message_in_a_log_is_named_below_the_first():
    text = shown("Detected call of `lr_scheduler.step()` before `optimizer.step()`. ... " + HALF_ERROR)
    assert text.startswith("scalar-out-of-range")
    assert "The text also fits\n  scheduler-vs-skipped-step" in text


def test_a_log_is_read_from_standard_input():
    log = "epoch 1\n" * 10 + "Traceback\nValueError: Attempting to unscale FP16 gradients.\n"
    assert shown("-", input=log) == shown("fp16-params-with-scaler")


@slow
def test_a_log_need_not_be_text():
    result = run("-", stdin=b"\xff\xfe 50%|##  |\r" + HALF_ERROR.encode() + b"\x00")
    assert result.returncode == 0
    assert result.stdout.startswith(b"scalar-out-of-range")


def test_the_end_of_a_long_log_is_read():
    log = "loss 2.31 scale 65536\n" * 200_000 + HALF_ERROR
    assert shown("-", input=log) == shown("scalar-out-of-range")


def test_json_of_an_id_is_one_object_with_the_whole_entry():
    result = json.loads(shown("eps-underflow", "--format", "json"))
    assert result["query"] == "eps-underflow"
    assert result["decided"] is True
    assert result["symptom"] is None
    assert result["causes"] == [CAUSES["eps-underflow"].as_json()]


def test_json_of_the_list_holds_every_cause():
    result = json.loads(shown("--format", "json"))
    assert result["query"] is None
    assert [cause["id"] for cause in result["causes"]] == list(CAUSES)


def test_json_of_a_message_that_decides_nothing_says_so():
    result = json.loads(shown("loss: nan", "--format", "json"))
    assert result["decided"] is False
    assert result["symptom"]["title"] == "The loss is NaN or inf"
    assert len(result["causes"]) == 12


def test_text_of_the_user_is_not_read_as_markup():
    result = run("[red]nothing known[/red] [/bold]")
    assert result.returncode == 2
    assert b"[red]nothing known[/red] [/bold]" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "stdin", "says"),
    [
        (["eps-underflw"], b"", "Did you mean 'eps-underflow'"),
        (["quaternion"], b"", "'quaternion' is not in the catalogue"),
        (["The disk is full"], b"", "No cause matches the message 'The disk is full'"),
        (["a message of " + "many words " * 20], b"", "..."),
        ([" "], b"", "The message is empty"),
        (["-"], b"", "The message is empty"),
        (["eps-underflow", "--format", "yaml"], b"", "yaml"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments, stdin, says):
    result = run(*arguments, stdin=stdin)
    assert result.returncode == 2
    assert result.stdout == b""
    assert len(result.stderr.splitlines()) == 1
    assert says in result.stderr.decode()


@slow
def test_explaining_does_not_load_torch():
    program = (
        "import sys\nfrom floatline.cli.main import app\n"
        "app(['explain', 'nan'], standalone_mode=False)\nprint('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.endswith("False\n")


def test_out_of_memory_is_explained_by_what_doctor_counts():
    text = flat(shown("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 15.89 GiB"))
    assert text.startswith("out-of-memory")
    assert "Mixed precision keeps all of these and adds a copy of 2 for autocast, so 18." in text
    assert "floatline doctor FILE.py counts these parts" in text
    assert "floatline doctor" not in shown("eps-underflow")


def test_a_complaint_that_asks_ends_with_one_sign():
    ended = subprocess.run([sys.executable, "-m", "floatline", "diagnoze"], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "Did you mean 'diagnose'? Try 'floatline -h'." in ended.stderr
