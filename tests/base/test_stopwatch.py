"""Budgets count work: what other programs take of a machine is not counted, nor are processors counted twice."""

import time

import pytest

from floatline.base import stopwatch
from floatline.base.stopwatch import Stopwatch


def test_waiting_is_not_work():
    watch = Stopwatch()
    time.sleep(0.3)
    assert watch.seconds < 0.3


@pytest.mark.parametrize(("clock", "work", "counted"), [(10.0, 1.5, 1.5), (10.0, 75.0, 10.0)], ids=["busy", "threads"])
def test_the_fewer_seconds_count(clock, work, counted, monkeypatch):
    now = {"clock": 100.0, "work": 7.0}
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now["clock"])
    monkeypatch.setattr(stopwatch.time, "process_time", lambda: now["work"])
    watch = Stopwatch()
    now["clock"] += clock
    now["work"] += work
    assert watch.seconds == counted
