"""The word a run's page is headed by: what was closed in order has not always trained."""

import math
from dataclasses import replace

import pytest
from tests.report.run.runs import make_run

import floatline as fl
from floatline.report.run.folders import open_runs
from floatline.report.run.page import document_of
from floatline.report.run.verdict import cause_of, todo_of, word_of


def look(folder):
    """The facts of a run in a folder."""
    (run,) = open_runs([folder])
    return run.look()


def write(folder, losses, reason=None):
    """A run of these losses, closed in order."""
    ledger = fl.Ledger.create(folder, metadata={})
    for place, loss in enumerate(losses):
        ledger.append(epoch=0, batch=place, micro_batches=1, loss=loss, reason=reason)
    ledger.close()
    return look(folder)


@pytest.mark.parametrize(
    ("losses", "reason", "word", "tone"),
    [
        ([2.0] * 20, None, "FINISHED", "good"),
        ([2.0, math.nan, *[1.0] * 20], None, "FINISHED", "good"),
        ([2.0] * 20 + [math.nan], None, "LAST LOSS NOT FINITE", "warn"),
        ([2.0] * 20 + [math.nan] * 20, None, "LOSS NOT FINITE", "bad"),
        ([2.0] * 20, "overflow", "NOTHING APPLIED", "bad"),
        ([], None, "EMPTY", "warn"),
    ],
)
def test_only_a_run_that_trained_is_called_finished(tmp_path, losses, reason, word, tone):
    assert word_of(write(tmp_path / "run", losses, reason)) == (word, tone)


def test_a_loss_that_was_lost_is_counted_and_to_be_diagnosed(tmp_path):
    run = write(tmp_path / "run", [2.0] * 20 + [math.nan] * 20)
    assert cause_of(run)[0] == "The newest loss is NaN: 20 of 40 are not finite."
    assert "floatline diagnose" in todo_of(run)[0]


def test_an_older_rollback_is_not_why_a_run_died(tmp_path):
    make_run(tmp_path / "run", planned=300, steps=200, close=False)
    cause, rest = cause_of(replace(look(tmp_path / "run"), state="died"))
    assert cause == "The ledger was not closed, and the process that wrote it is gone."
    assert rest == "The newest event: weights are those of step 100."


def test_the_word_of_the_guard_is_why_a_run_stopped(tmp_path):
    make_run(tmp_path / "run", stop="Stopped at step 300: 16 steps in a row were skipped.")
    assert cause_of(look(tmp_path / "run")) == ("Stopped at step 300: 16 steps in a row were skipped.", "")


def test_a_page_of_several_says_what_to_do_about_each_that_went_wrong(tmp_path):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", stop="Stopped at step 300.")
    document, tones = document_of([look(tmp_path / "a"), look(tmp_path / "b")])
    assert tones[document.verdict] == "bad"
    assert [line.partition(":")[0] for line in document.todo] == ["b"]
