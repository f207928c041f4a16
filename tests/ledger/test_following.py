"""A ledger followed while it grows: nothing is read twice, nothing is missed, and memory stays bounded."""

import math
import os
import random
import socket
import subprocess
import sys

import pytest

import floatline as fl
from floatline.errors import LedgerError
from floatline.ledger.follower import Follower, is_writer_alive
from floatline.ledger.lines import Step
from floatline.ledger.parts import list_parts
from floatline.ledger.progress import MOST_STRETCHES, Progress, Spread


def fill(ledger: fl.Ledger, num: int, *, first: int = 0) -> None:
    for i in range(first, first + num):
        ledger.append(
            epoch=i // 50,
            batch=i % 50,
            loss=math.nan if i % 40 == 39 else 4.0 - i / 1000,
            scale=65536.0 if i < 100 else 32768.0,
            grad_norm=0.5 + i % 3,
            reason="forward-nonfinite" if i % 40 == 39 else "overflow" if i % 30 == 7 else None,
            layer_norms={"first": 0.5, "last": 0.25} if i % 10 == 0 else None,
        )


def make(folder, num: int, **options) -> None:
    with fl.Ledger.create(folder, metadata={"steps": num}, **options) as ledger:
        fill(ledger, num)


def test_each_read_gives_only_what_is_new(tmp_path):
    ledger = fl.Ledger.create(tmp_path)
    follower = Follower(tmp_path)
    assert list(follower.read()) == []
    fill(ledger, 3)
    ledger.flush()
    assert [record.attempt for record in follower.read()] == [1, 2, 3]
    assert list(follower.read()) == []
    fill(ledger, 2, first=3)
    ledger.close()
    records = list(follower.read())
    assert [record.attempt for record in records if isinstance(record, Step)] == [4, 5]
    assert records[-1].kind == "end"


def test_pieces_of_any_size_come_to_what_the_whole_comes_to(tmp_path):
    make(tmp_path / "whole", 400, part_bytes=8192)
    parts = list_parts(tmp_path / "whole")
    assert len(parts) > 3
    whole = fl.Ledger.read(tmp_path / "whole")
    chance = random.Random(0)
    copy = tmp_path / "copy"
    copy.mkdir()
    progress = Progress(copy)
    for part in parts:
        data, place = part.read_bytes(), 0
        while place < len(data):
            size = chance.randint(1, 900)
            with (copy / part.name).open("ab") as file:
                file.write(data[place : place + size])
            place += size
            progress.update()
    assert progress.follower.accounts.as_json() == whole.accounts.as_json()
    assert progress.ended
    assert sum(stretch.loss.num + stretch.loss.num_nan for stretch in progress.stretches) == 400
    assert progress.layers["first"].num_records == 40


def test_a_line_that_is_not_whole_is_left_for_later(tmp_path):
    make(tmp_path / "whole", 5)
    data = (tmp_path / "whole" / "ledger-00000.jsonl").read_bytes()
    cut = data.rindex(b'"attempt":5')
    path = tmp_path / "ledger-00000.jsonl"
    path.write_bytes(data[:cut])
    follower = Follower(tmp_path)
    assert [record.attempt for record in follower.read()] == [1, 2, 3, 4]
    path.write_bytes(data)
    assert next(iter(follower.read())).attempt == 5


def test_steps_of_deleted_parts_are_in_the_totals(tmp_path):
    ledger = fl.Ledger.create(tmp_path, part_bytes=4096, keep_parts=1)
    progress = Progress(tmp_path)
    fill(ledger, 5)
    ledger.flush()
    progress.update()
    fill(ledger, 295, first=5)
    ledger.close()
    progress.update()
    assert progress.run.attempted == 300
    assert progress.follower.num_missed > 200
    assert progress.run.skipped == fl.Ledger.read(tmp_path).accounts.run.skipped


def test_another_run_in_the_same_folder_is_begun_anew(tmp_path):
    make(tmp_path / "run", 60)
    progress = Progress(tmp_path / "run")
    progress.update()
    for path in (tmp_path / "run").iterdir():
        path.unlink()
    ledger = fl.Ledger.create(tmp_path / "run")
    progress.update()
    assert progress.run.attempted == 0
    assert progress.stretches == []  # before its first step, too
    ledger.close()
    for path in (tmp_path / "run").iterdir():
        path.unlink()
    make(tmp_path / "run", 200)  # longer than the one before: its size alone would not tell
    progress.update()
    assert progress.run.attempted == 200
    assert len(progress.stretches) == 200
    assert progress.num_events == 0


def test_a_resumed_run_goes_on(tmp_path):
    ledger = fl.Ledger.create(tmp_path)
    fill(ledger, 4)
    ledger.event("stop", "it is enough")
    ledger.close()
    progress = Progress(tmp_path)
    progress.update()
    assert progress.ended and progress.stopped
    with fl.Ledger.resume(tmp_path) as ledger:
        fill(ledger, 3, first=4)
    progress.update()
    assert progress.num_resumes == 1
    assert not progress.stopped and progress.ended
    assert progress.run.attempted == 7


def test_a_missing_line_is_an_error_that_names_its_place(tmp_path):
    make(tmp_path, 9)
    path = tmp_path / "ledger-00000.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4] + lines[5:]))
    with pytest.raises(LedgerError, match=r"ledger-00000.jsonl:5: step 5 follows step 3. Lines are missing"):
        Progress(tmp_path).update()


@pytest.mark.parametrize("line", [b"{}\n", b"not json\n", b'{"kind":"step","attempt":1,"time":NaN}\n'])
def test_a_line_of_another_program_is_refused(tmp_path, line):
    make(tmp_path, 2)
    with (tmp_path / "ledger-00000.jsonl").open("ab") as file:
        file.write(line)
    with pytest.raises(LedgerError, match="ledger-00000.jsonl:5"):
        Progress(tmp_path).update()


def test_a_folder_without_a_ledger_is_an_error(tmp_path):
    with pytest.raises(LedgerError, match="There is no ledger"):
        Progress(tmp_path).update()
    with pytest.raises(LedgerError, match="There is no ledger"):
        Progress(tmp_path / "nowhere").update()


def test_a_long_run_is_held_in_bounded_memory(tmp_path):
    progress = Progress(tmp_path)
    for i in range(1, 10_001):
        progress.add(Step(i, float(i), True, numbers={"loss": float(i), "scale": 2.0}))
    assert MOST_STRETCHES / 2 <= len(progress.stretches) <= MOST_STRETCHES
    assert progress.steps_per_stretch == 16
    assert [stretch.first for stretch in progress.stretches][:3] == [1, 17, 33]
    assert all(a.last + 1 == b.first for a, b in zip(progress.stretches, progress.stretches[1:], strict=False))
    assert progress.stretches[0].loss.mean == pytest.approx(8.5)
    assert progress.stretches[-1].last == 10_000


def test_reading_in_portions_ends_where_reading_at_once_does(tmp_path):
    make(tmp_path, 100)
    portions, whole = Progress(tmp_path), Progress(tmp_path)
    counts = []
    while (num := portions.update(most=30)) == 30:
        counts.append(num)
    assert counts == [30, 30, 30]
    assert whole.update() == 101  # and the end
    assert portions.follower.accounts.as_json() == whole.follower.accounts.as_json()


def test_values_that_are_not_finite_are_counted_and_enter_no_mean():
    spread = Spread()
    for value in (1.0, math.nan, 3.0, math.inf):
        spread.add(value)
    assert (spread.num, spread.num_nan, spread.num_inf) == (2, 1, 1)
    assert (spread.mean, spread.low, spread.high) == (2.0, 1.0, 3.0)
    assert spread.last == math.inf
    spread = Spread()
    spread.add(1.6e308)
    spread.add(1.6e308)
    assert math.isfinite(spread.mean)  # where their sum is not
    one, other = Spread(), Spread()
    one.add(1.0)
    other.add(math.nan)
    one.join(other)
    assert (one.num, one.mean, one.num_nan) == (1, 1.0, 1)
    assert math.isnan(one.last)


def test_the_pace_leaves_out_the_pause_before_a_resume(tmp_path):
    from floatline.ledger.lines import Mark

    progress = Progress(tmp_path)
    assert progress.steps_per_second is None
    for i in range(1, 12):
        progress.add(Step(i, 0.5 * i, True))
    assert progress.steps_per_second == pytest.approx(2.0)
    progress.add(Mark("resume", 1000.0))
    assert progress.steps_per_second is None
    progress.add(Step(12, 1001.0, True))
    progress.add(Step(13, 1002.0, True))
    assert progress.steps_per_second == pytest.approx(1.0)


def test_a_norm_is_held_as_the_backward_passes_left_it(tmp_path):
    progress = Progress(tmp_path)
    norms = {"a": 0.5, "b": math.inf, "c": 0.0}
    progress.add(Step(1, 0.0, True, counts={"micro_batches": 4}, numbers={"scale": 1024.0}, layer_norms=norms))
    assert progress.layers["a"].scaled.high == 2048.0
    assert progress.layers["b"].norm.num_inf == 1
    assert progress.layers["c"].scaled.num == 0 and progress.layers["c"].num_records == 1


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no call that only asks")
def test_whether_the_writer_is_alive_is_told_where_it_can_be(tmp_path):
    assert is_writer_alive(tmp_path) is None  # no lock file
    ledger = fl.Ledger.create(tmp_path)
    assert is_writer_alive(tmp_path) is True
    ledger.close()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / "ledger.lock").write_text(f"process {gone.pid} on {socket.gethostname()}\n")
    assert is_writer_alive(tmp_path) is False
    (tmp_path / "ledger.lock").write_text(f"process {os.getpid()} on another-host.example\n")
    assert is_writer_alive(tmp_path) is None
    (tmp_path / "ledger.lock").write_text("whatever")
    assert is_writer_alive(tmp_path) is None
