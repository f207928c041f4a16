"""Metric files, written by the real packages (tests/data/metrics/make.py) and by hand."""

import gzip
import json
import math
import sqlite3
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from floatline.errors import ComparisonError
from floatline.validation.metrics.metric_files import (
    changed_files,
    choose_recorded,
    list_files,
    match_files,
    read_metrics,
)
from floatline.validation.metrics.recorded import Recorded, is_flat

DATA = Path(__file__).parents[2] / "data" / "metrics"
EVENTS = DATA / "events.out.tfevents.0.torch"
CURVE = ((0, 0.5), (1, 0.6), (2, 0.7), (3, 0.8))


def float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


@pytest.fixture
def wandb_file(tmp_path):
    path = tmp_path / "run-abc.wandb"
    path.write_bytes(gzip.decompress((DATA / "run.wandb.gz").read_bytes()))
    return path


@pytest.fixture
def database(tmp_path):
    path = tmp_path / "mlflow.db"
    with sqlite3.connect(path) as connection:
        connection.executescript((DATA / "mlflow.sql").read_text())
    connection.close()
    return path


def only(path: Path) -> Recorded:
    (recorded,) = read_metrics(path)
    return recorded


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_tensorboard_scalars_are_read_to_the_last_bit_of_float32():
    recorded = only(EVENTS)
    assert recorded.kind == "TensorBoard"
    assert recorded.curve("val/hmean") == tuple((step, float32(value)) for step, value in CURVE)
    assert recorded.curve("as_tensor") == recorded.curve("val/hmean")
    assert recorded.last("as_double") == 0.1
    assert math.isnan(recorded.last("lost"))
    # Histograms, texts and pictures are no scalars.
    assert set(recorded.names) == {"val/hmean", "as_tensor", "as_double", "lost"}


def test_an_event_file_that_is_still_being_written_gives_what_is_whole(tmp_path):
    whole = EVENTS.read_bytes()
    path = tmp_path / "events.out.tfevents.1"
    for size in range(0, 400, 7):
        path.write_bytes(whole[:size])
        assert set(only(path).names) <= {"val/hmean", "as_tensor"}


def test_an_event_file_with_a_bit_turned_is_refused(tmp_path):
    data = bytearray(EVENTS.read_bytes())
    place = data.index(b"val/hmean")
    data[place] ^= 1
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(data)
    with pytest.raises(ComparisonError, match="damaged at byte .* checksum is wrong"):
        read_metrics(path)


def test_any_byte_of_an_event_file_may_be_wrong_and_only_our_error_comes(tmp_path):
    whole = EVENTS.read_bytes()[:600]
    path = tmp_path / "events.out.tfevents.1"
    outcomes = set()
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            read_metrics(path)
            outcomes.add("read")
        except ComparisonError:
            outcomes.add("refused")
    assert outcomes == {"refused", "read"}  # 'read': the first record has no scalar, and nothing is taken from it


def test_a_record_that_claims_to_be_huge_is_passed_over(tmp_path):
    from floatline.validation.metrics.tensorboard import _masked_crc

    head = struct.pack("<Q", 1 << 61)
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(head + struct.pack("<I", _masked_crc(head)) + b"x" * 100)
    assert only(path).names == []


def test_wandb_history_summary_and_settings_are_read(wandb_file):
    recorded = only(wandb_file)
    assert recorded.curve("val/hmean") == (*CURVE, (10, 0.9))
    assert recorded.curve("nested.loss") == ((0, 1.0), (1, 0.5), (2, 1 / 3), (3, 0.25))
    assert recorded.spelling("nested/loss") == "nested.loss"
    assert recorded.last("best") == 0.9
    assert math.isnan(recorded.last("lost"))
    assert recorded.settings["seed"] == 3


def test_a_wandb_record_that_goes_over_blocks_is_joined(wandb_file):
    assert only(wandb_file).settings["long"] == "x" * 80_000
    assert wandb_file.stat().st_size > 2 * 32768


def test_a_wandb_file_is_checked(wandb_file):
    data = bytearray(wandb_file.read_bytes())
    data[data.index(b"val/hmean")] ^= 1
    wandb_file.write_bytes(data)
    with pytest.raises(ComparisonError, match="checksum is wrong"):
        read_metrics(wandb_file)
    wandb_file.write_bytes(b"not W&B at all")
    with pytest.raises(ComparisonError, match="is not a W&B run"):
        read_metrics(wandb_file)


def test_a_wandb_file_that_is_cut_off_gives_what_is_whole(wandb_file):
    whole = wandb_file.read_bytes()
    wandb_file.write_bytes(whole[:-300])
    cut = only(wandb_file)
    assert 0 < len(cut.curve("val/hmean")) <= 5


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60), st.sampled_from([b"", b"\x10\x03", b"\x12\x04", b"\x2a\x06\x0a\x04", b"\x8a\x01\x02"]))
def test_records_of_any_bytes_with_right_checksums_are_read_or_refused(tmp_path, data, head):
    from floatline.validation.metrics.tensorboard import _masked_crc

    record = head + data
    length = struct.pack("<Q", len(record))
    event = length + struct.pack("<I", _masked_crc(length)) + record + struct.pack("<I", _masked_crc(record))
    run = b":W&B\xe1\xbe\x00" + struct.pack("<IHB", zlib.crc32(b"\x01" + record), len(record), 1) + record
    for name, content in (("events.out.tfevents.1", event), ("run-1.wandb", run)):
        (tmp_path / name).write_bytes(content)
        try:
            read_metrics(tmp_path / name)
        except ComparisonError as error:
            assert "\n" not in str(error)


def test_mlflow_files_are_read():
    metrics = DATA / "mlruns" / "0" / "run" / "metrics"
    recorded = only(metrics / "val" / "hmean")
    assert (recorded.kind, recorded.names) == ("MLflow", ["val/hmean"])
    assert recorded.curve("val/hmean") == CURVE
    assert recorded.settings["seed"] == "3"
    assert math.isnan(only(metrics / "lost").last("lost"))


def test_the_mlflow_database_is_read_with_its_infinities(database):
    recorded = only(database)
    assert recorded.curve("val/hmean") == CURVE
    assert math.isnan(recorded.last("lost"))
    assert recorded.last("endless") == -math.inf
    assert recorded.settings["seed"] == "3"
    assert recorded.began == pytest.approx(1.79e9, rel=0.01)


def test_a_file_that_is_no_database_is_refused(tmp_path):
    with pytest.raises(ComparisonError, match="is not a database of MLflow"):
        read_metrics(write(tmp_path / "mlflow.db", "hello"))


def test_json_lines_are_read_with_their_steps(tmp_path):
    lines = [{"step": 5, "val": {"hmean": 0.5}}, {"step": 10, "val": {"hmean": 0.6}, "ok": True, "text": "x"}]
    recorded = only(write(tmp_path / "m.jsonl", "".join(json.dumps(line) + "\n" for line in lines)))
    assert recorded.curve("val/hmean") == ((5, 0.5), (10, 0.6))
    assert recorded.spelling("val.hmean") == "val/hmean"
    assert recorded.names == ["val/hmean"]


def test_a_broken_line_is_refused_and_a_torn_last_one_is_not(tmp_path):
    path = write(tmp_path / "m.jsonl", '{"a": 1}\noops\n{"a": 2}\n')
    with pytest.raises(ComparisonError, match="line 2 is not a JSON object"):
        read_metrics(path)
    write(path, '{"a": 1}\n{"a": 2')
    assert only(path).last("a") == 1


def test_a_value_written_twice_for_a_step_counts_once(tmp_path):
    path = write(tmp_path / "m.jsonl", '{"step": 2, "a": 1}\n{"step": 1, "a": 5}\n{"step": 2, "a": 3}\n')
    assert only(path).curve("a") == ((1, 5.0), (2, 3.0))
    assert only(path).last("a") == 3


def test_one_json_object_is_a_result_without_a_curve(tmp_path):
    recorded = only(write(tmp_path / "m.json", '{\n "val": {"hmean": NaN},\n "loss": "Infinity"\n}'))
    assert math.isnan(recorded.last("val/hmean"))
    assert recorded.last("loss") == math.inf
    assert recorded.curve("loss") == ()


def test_json_of_any_shape_gives_our_error_or_values(tmp_path):
    for text in ("[" * 100_000, "3", '{"a": ' + "9" * 5000 + "}", '{"a": 1e999}', '[1, {"a": 2}]'):
        path = write(tmp_path / "m.json", text)
        try:
            read_metrics(path)
        except ComparisonError as error:
            assert "\n" not in str(error)


def test_csv_is_read_with_empty_cells(tmp_path):
    text = "epoch,step,val/hmean,loss\n0,5,,2.5\n0,9,0.5,\n1,19,nan,1.5\n"
    recorded = only(write(tmp_path / "metrics.csv", text))
    assert recorded.curve("loss") == ((5, 2.5), (19, 1.5))
    assert recorded.curve("val/hmean")[0] == (9, 0.5)
    assert math.isnan(recorded.last("val/hmean"))


def test_a_log_gives_its_json_lines(tmp_path):
    text = 'epoch 1 of 2\rstep 3\r{"val/hmean": 0.25}\nbye {"val/hmean": 7}\n{"val/hmean": 0.5}\n'
    assert only(write(tmp_path / "train.log", text)).last("val/hmean") == 0.5


def test_a_missing_metric_names_the_nearest(tmp_path):
    run = only(write(tmp_path / "m.json", '{"val/hmean": 0.5, "loss": 1}'))
    with pytest.raises(ComparisonError, match=r"'val/hmaen' was not found in the run\. Did you mean 'val/hmean'\?"):
        choose_recorded([run], "val/hmaen", where="the run")
    with pytest.raises(ComparisonError, match="No metric was found in the run"):
        choose_recorded([], "val/hmaen", where="the run")


def test_two_files_must_agree_on_a_metric(tmp_path):
    one = only(write(tmp_path / "a.json", '{"h": 0.5}'))
    same = only(write(tmp_path / "b.jsonl", '{"step": 1, "h": 0.1}\n{"step": 2, "h": 0.50000001}'))
    other = only(write(tmp_path / "c.json", '{"h": 0.6}'))
    assert choose_recorded([one, same], "h", where="x") is same
    with pytest.raises(ComparisonError, match=r"ends at 0.5 in .* and at 0.6 in .*--metric-file"):
        choose_recorded([one, other], "h", where="x")


def test_event_files_of_one_folder_are_one_curve(tmp_path):
    first, second = Recorded(tmp_path / "a", "TensorBoard"), Recorded(tmp_path / "b", "TensorBoard")
    first.add("h", 0, 0.5)
    second.add("h", 1, 0.6)
    assert choose_recorded([first, second], "h", where="x").curve("h") == ((0, 0.5), (1, 0.6))


def test_only_files_that_changed_are_new(tmp_path):
    old = write(tmp_path / "old.json", "{}")
    before = list_files(tmp_path)
    write(tmp_path / "deep" / "new.jsonl", "{}")
    write(tmp_path / ".hidden" / "no.jsonl", "{}")
    write(tmp_path / "study" / "no.jsonl", "{}")
    write(tmp_path / "model.pt", "")
    after = list_files(tmp_path, leave_out=[tmp_path / "study"])
    assert changed_files(before, after) == [tmp_path / "deep" / "new.jsonl"]
    write(old, '{"a": 1}')
    assert old in changed_files(before, list_files(tmp_path))


def test_a_pattern_matches_from_the_working_folder_and_from_the_root(tmp_path):
    path = write(tmp_path / "a" / "b" / "m.csv", "x\n1\n")
    assert list(match_files("**/*.csv", tmp_path)) == [path]
    assert list(match_files(str(tmp_path / "a" / "*" / "m.csv"), Path("/"))) == [path]


def test_a_flat_curve_is_told_from_one_that_moves():
    assert is_flat(((1, 0.5), (2, 0.5)))
    assert not is_flat(((1, 0.5), (2, 0.6)))
    assert not is_flat(((1, 0.5),))
