"""Several processes are observed: who went wrong first is told of, and what they do not have in common comes first."""

import json
import sys
from pathlib import Path

import pytest
from tests.marks import needs_fsdp2, needs_gloo
from tests.preloaded import COMMAND, run_preloaded
from tests.slow import mostly_slow

from floatline.diagnosis.scripts.ranks import RankReports

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
SCRIPT = Path(__file__).with_name("on_ranks.py")
HERE = SCRIPT.read_text(encoding="utf-8").split("# here")[0].count("\n") + 1
# The exit code, the cause, and what is said of the processes.
FOUND = {
    "healthy": (0, None, "2 processes were observed; what is said of steps and operations is rank 0's"),
    "sharded": (0, None, "2 processes were observed; what is said of steps and operations is rank 0's"),
    "second overflows": (
        1,
        "exp-overflow",
        "in step 13 the loss of rank 1 is not finite and that of rank 0 is: it went wrong before the reduction",
    ),
    "bad batch": (
        1,
        "bad-input-data",
        "in step 13 the loss of rank 1 is not finite and that of rank 0 is: it went wrong before the reduction",
    ),
    "hook": (1, "gradient-overflow", "in step 13 the loss of every process is finite, and what comes after it is not"),
    "apart": (1, "distributed-desync", "2 processes were observed; what is said of steps and operations is rank 0's"),
    "dies": (2, None, "rank 1 made 14 steps, rank 0 15"),
}


@needs_gloo
@needs_fsdp2
@pytest.mark.parametrize("kind", mostly_slow(FOUND, every=100, rare=7))
def test_two_processes_are_diagnosed(kind, tmp_path):
    code, cause, said = FOUND[kind]
    words = ["--format", "json", "--no-try", "--", TORCHRUN, "--standalone", "--nproc-per-node", "2", str(SCRIPT), kind]
    found = run_preloaded(["-c", COMMAND, "diagnose", *words], cwd=tmp_path)
    assert found.returncode == code, found.stderr[-3000:]
    report = json.loads(found.stdout)
    assert report["notes"][0] == said
    assert [one["cause"] for one in report["findings"][:1]] == ([] if cause is None else [cause])
    if kind == "second overflows":
        assert report["findings"][0]["line"] == HERE
    if kind == "dies":
        assert "no space left" in report["no_verdict"]


def report(**changed):
    fine = {"first_bad_step": None, "bad_loss": None, "findings": [], "exit_code": 0, "ended_by": ""}
    return {**fine, "num_steps": 9, "precision": "bf16-mixed", "digests": ["a", "b"], **changed}


def reports(*given):
    return RankReports(dict(enumerate(given)), Path())


def test_one_process_has_nothing_to_be_told_apart_from():
    alone = reports(report())
    assert (alone.teller, [*alone.describe()], alone.find_apart()) == (0, [], [])
    assert (reports().teller, reports().told) == (0, {})


@pytest.mark.parametrize(
    ("given", "teller"),
    [
        ([report(), report()], 0),
        ([report(first_bad_step=5), report(first_bad_step=5, bad_loss=5)], 1),
        ([report(first_bad_step=5, bad_loss=5), report(first_bad_step=5)], 0),
        ([report(first_bad_step=5, bad_loss=5), report(first_bad_step=4, bad_loss=4)], 1),
        ([report(), report(findings=[{}])], 1),
        ([report(exit_code=143, ended_by="SIGTERM"), report(exit_code=1)], 1),
        ([report(exit_code=1), report(exit_code=143, ended_by="SIGTERM")], 0),
    ],
)
def test_the_process_is_told_of_that_went_wrong_first(given, teller):
    assert reports(*given).teller == teller


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"precision": "fp32"}, "rank 1 computes in fp32, rank 0 in bf16-mixed"),
        ({"digests": ["c", "b"]}, "rank 1 begins with other weights than rank 0"),
        ({"num_steps": 3}, "rank 1 made 3 steps, rank 0 9"),
    ],
)
def test_what_is_not_the_same_is_told_first(other, said):
    assert next(reports(report(), report(**other)).describe()) == said
    assert said not in [*reports(report(), report()).describe()]


@pytest.mark.parametrize(
    ("other", "apart"),
    [
        ({"digests": ["a", "c"]}, True),
        ({}, False),
        ({"digests": ["c", "d"]}, False),  # parts of one model, or other seeds: it is noted
        ({"digests": ["a", "c"], "num_steps": 8}, False),
        ({"digests": ["a", "c"], "first_bad_step": 3}, False),  # NaN has many bit patterns
    ],
)
def test_processes_that_begin_as_one_and_end_as_two_train_apart(other, apart):
    assert bool(reports(report(), report(**other)).find_apart()) == apart
