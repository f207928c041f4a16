"""The ledger: what it writes is what happened, whatever happens to the process."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.slow import slow

import floatline
from floatline.errors import CauseError, LedgerError
from floatline.ledger import writer as ledger_writer
from floatline.ledger.account import MAX_EPOCHS
from floatline.ledger.history import COLUMNS
from floatline.ledger.ledger import Ledger
from floatline.ledger.lines import COUNTS, EVENTS, MAX_LINE, NUMBERS, REASONS

DOCS = Path(__file__).parent.parent.parent / "docs" / "ledger.md"


def child(code: str, *arguments: object) -> subprocess.Popen:
    """A real process that runs the code, with its output as text."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines(folder: Path) -> list[bytes]:
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.jsonl"))).splitlines(keepends=True)


def strict(line: bytes) -> dict:
    """JSON as the standard has it, without Python's NaN."""

    def refuse(name: str) -> float:
        raise ValueError(name)

    return json.loads(line, parse_constant=refuse)


def same(left: float | None, right: float | None) -> bool:
    """Equal to the bit, with one NaN."""
    if left is None or right is None:
        return left is right
    return math.isnan(right) if math.isnan(left) else left.hex() == right.hex()


# Values


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, 1.7976931348623157e308, 0.1])
def test_every_loss_comes_back_as_it_was(tmp_path, value):
    with Ledger.create(tmp_path) as ledger:
        ledger.append(loss=value)
    assert same(Ledger.read(tmp_path).loss[0], value)


def test_every_line_is_standard_json(tmp_path):
    with Ledger.create(tmp_path) as ledger:
        ledger.append(loss=math.nan, layer_norms={"head": math.inf})
    assert [strict(line)["kind"] for line in lines(tmp_path)] == ["header", "step", "end"]


def test_a_plain_json_writer_writes_what_is_no_json():
    with pytest.raises(ValueError, match="NaN"):
        strict(json.dumps({"loss": math.nan}).encode())


numbers = st.floats(allow_nan=True, allow_infinity=True)
records = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(NUMBERS, numbers),
        **{name: st.integers(-(2**63), 2**63) for name in COUNTS},
        "reason": st.sampled_from(REASONS),
        "layer_norms": st.dictionaries(st.text(max_size=5), numbers, max_size=3),
    },
)


@settings(max_examples=60, deadline=None)
@given(st.lists(records, max_size=6))
def test_any_record_comes_back_exactly_and_in_order(tmp_path_factory, given_records):
    folder = tmp_path_factory.mktemp("run")
    with Ledger.create(folder, part_bytes=4096) as ledger:
        for record in given_records:
            ledger.append(**record)
    history = Ledger.read(folder)
    assert len(history) == len(given_records)
    for index, record in enumerate(given_records):
        assert history.attempt[index] == index + 1
        assert history.applied[index] == ("reason" not in record)
        assert history.reason[index] == record.get("reason")
        assert all(getattr(history, name)[index] == record.get(name) for name in COUNTS)
        assert all(same(getattr(history, name)[index], record.get(name)) for name in NUMBERS)
        norms, expected = history.layer_norms[index], record.get("layer_norms")
        assert norms == expected or all(same(norms[name], expected[name]) for name in expected)


def test_a_tensor_changed_after_append_does_not_change_the_line(tmp_path, monkeypatch):
    loss, norms = torch.tensor(2.5, requires_grad=True), torch.tensor([1.0, 2.0])
    gate = threading.Event()
    take = ledger_writer.LedgerWriter._take
    monkeypatch.setattr(ledger_writer.LedgerWriter, "_take", lambda self, item: (gate.wait(), take(self, item)))
    with Ledger.create(tmp_path) as ledger:
        ledger.append(loss=loss, scale=torch.tensor(2.0**16), layer_norms=(("a", "b"), norms))
        loss.detach().zero_()
        norms.zero_()
        gate.set()  # only now does the thread read anything
    history = Ledger.read(tmp_path)
    assert history.loss == [2.5]
    assert history.scale == [65536.0]
    assert history.layer_norms == [{"a": 1.0, "b": 2.0}]


def test_holding_the_tensor_itself_would_change_the_line():
    norms = torch.tensor([1.0, 2.0])
    held = norms.detach()
    norms.zero_()
    assert held.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_of_every_float_dtype_are_kept_exactly(tmp_path, dtype):
    value = torch.tensor(0.1, dtype=dtype)
    with Ledger.create(tmp_path) as ledger:
        ledger.append(loss=value)
    assert Ledger.read(tmp_path).loss == [value.double().item()]


def test_outcomes_that_are_tensors_decide_late(tmp_path):
    flag = torch.tensor([True])
    with Ledger.create(tmp_path) as ledger:
        ledger.append(applied=flag, reason="overflow", cause="gradient-overflow")
        ledger.append(applied=~flag, reason="overflow", cause="gradient-overflow")
        for code in range(5):
            ledger.append(reason=torch.tensor(code))
        ledger.append(packed=(("loss", "reason"), torch.tensor([3.0, 2.0])))
    history = Ledger.read(tmp_path)
    assert history.reason == [None, "overflow", None, *REASONS, "forward-nonfinite"]
    assert history.cause[:2] == [None, "gradient-overflow"]
    assert history.applied == [reason is None for reason in history.reason]
    assert history.loss[-1] == 3.0


class _SlowEvent:
    """Stands for a CUDA event: the value is there only once somebody has waited for it."""

    def __init__(self, host: torch.Tensor, value: float) -> None:
        self.host, self.value, self.thread = host, value, None

    def synchronize(self) -> None:
        self.thread = threading.current_thread().name
        self.host.fill_(self.value)


def test_device_values_are_read_on_the_writer_thread_after_their_event(tmp_path, monkeypatch):
    host = torch.tensor(math.nan)
    event = _SlowEvent(host, 7.0)
    with Ledger.create(tmp_path) as ledger:
        values = ledger_writer.LateValues({"loss": 0.0})
        values._numbers["loss"], values._events = host, [event]
        monkeypatch.setattr("floatline.ledger.ledger.LateValues", lambda *_: values)
        ledger.append()
    assert Ledger.read(tmp_path).loss == [7.0]
    assert event.thread == "floatline-ledger"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_append_does_not_wait_for_the_gpu_and_keeps_the_value_of_its_moment(tmp_path):
    loss = torch.tensor(2.5, device="cuda")
    norms = torch.tensor([1.0, 2.0], device="cuda")
    with Ledger.create(tmp_path) as ledger:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            ledger.append(loss=loss, applied=loss > 3, reason="overflow", layer_norms=(("a", "b"), norms))
            loss.fill_(9.0)
            norms.zero_()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    history = Ledger.read(tmp_path)
    assert (history.loss, history.applied, history.layer_norms) == ([2.5], [False], [{"a": 1.0, "b": 2.0}])


def test_the_ledger_does_not_load_torch():
    code = "import sys, floatline.ledger.ledger as l; sys.exit('torch' in sys.modules)"
    assert child(code).wait() == 0


@slow
def test_the_check_above_can_fail():
    code = "import sys, floatline.guard.scaler; sys.exit('torch' in sys.modules)"
    assert child(code).wait() == 1


# Accounts


def test_counters_equal_the_lines(tmp_path):
    with Ledger.create(tmp_path) as ledger:
        for index in range(100):
            ledger.append(reason="overflow" if index % 10 == 0 else None, loss=float(index))
        live = ledger.accounts().run
    steps = [strict(line) for line in lines(tmp_path) if b'"kind":"step"' in line]
    assert (live.attempted, live.applied, live.num_overflows) == (100, 90, 10)
    assert len(steps) == 100
    assert sum(step["applied"] for step in steps) == 90
    assert Ledger.read(tmp_path).accounts.run == live


def test_the_summary_says_what_happened_in_five_lines(tmp_path):
    with Ledger.create(tmp_path) as ledger:
        for index in range(4000):
            ledger.append(
                reason="overflow" if index < 9 else None,
                loss=math.nan if index == 5 else 8.0 - index / 1000,
                scale=65536.0 / 2 ** min(index, 9),
                epoch=index // 1000,
                batch=index % 1000,
            )
        ledger.event("stop", "loss is NaN\n\x1b[31m")
        text = ledger.summary()
    assert text == Ledger.read(tmp_path).summary()
    assert text.splitlines() == [
        "4,000 attempted, 3,991 applied, 9 skipped (9 overflow)",
        "loss 8 first, 4.001 last, 1 NaN, 0 infinite",
        "scale 128 last, 128 to 65536, 9 reductions",
        "success rate 99.77 %",
        "last event: stop after step 4,000 (epoch 3, batch 999): loss is NaN  [31m",
    ]


def test_an_empty_ledger_has_a_summary_too(tmp_path):
    with Ledger.create(tmp_path) as ledger:
        assert len(ledger.summary().splitlines()) == 5


def test_one_skip_in_many_steps_is_never_rounded_to_full_success(tmp_path):
    with Ledger.create(tmp_path) as ledger:
        ledger.append(reason="requested")
        for _ in range(30_000):
            ledger.append()
        assert "success rate 99.99 %" in ledger.summary()
    assert f"{30_000 / 30_001:.2%}" == "100.00%"  # what plain rounding says


def test_epochs_are_added_up_one_by_one(tmp_path):
    with Ledger.create(tmp_path) as ledger:
        for loss, scale, reason in [(1.0, 8.0, None), (3.0, 8.0, None), (math.nan, 4.0, "overflow")]:
            ledger.append(epoch=0, loss=loss, scale=scale, reason=reason)
        for loss, scale in [(math.inf, 2.0), (5.0, 2.0)]:
            ledger.append(epoch=1, loss=loss, scale=scale)
    first, second = Ledger.read(tmp_path).epochs.values()
    assert (first.mean_loss, first.num_nan_losses, first.num_overflows, first.scale) == (2.0, 1, 1, 4.0)
    assert (first.num_scale_reductions, second.num_scale_reductions) == (1, 1)
    assert first.success_rate == pytest.approx(2 / 3)
    assert (second.mean_loss, second.num_inf_losses, second.success_rate) == (5.0, 1, 1.0)


def test_the_mean_of_huge_losses_does_not_overflow(tmp_path):
    with Ledger.create(tmp_path) as ledger:
        for _ in range(3):
            ledger.append(epoch=0, loss=1.5e308)
    assert Ledger.read(tmp_path).epochs[0].mean_loss == pytest.approx(1.5e308)
    assert math.isinf(1.5e308 + 1.5e308 + 1.5e308)


def test_events_stand_between_the_steps_they_happened_between(tmp_path):
    with Ledger.create(tmp_path) as ledger:
        ledger.append(epoch=3, batch=117)
        ledger.event("rollback", "weights non-finite", values={"to_step": torch.tensor(0.0)})
        ledger.append(epoch=3, batch=118)
        ledger.event("note", batch=5)
    kinds = [strict(line)["kind"] for line in lines(tmp_path)]
    assert kinds == ["header", "step", "event", "step", "event", "end"]
    first, second = Ledger.read(tmp_path).events
    assert (first.attempt, first.epoch, first.batch, first.values) == (1, 3, 117, {"to_step": 0.0})
    assert (second.attempt, second.epoch, second.batch) == (2, 3, 5)


def test_columns_become_arrays(tmp_path):
    with Ledger.create(tmp_path, run_id="r1", metadata={"seed": 3}) as ledger:
        ledger.append(loss=1.0, epoch=0)
        ledger.append(reason="outlier")
    history = Ledger.read(tmp_path)
    assert history.header.run_id == "r1"
    assert history.header.metadata == {"seed": 3}
    assert history.ended
    assert {len(history.array(name)) for name in COLUMNS} == {2}
    assert history.array("applied").tolist() == [True, False]
    assert math.isnan(history.array("loss")[1])
    with pytest.raises(LedgerError, match="Did you mean 'loss'"):
        history.array("los")


# Crashes

RUN = """
import sys
from floatline import Ledger
ledger = Ledger.create(sys.argv[1], flush_lines=7, part_bytes=int(sys.argv[2]))
for step in range(1, 10**9):
    ledger.append(loss=1 / step, epoch=0, batch=step)
    if step == 500:
        ledger.flush()
        print("synced", flush=True)
"""


@pytest.mark.parametrize("part_bytes", [1 << 20, 8192])
def test_a_killed_run_keeps_every_synced_step_and_goes_on_where_it_stopped(tmp_path, part_bytes):
    run = child(RUN, tmp_path, part_bytes)
    assert run.stdout.readline() == "synced\n"
    time.sleep(0.2)
    run.send_signal(signal.SIGKILL)
    run.wait()
    before = Ledger.read(tmp_path)
    assert len(before) >= 500
    assert before.batch == list(range(1, len(before) + 1))
    assert not before.ended
    with Ledger.resume(tmp_path, part_bytes=part_bytes) as ledger:
        assert ledger.run_id == before.header.run_id
        ledger.append(loss=0.5)
    after = Ledger.read(tmp_path)
    assert after.attempt == list(range(1, len(before) + 2))
    assert after.num_resumes == 1
    assert after.ended


NAIVE = """
import json, sys
file = open(sys.argv[1], "a")
for step in range(500):
    file.write(json.dumps({"step": step, "loss": float("nan")}) + "\\n")
print("written", flush=True)
input()
"""


def test_a_naive_writer_loses_steps_that_it_wrote_when_killed(tmp_path):
    path = tmp_path / "naive.jsonl"
    command = [sys.executable, "-c", NAIVE, str(path)]
    run = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert run.stdout.readline() == "written\n"
    run.kill()
    run.wait()
    assert path.read_bytes().count(b"\n") < 500


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_torn_line_is_dropped_to_the_byte_and_said(tmp_path, cut):
    with Ledger.create(tmp_path) as ledger:
        for step in range(3):
            ledger.append(loss=float(step))
    path = tmp_path / "ledger-00000.jsonl"
    whole = lines(tmp_path)[:-1]
    torn = whole[-1][:-cut]
    path.write_bytes(b"".join(whole[:-1]) + torn)
    history = Ledger.read(path)
    assert (history.loss, history.dropped_bytes) == ([0.0, 1.0], len(torn))
    with Ledger.resume(tmp_path) as ledger:
        assert ledger.dropped_bytes == len(torn)
        ledger.append(loss=9.0)
    assert path.read_bytes().startswith(b"".join(whole[:-1]) + b'{"kind":"resume"')
    assert strict(lines(tmp_path)[3])["dropped_bytes"] == len(torn)
    assert Ledger.read(tmp_path).loss == [0.0, 1.0, 9.0]


def test_appending_after_a_torn_line_without_recovery_ruins_two_records(tmp_path):
    with Ledger.create(tmp_path) as ledger:
        ledger.append(loss=1.0)
    path = tmp_path / "ledger-00000.jsonl"
    header, step, _ = lines(tmp_path)
    path.write_bytes(header + step[:-5] + step)
    with pytest.raises(LedgerError, match=r"ledger-00000.jsonl:2: not JSON"):
        Ledger.read(tmp_path)


@pytest.mark.parametrize("content", [b"", b'{"kind":"header","sch'])
def test_a_part_whose_header_is_torn_is_begun_again(tmp_path, content):
    with Ledger.create(tmp_path) as ledger:
        ledger.append(loss=1.0)
    (tmp_path / "ledger-00001.jsonl").write_bytes(content)
    assert Ledger.read(tmp_path).loss == [1.0]
    with Ledger.resume(tmp_path) as ledger:
        assert ledger.dropped_bytes == len(content)
        ledger.append(loss=2.0)
    assert Ledger.read(tmp_path).loss == [1.0, 2.0]


def test_a_script_that_forgets_to_close_or_raises_loses_nothing(tmp_path):
    code = (
        "import sys, floatline\nl = floatline.Ledger.create(sys.argv[1])\nfor i in range(9): l.append()\nraise OSError"
    )
    assert child(code, tmp_path).wait() == 1
    history = Ledger.read(tmp_path)
    assert len(history) == 9
    assert history.ended


def test_important_events_are_synced_at_once(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    ledger = Ledger.create(tmp_path, flush_seconds=60.0)
    counts = []
    for event in EVENTS:
        ledger.event(event)
        ledger.accounts()  # the thread has taken it
        counts.append(len(synced))
    assert counts == [3, 4, 5, 6, 7, 8, 8, 8, 8]  # the header and its folder came first
    ledger.close()
    assert len(synced) > 7


def test_a_step_reaches_the_file_within_the_flush_time(tmp_path):
    with Ledger.create(tmp_path, flush_seconds=0.05, flush_lines=10**6) as ledger:
        ledger.append(loss=1.0)
        for _ in range(5000):
            if len(Ledger.read(tmp_path)):
                break
            time.sleep(0.05)
        assert len(Ledger.read(tmp_path)) == 1


# A full disk

FULL = """
import resource, sys
from floatline import Ledger
from floatline.errors import LedgerError
ledger = Ledger.create(sys.argv[1], flush_lines=10)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
taken = 0
try:
    while True:
        ledger.append(loss=float(taken), reason="overflow")
        taken += 1
except LedgerError as error:
    print(error)
try:
    ledger.append(loss=-1.0)
except LedgerError:
    print("refused again")
assert ledger.accounts().run.attempted == ledger.accounts().run.num_overflows == taken
if sys.argv[2] == "room":
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    ledger.flush()
    ledger.append(loss=float(taken))
    taken += 1
print(taken)
try:
    ledger.close()
except LedgerError as error:
    print(error)
"""


def test_a_full_disk_is_told_to_the_training_thread_and_nothing_is_lost(tmp_path):
    out, err = child(FULL, tmp_path, "room").communicate()
    message, again, taken = out.splitlines()
    assert not err
    assert re.search(r"cannot be written to .*: File too large. [\d,]+ lines wait in memory: make room", message)
    assert again == "refused again"
    assert Ledger.read(tmp_path).loss == [float(index) for index in range(int(taken))]


def test_a_disk_that_stays_full_is_told_again_at_the_end_and_the_whole_lines_remain(tmp_path):
    out, err = child(FULL, tmp_path, "full").communicate()
    *_, taken, message = out.splitlines()
    assert not err
    left = int(re.search(r"closed, but ([\d,]+) lines are not on the disk", message)[1].replace(",", ""))
    history = Ledger.read(tmp_path)
    assert history.dropped_bytes > 0
    assert len(history) == int(taken) + 1 - left  # the line that ends the ledger waited too
    assert history.loss == [float(index) for index in range(len(history))]


START = """
import resource, sys
from floatline import Ledger
from floatline.errors import LedgerError
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    getattr(Ledger, sys.argv[2])(sys.argv[1])
except LedgerError as error:
    print(error)
"""


def test_a_ledger_that_cannot_be_begun_for_lack_of_room_leaves_nothing_in_the_way(tmp_path):
    out, err = child(START, tmp_path, "create", 100).communicate()
    assert "cannot be used: File too large" in out
    assert not err
    Ledger.create(tmp_path).close()
    size = (tmp_path / "ledger-00000.jsonl").stat().st_size
    out, err = child(START, tmp_path, "resume", size + 10).communicate()
    assert "File too large" in out
    assert not err
    Ledger.resume(tmp_path).close()
    assert Ledger.read(tmp_path).num_resumes == 1


def test_a_failed_sync_is_never_taken_for_a_success_later(tmp_path, monkeypatch):
    ledger = Ledger.create(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(LedgerError, match="Input/output error"):
            ledger.flush()
    with pytest.raises(LedgerError, match="Input/output error"):
        ledger.flush()
    with pytest.raises(LedgerError, match="Input/output error"):
        ledger.close()


def test_a_value_that_cannot_be_read_is_told_and_nothing_after_it_is_numbered_wrongly(tmp_path):
    ledger = Ledger.create(tmp_path)
    ledger.append(loss=1.0)
    ledger.append(reason=torch.tensor(17))
    with pytest.raises(LedgerError, match="lost what followed step 1: the reason read from the device is 17"):
        for _ in range(10_000):
            ledger.append(loss=2.0)
            ledger.accounts()
    with pytest.raises(LedgerError, match="lost what followed step 1"):
        ledger.close()
    history = Ledger.read(tmp_path)
    assert history.loss == [1.0]
    assert not history.ended


# Rotation


def test_parts_rotate_by_size_and_read_as_one(tmp_path):
    with Ledger.create(tmp_path, part_bytes=4096, run_id="r", metadata={"a": [1]}) as ledger:
        for step in range(500):
            ledger.append(loss=float(step), epoch=step // 100)
    parts = sorted(tmp_path.glob("*.jsonl"))
    assert [path.name for path in parts[:2]] == ["ledger-00000.jsonl", "ledger-00001.jsonl"]
    assert len(parts) > 10
    assert all(path.stat().st_size <= 4096 for path in parts)
    headers = [strict(path.read_bytes().splitlines()[0]) for path in parts]
    assert [header["part"] for header in headers] == list(range(len(parts)))
    assert {header["run_id"] for header in headers} == {"r"}
    history = Ledger.read(tmp_path)
    assert history.loss == [float(step) for step in range(500)]
    assert [account.attempted for account in history.epochs.values()] == [100] * 5


def test_a_changed_working_directory_or_metadata_does_not_change_the_parts(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    metadata = {"sizes": [1]}
    with Ledger.create("run", part_bytes=4096, metadata=metadata) as ledger:
        monkeypatch.chdir(tmp_path / "elsewhere")
        metadata["sizes"].append(2)
        for step in range(100):
            ledger.append(loss=float(step))
    headers = [strict(path.read_bytes().splitlines()[0]) for path in (tmp_path / "run").glob("*.jsonl")]
    assert len(headers) > 2
    assert all(header["metadata"] == {"sizes": [1]} for header in headers)
    assert len(Ledger.read(tmp_path / "run")) == 100


def test_deleted_parts_leave_their_totals(tmp_path):
    with Ledger.create(tmp_path, part_bytes=4096, keep_parts=2) as ledger:
        for step in range(500):
            ledger.append(loss=float(step), epoch=0, reason="overflow" if step == 0 else None)
        live = ledger.accounts()
    assert len(list(tmp_path.glob("*.jsonl"))) == 2
    history = Ledger.read(tmp_path)
    assert len(history) < 500
    assert history.attempt[-1] == 500
    assert history.accounts == live
    assert history.epochs[0].attempted == 500
    with Ledger.resume(tmp_path) as ledger:
        ledger.append()
        assert ledger.accounts().run.attempted == 501
        assert ledger.accounts().run.num_overflows == 1


def test_a_missing_part_or_line_is_noticed(tmp_path):
    with Ledger.create(tmp_path, part_bytes=4096) as ledger:
        for step in range(200):
            ledger.append(loss=float(step))
    first, second, *_ = parts = sorted(tmp_path.glob("*.jsonl"))
    content = second.read_bytes()
    split = content.splitlines(keepends=True)
    second.write_bytes(b"".join(split[:3] + split[4:]))
    with pytest.raises(LedgerError, match=r"00001.jsonl:4: step \d+ follows step \d+. Lines are missing"):
        Ledger.read(tmp_path)
    second.write_bytes(b"".join(split[:-1]))
    with pytest.raises(LedgerError, match="does not add up to that. Lines are missing"):
        Ledger.read(tmp_path)
    second.write_bytes(content[:-3])
    with pytest.raises(LedgerError, match="cut off in mid-line"):
        Ledger.read(tmp_path)
    second.unlink()
    with pytest.raises(LedgerError, match="has a gap between ledger-00000.jsonl and ledger-00002.jsonl"):
        Ledger.read(tmp_path)
    assert len(Ledger.read(first)) > 0
    assert len(parts) > 2


def test_the_header_stays_readable_after_very_many_epochs(tmp_path):
    with Ledger.create(tmp_path, part_bytes=1 << 20) as ledger:
        for step in range(MAX_EPOCHS + 1500):
            ledger.append(epoch=step, loss=0.1)
    history = Ledger.read(tmp_path)
    assert len(history) == MAX_EPOCHS + 1500
    assert list(history.epochs) == list(range(1500, MAX_EPOCHS + 1500))


# Processes and threads

HOLD = """
import sys
from floatline import Ledger
ledger = Ledger.create(sys.argv[1])
print("held", flush=True)
input()
"""


def test_a_folder_in_use_is_refused_and_that_of_a_dead_process_is_taken_over(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    for use in (Ledger.resume, Ledger.create):
        with pytest.raises(LedgerError, match=rf"is in use by process {holder.pid} on .*Stop that run, or"):
            use(tmp_path)
    assert Ledger.read(tmp_path).header.part == 0  # reading needs no lock
    holder.kill()
    holder.wait()
    assert (tmp_path / "ledger.lock").exists()
    with Ledger.resume(tmp_path) as ledger:
        ledger.append()
    assert len(Ledger.read(tmp_path)) == 1


FORK = """
import os, sys, time
from floatline import Ledger
from floatline.errors import LedgerError
ledger = Ledger.create(sys.argv[1])
if os.fork() == 0:
    try:
        ledger.append()
    except LedgerError as error:
        print(error, flush=True)
    sys.stdout.close()
    time.sleep(60)
    os._exit(0)
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_cannot_append_and_does_not_keep_the_folder_of_its_dead_parent(tmp_path):
    run = subprocess.Popen(
        [sys.executable, "-c", FORK, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        said = [run.stdout.readline(), run.stdout.readline()]
        assert any(f"opened by process {run.pid}, and this is its child" in line for line in said)
        with pytest.raises(LedgerError, match="in use"):
            Ledger.resume(tmp_path)
        run.kill()
        run.wait()
        Ledger.resume(tmp_path).close()
    finally:
        os.killpg(run.pid, signal.SIGKILL)


def test_one_process_cannot_open_a_folder_twice(tmp_path):
    with Ledger.create(tmp_path), pytest.raises(LedgerError, match=f"in use by process {os.getpid()}"):
        Ledger.resume(tmp_path)
    Ledger.resume(tmp_path).close()


def test_two_threads_may_append_and_each_keeps_its_order(tmp_path):
    with Ledger.create(tmp_path, queue_steps=8) as ledger:

        def work(epoch: int) -> None:
            for batch in range(1000):
                ledger.append(epoch=epoch, batch=batch)

        threads = [threading.Thread(target=work, args=(epoch,)) for epoch in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    history = Ledger.read(tmp_path)
    assert history.attempt == list(range(1, 2001))
    for epoch in range(2):
        mine = [batch for place, batch in zip(history.epoch, history.batch, strict=True) if place == epoch]
        assert mine == list(range(1000))


def test_a_full_queue_makes_append_wait_and_drops_nothing(tmp_path, monkeypatch):
    gate = threading.Event()
    take = ledger_writer.LedgerWriter._take
    monkeypatch.setattr(ledger_writer.LedgerWriter, "_take", lambda self, item: (gate.wait(), take(self, item)))
    with Ledger.create(tmp_path, queue_steps=4) as ledger:
        done = []
        thread = threading.Thread(target=lambda: [done.append(ledger.append()) for _ in range(20)])
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        assert len(done) <= 5  # four in the queue and one in the hand of the writer
        gate.set()
        thread.join()
    assert len(Ledger.read(tmp_path)) == 20


MEMORY = """
import pathlib, sys
from floatline import Ledger
def resident():
    return int(pathlib.Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])  # KiB
keep = [] if sys.argv[2] == "keep" else None
with Ledger.create(sys.argv[1], queue_steps=64, part_bytes=1 << 20) as ledger:
    for step in range(2_000):
        ledger.append(loss=1.0, epoch=0)
    before = resident()
    for step in range(98_000):
        ledger.append(loss=1.0, epoch=0)
        if keep is not None:
            keep.append({"step": step, "loss": step * 0.5})
    assert ledger.accounts().run.attempted == 100_000
print(resident() - before)
"""


@slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident memory from /proc")
def test_a_hundred_thousand_appends_stay_bounded_in_memory(tmp_path):
    runs = [child(MEMORY, tmp_path / kind, kind) for kind in ("plain", "keep")]
    plain, keep = (int(run.communicate()[0]) for run in runs)
    assert plain < 4096
    assert keep > 16384  # a list of the same steps would show
    assert sum(path.stat().st_size for path in (tmp_path / "plain").glob("*.jsonl")) > 2 * 4096 * 1024


# Bad input


def test_create_and_resume_mind_what_is_there(tmp_path):
    with pytest.raises(LedgerError, match=r"There is no ledger in .* Use Ledger.create"):
        Ledger.resume(tmp_path)
    with pytest.raises(LedgerError, match="There is no ledger in"):
        Ledger.read(tmp_path)
    with pytest.raises(LedgerError, match="cannot be read: No such file"):
        Ledger.read(tmp_path / "nothing.jsonl")
    Ledger.create(tmp_path).close()
    with pytest.raises(LedgerError, match=r"already holds a ledger. Use Ledger.resume"):
        Ledger.create(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(LedgerError, match="cannot be used: "):
        Ledger.create(tmp_path / "file")
    for bad in ({1, 2}, math.nan):
        with pytest.raises(LedgerError, match="metadata cannot be written"):
            Ledger.create(tmp_path / "new", metadata={"bad": bad})


def test_a_closed_ledger_refuses_and_closing_twice_is_fine(tmp_path):
    ledger = Ledger.create(tmp_path)
    ledger.append()
    ledger.close()
    ledger.close()
    for call in (ledger.append, ledger.flush, lambda: ledger.event("note")):
        with pytest.raises(LedgerError, match="is closed. Use Ledger.resume"):
            call()
    assert ledger.accounts().run.attempted == 1


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"reason": "overflw"}, "Did you mean 'overflow'"),
        ({"applied": False}, "needs a reason"),
        ({"applied": torch.tensor(True)}, "needs a reason"),
        ({"applied": True, "reason": "outlier"}, "was applied has no reason"),
        ({"applied": True, "reason": torch.tensor(1)}, "Leave out applied"),
        ({"loss": "3"}, "loss is '3'. Give a number"),
        ({"loss": [1.0]}, "which is no float"),
        ({"loss": torch.ones(2)}, r"tensor of shape \(2,\). Give a real tensor of one element"),
        ({"loss": torch.tensor(1j)}, "complex64"),
        ({"epoch": torch.tensor(1)}, r"epoch is tensor\(1\). Give a whole number"),
        ({"epoch": True}, "epoch is True. Give a whole number"),
        ({"epoch": 1.5}, "epoch is 1.5. Give a whole number"),
        ({"layer_norms": (("a", "b"), torch.ones(3))}, r"shape \(2,\)"),
        ({"packed": (("los",), torch.ones(1))}, "Did you mean 'loss'"),
        ({"packed": (("loss",), torch.ones(1)), "loss": 1.0}, "given twice"),
        ({"packed": (("loss", "loss"), torch.ones(2))}, "given twice"),
        ({"packed": (("reason",), torch.ones(1)), "applied": True}, "given twice"),
        ({"packed": (("reason",), torch.ones(1)), "reason": "outlier"}, "given twice"),
    ],
)
def test_a_record_that_says_nonsense_is_refused_and_not_taken(tmp_path, record, message):
    with Ledger.create(tmp_path) as ledger:
        with pytest.raises(LedgerError, match=message):
            ledger.append(**record)
        assert ledger.accounts().run.attempted == 0


def test_unknown_causes_and_events_are_refused(tmp_path):
    with Ledger.create(tmp_path) as ledger:
        with pytest.raises(CauseError):
            ledger.append(reason="overflow", cause="gradient-overflw")
        with pytest.raises(LedgerError, match="Did you mean 'rollback'"):
            ledger.event("rolback")


@pytest.mark.parametrize(
    ("option", "value"),
    [("part_bytes", 10), ("keep_parts", 0), ("queue_steps", 0), ("flush_lines", 0), ("flush_seconds", math.nan)],
)
def test_options_out_of_range_are_refused_before_anything_is_made(tmp_path, option, value):
    with pytest.raises(LedgerError, match=f"{option} is {value}"):
        Ledger.create(tmp_path / "run", **{option: value})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"hello\n", "not JSON"),
        (b"\xff\xfe\n", "can't decode"),
        (b"[1]\n", "not a JSON object"),
        (b"\0\0\0\n", "not JSON"),
        (b'{"kind":"step","attempt":1,"time":0,"applied":true,"loss":NaN}\n', "NaN is not JSON"),
        (b'{"kind":"step","attempt":1,"time":0,"applied":true,"loss":1e999}\n', "inf is not a number"),
        (b'{"kind":"step","attempt":1,"time":0,"applied":true,"loss":"12"}\n', "'12' is not a number"),
        (b'{"kind":"step","attempt":1,"time":0,"applied":true,"loss":1' + b"0" * 400 + b"}\n", "too large"),
        (b'{"kind":"step","attempt":1,"time":0,"applied":true,"loss":1' + b"0" * 5000 + b"}\n", "digits"),
        (b'{"kind":"step","attempt":1,"time":0,"applied":true,"reason":"overflow"}\n', "do not fit"),
        (b'{"kind":"step","attempt":1,"time":0,"applied":false}\n', "do not fit"),
        (b'{"kind":"step","attempt":1,"time":0,"applied":false,"reason":["overflow"]}\n', "do not fit"),
        (b'{"kind":"step","attempt":1,"time":0,"applied":true,"x":1}\n', "unknown field 'x'"),
        (b'{"kind":"event","event":["note"],"attempt":1,"time":0}\n', "unknown event"),
        (b'{"kind":["step"],"time":0}\n', "the kind of the line"),
        (b'{"kind":"step","attempt":2,"time":0,"applied":true}\n', "Lines are missing"),
        (b'{"a":' * 100_000 + b"\n", "nested too deeply"),
        (b" " * (MAX_LINE + 1), "longer than 4,194,304 bytes"),
    ],
)
def test_a_line_that_floatline_never_writes_is_refused_in_one_line_with_its_number(tmp_path, line, message):
    Ledger.create(tmp_path).close()
    path = tmp_path / "ledger-00000.jsonl"
    path.write_bytes(lines(tmp_path)[0] + line)
    with pytest.raises(LedgerError, match=message) as caught:
        Ledger.read(tmp_path)
    assert f"{path}:2: " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"schema":1', b'"schema":2', "schema 2 and this floatline reads schema 1"),
        (b'"kind":"header"', b'"kind":"step"', "begins with a header line"),
        (b'"run_id":"r"', b'"run_id":4', "run_id of the header is 4"),
        (b'"before":{', b'"before":[],"x":{', "cannot be read"),
        (b'"attempted":0', b'"attempted":5', "does not add up"),
        (b'"epochs":[]', b'"epochs":[[1]]', ""),
    ],
)
def test_a_foreign_header_is_refused(tmp_path, old, new, message):
    Ledger.create(tmp_path, run_id="r").close()
    path = tmp_path / "ledger-00000.jsonl"
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))
    for use in (Ledger.read, Ledger.resume):
        with pytest.raises(LedgerError, match=f":1: .*{message}"):
            use(tmp_path)


damage = st.tuples(st.integers(0, 2000), st.sampled_from(b'0129-.eE"{}[],:\n \0\xffnullaN') | st.integers(0, 255))


@slow
@settings(max_examples=150, deadline=None)
@given(st.lists(damage, min_size=1, max_size=3))
def test_a_damaged_file_is_read_or_refused_and_never_raises_anything_else(tmp_path_factory, damages):
    folder = tmp_path_factory.mktemp("run")
    with Ledger.create(folder, run_id="r") as ledger:
        ledger.append(loss=1.0, epoch=0, layer_norms={"a": 1.0})
        ledger.event("rollback", "back", values={"to": 1.0})
    path = folder / "ledger-00000.jsonl"
    content = bytearray(path.read_bytes())
    for place, byte in damages:
        content[place % len(content)] = byte
    path.write_bytes(content)
    try:
        history = Ledger.read(folder)
    except LedgerError as error:
        assert "\n" not in str(error)
    else:
        assert len(history.summary().splitlines()) == 5


# The documentation


def test_the_page_lists_every_field_reason_and_event():
    text = DOCS.read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `([a-z_-]+)` \|", text, re.MULTILINE))
    assert rows == {*COLUMNS, *REASONS, *EVENTS}
    for name, meaning in {**COUNTS, **NUMBERS}.items():
        assert f"| `{name}` | {meaning} |" in text


def test_the_ledger_is_a_public_name():
    assert floatline.Ledger is Ledger
