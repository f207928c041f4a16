"""Budgets count work: what other programs take of a machine is not counted, nor are processors counted twice."""

import time

import pytest

from floatline.base import work_clock
from floatline.base.work_clock import WorkClock


def test_waiting_is_not_work():
    watch = WorkClock()
    time.sleep(0.3)
    assert watch.seconds < 0.3


@pytest.mark.parametrize(("clock", "work", "counted"), [(10.0, 1.5, 1.5), (10.0, 75.0, 10.0)], ids=["busy", "threads"])
def test_the_fewer_seconds_count(clock, work, counted, monkeypatch):
    now = {"clock": 100.0, "work": 7.0}
    monkeypatch.setattr(work_clock.time, "perf_counter", lambda: now["clock"])
    monkeypatch.setattr(work_clock.time, "process_time", lambda: now["work"])
    watch = WorkClock()
    now["clock"] += clock
    now["work"] += work
    assert watch.seconds == counted
