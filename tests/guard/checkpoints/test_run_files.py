"""Checkpoint files: every bit comes back, damage is named, and a writer that dies at any point costs nothing."""

import json
import math
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.slow import slow

from floatline.errors import GuardError
from floatline.guard.checkpoints import run_files
from floatline.guard.checkpoints.run_files import load_checkpoint, newest_checkpoint, prune_checkpoints, save_checkpoint

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def round_trip(folder, tensors=None, state=None):
    return load_checkpoint(save_checkpoint(folder, 1, tensors or {}, state or {}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (7,), (2, 3, 5)], ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path, dtype, shape):
    size = torch.empty((), dtype=dtype).element_size()
    data = torch.randint(0, 256, (math.prod(shape) * size,), dtype=torch.uint8)  # NaN payloads and subnormals too
    data = data % 2 if dtype == torch.bool else data
    tensor = data.view(dtype).reshape(shape)
    assert same_bits(round_trip(tmp_path, {"x": tensor})[0]["x"], tensor)


def test_the_random_number_generators_state_comes_back(tmp_path):
    torch.manual_seed(3)
    state = torch.get_rng_state()
    expected = torch.rand(5)
    torch.set_rng_state(round_trip(tmp_path, {"rng": state})[0]["rng"])
    assert torch.equal(torch.rand(5), expected)


def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path):
    weight = torch.nn.Parameter(torch.randn(1000, 10))
    path = save_checkpoint(tmp_path, 1, {"embed.weight": weight, "head.weight": weight, "view": weight.data}, {})
    tensors, _ = load_checkpoint(path)
    assert tensors["embed.weight"] is tensors["head.weight"] is tensors["view"]
    assert same_bits(tensors["head.weight"], weight.detach())
    assert (path / "tensors.safetensors").stat().st_size < 2 * weight.nbytes


def test_tensors_that_overlap_without_being_the_same_come_back_apart(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    given = {"all": base, "row": base[1], "column": base[:, 1], "turned": base.T, "first": base[0]}
    given |= {"wide": base[0].expand(5, 4), "reshaped": base.view(4, 3)}
    tensors, _ = round_trip(tmp_path, given)
    assert all(same_bits(tensors[name], given[name]) for name in given)
    tensors["all"].zero_()
    assert same_bits(tensors["row"], base[1])


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(6, 4).T, torch.randn(6, 4).half().T],
    ids=["channels-last", "transposed", "transposed-half"],
)
def test_dense_tensors_keep_their_order_in_memory(tmp_path, tensor):
    loaded = round_trip(tmp_path, {"x": tensor})[0]["x"]
    assert loaded.stride() == tensor.stride()
    assert same_bits(loaded, tensor)


def test_conjugate_views_come_back_as_values(tmp_path):
    tensor = torch.randn(4, dtype=torch.complex64).conj()
    assert same_bits(round_trip(tmp_path, {"x": tensor})[0]["x"], tensor.resolve_conj())


@pytest.mark.parametrize(
    "name", ["", " ", "a/../b", 'qu"ote', "new\nline", "\x00", "über.層", "__metadata__", "\ud800"]
)
def test_odd_names_survive(tmp_path, name):
    tensors = {name: torch.ones(2), "tensor 0": torch.zeros(3), "tensor 1": torch.zeros(4)}
    loaded, state = round_trip(tmp_path, tensors, {name: {name: 1}})
    assert loaded.keys() == tensors.keys()
    assert same_bits(loaded[name], tensors[name])
    assert state == {name: {name: 1}}


@settings(max_examples=30, deadline=None)
@given(names=st.lists(st.text(max_size=4), unique=True, max_size=5))
def test_any_names_survive(tmp_path_factory, names):
    tensors = {name: torch.full((2,), float(i)) for i, name in enumerate(names)}
    loaded, _ = round_trip(tmp_path_factory.mktemp("any"), tensors)
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {n: t.tolist() for n, t in tensors.items()}


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
KEYS = st.text(max_size=3) | st.integers() | st.tuples(st.integers(), st.text(max_size=2))
STATES = st.recursive(
    LEAVES | st.sampled_from(["NaN", "$number", "$tuple"]),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(value=STATES)
def test_any_state_comes_back_with_its_types(tmp_path_factory, value):
    _, state = round_trip(tmp_path_factory.mktemp("any"), state={"value": value})
    assert repr(state["value"]) == repr(value)  # tells 1 from True and 1.0, -0.0 from 0.0, and finds NaN


def test_json_is_what_any_parser_reads(tmp_path):
    path = save_checkpoint(tmp_path, 7, {}, {"loss": math.nan, "limit": -math.inf})
    fields = json.loads((path / "state.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert fields["number"] == 7
    assert fields["state"]["loss"] == {"$number": "NaN"}


@pytest.mark.parametrize("value", [{1, 2}, torch.ones(1), b"x", object()], ids=lambda v: type(v).__name__)
def test_what_json_cannot_hold_is_refused_with_its_place(tmp_path, value):
    with pytest.raises(GuardError, match=r"state\['a'\]\[1\] is a \w+, which a checkpoint cannot hold"):
        save_checkpoint(tmp_path, 1, {}, {"a": [0, value]})
    assert newest_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [(torch.eye(2).to_sparse(), "sparse"), (torch.empty(2, device="meta"), "meta"), ([1.0], "list")],
    ids=["sparse", "meta", "list"],
)
def test_tensors_without_dense_values_are_refused(tmp_path, tensor, kind):
    with pytest.raises(GuardError, match=f"Tensor 'w' is .*{kind}"):
        save_checkpoint(tmp_path, 1, {"w": tensor}, {})


@pytest.mark.parametrize("number", [-1, 1.0, True, None])
def test_a_number_that_counts_no_steps_is_refused(tmp_path, number):
    with pytest.raises(GuardError, match="is no count of steps"):
        save_checkpoint(tmp_path, number, {}, {})


def test_loaded_tensors_outlive_the_file(tmp_path):
    path = save_checkpoint(tmp_path, 1, {"x": torch.arange(100_000.0)}, {})
    tensors, _ = load_checkpoint(path)
    (path / "tensors.safetensors").write_bytes(b"")
    assert tensors["x"].sum() == torch.arange(100_000.0).sum()


def test_the_newest_is_that_of_the_highest_number(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "missing") is None
    for number in (9, 123_456_789, 10):
        save_checkpoint(tmp_path, number, {}, {})
    (tmp_path / "checkpoint-99999999999").mkdir()  # empty: nobody's
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-123456789"


def test_saving_a_number_again_replaces_it(tmp_path):
    for value in range(3):
        path = save_checkpoint(tmp_path, 5, {}, {"value": value})
    assert newest_checkpoint(tmp_path) == path
    assert load_checkpoint(path)[1] == {"value": 2}
    assert [p.name for p in tmp_path.iterdir() if p.name != ".saving"] == [path.name]


def test_pruning_keeps_the_newest(tmp_path):
    paths = [save_checkpoint(tmp_path, number, {}, {}) for number in range(5)]
    prune_checkpoints(tmp_path, 2)
    assert sorted(p for p in tmp_path.iterdir() if p.name != ".saving") == paths[-2:]
    prune_checkpoints(tmp_path, 9)
    assert newest_checkpoint(tmp_path) == paths[-1]
    with pytest.raises(GuardError, match="keep is 0"):
        prune_checkpoints(tmp_path, 0)


def flip_byte(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json"])
@pytest.mark.parametrize("place", [0, 40, -3])
def test_one_flipped_bit_is_found_and_the_checkpoint_before_is_named(tmp_path, file, place):
    before = save_checkpoint(tmp_path, 10, {"x": torch.ones(8)}, {"a": 1})
    path = save_checkpoint(tmp_path, 20, {"x": torch.ones(8)}, {"a": 1})
    flip_byte(path / file, place)
    with pytest.raises(GuardError) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "is damaged" in str(caught.value)
    assert str(caught.value).endswith(f"Use the one before it: {before}.")
    assert "\n" not in str(caught.value)
    load_checkpoint(before)


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json"])
def test_a_cut_or_missing_file_is_found(tmp_path, file):
    path = save_checkpoint(tmp_path, 20, {"x": torch.ones(8)}, {"a": 1})
    whole = (path / file).read_bytes()
    (path / file).write_bytes(whole[:-1])
    with pytest.raises(GuardError, match="There is none before it: start the run again"):
        load_checkpoint(path)
    (path / file).unlink()
    with pytest.raises(GuardError, match="There is none before it: start the run again"):
        load_checkpoint(path)


def test_a_changed_number_in_the_state_is_found(tmp_path):
    path = save_checkpoint(tmp_path, 20, {}, {"scale": 65536.0})
    text = (path / "state.json").read_text()
    assert "65536.0" in text
    (path / "state.json").write_text(text.replace("65536.0", "65537.0"))
    with pytest.raises(GuardError, match=r"state\.json does not match its checksum"):
        load_checkpoint(path)


def test_a_later_schema_says_which_floatline_to_use(tmp_path):
    path = save_checkpoint(tmp_path, 20, {}, {})
    fields = json.loads((path / "state.json").read_text()) | {"schema": 2, "floatline": "7.0"}
    (path / "state.json").write_text(json.dumps(fields))
    with pytest.raises(GuardError, match=r"has schema 2, .* Use floatline 7\.0 or later"):
        load_checkpoint(path)


def test_a_run_folder_given_for_a_checkpoint_is_answered_with_its_newest(tmp_path):
    path = save_checkpoint(tmp_path, 20, {}, {})
    with pytest.raises(GuardError, match=f"Did you mean {path}"):
        load_checkpoint(tmp_path)


def test_a_failed_write_is_one_line_and_leaves_the_old_checkpoint_and_no_draft(tmp_path, monkeypatch):
    path = save_checkpoint(tmp_path, 1, {"x": torch.ones(3)}, {"a": 1})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_files.os, "fsync", full)
    with pytest.raises(GuardError, match="step 2 cannot be written to .*: No space left on device. Make room"):
        save_checkpoint(tmp_path, 2, {"x": torch.zeros(3)}, {"a": 2})
    monkeypatch.undo()
    assert newest_checkpoint(tmp_path) == path
    assert load_checkpoint(path)[1] == {"a": 1}
    assert [p.name for p in (tmp_path / ".saving").iterdir()] == ["lock"]


def test_a_folder_that_is_a_file_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(GuardError, match="cannot be written to"):
        save_checkpoint(tmp_path / "file", 1, {}, {})


def test_two_writers_in_one_folder_are_told_apart(tmp_path):
    with run_files._only_writer(tmp_path), pytest.raises(GuardError, match="Another process is saving"):
        save_checkpoint(tmp_path, 1, {}, {})
    save_checkpoint(tmp_path, 1, {}, {})


CRASHES = """
import os, sys, signal, time, random
from pathlib import Path
import torch
from floatline.guard import run_files
from floatline.guard.checkpoints.run_files import load_checkpoint, newest_checkpoint, prune_checkpoints, save_checkpoint

torch.set_num_threads(1)
root = Path(sys.argv[1])

def save(folder, number):
    save_checkpoint(folder, number, {"x": torch.full((5000,), float(number))}, {"number": number})
    prune_checkpoints(folder, 1)

def check(folder, least):
    tensors, state = load_checkpoint(newest_checkpoint(folder))
    assert state["number"] >= least, (state, least)
    assert (tensors["x"] == state["number"]).all()
    return state["number"]

def fork(work):
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(77)
    return child

def dying(call, countdown):
    def wrapped(*arguments, **options):
        countdown[0] -= 1
        if countdown[0] == 0:
            os._exit(9)  # as a crash: no handler, no finally
        return call(*arguments, **options)
    return wrapped

def die_at(folder, number, step):
    countdown = [step]
    for name in ("fsync", "open", "close", "rename", "mkdir", "rmdir", "unlink", "replace"):
        setattr(os, name, dying(getattr(os, name), countdown))
    run_files.save_file = dying(run_files.save_file, countdown)
    save(folder, number)

def wait(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

if sys.argv[2] == "steps":
    for number in (2, 1):  # a later checkpoint; the same one again
        step, code = 0, 9
        while code == 9:
            step += 1
            folder = root / f"{number}-{step}"
            save(folder, 1)
            code = wait(fork(lambda: die_at(folder, number, step)))
            check(folder, 1)
            assert code in (0, 9), code
            assert check(folder, 1) == number or code == 9
            save(folder, 3)
            assert check(folder, 3) == 3
            left = sorted(p.name for p in folder.rglob("*"))
            assert left == [".saving", "checkpoint-00000003", "lock", "state.json", "tensors.safetensors"], left
        print("steps", step)
else:
    random.seed(0)
    folder, last, kills = root / "kill", 0, 0
    save(folder, 0)
    for _ in range(25):
        told, tell = os.pipe()
        def loop():
            number = last
            while True:
                number += 1
                save(folder, number)
                os.write(tell, b".")
        child = fork(loop)
        os.read(told, 1)  # one save is whole: the kill hits a later one
        since = time.perf_counter()
        os.read(told, 1)
        time.sleep(random.uniform(0.0, 2.0) * (time.perf_counter() - since))  # up to two saves later, however slow
        os.kill(child, signal.SIGKILL)
        assert wait(child) == -9
        os.close(told), os.close(tell)
        last = check(folder, last + 2)
    save(folder, last + 1)
    assert [p.name for p in (folder / ".saving").iterdir()] == ["lock"]
    print("saved", last)
"""


def crash(folder, kind: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(CRASHES), str(folder), kind]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_crash_at_any_call_to_the_system_leaves_a_whole_checkpoint(tmp_path):
    steps = [int(line.split()[1]) for line in crash(tmp_path, "steps").splitlines()]
    assert min(steps) > 10  # the crashes did reach every part of a save


@slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_kill_9_in_a_loop_of_saves_leaves_a_whole_checkpoint(tmp_path):
    assert int(crash(tmp_path, "kill").split()[1]) >= 50  # two whole saves before each of the 25 kills


def test_a_writer_without_the_rename_would_be_found(tmp_path):
    """The twin: what a plain overwrite leaves behind when it dies half way is refused."""
    path = save_checkpoint(tmp_path, 1, {"x": torch.ones(5000)}, {"number": 1})
    whole = (path / "tensors.safetensors").read_bytes()
    (path / "tensors.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(GuardError, match="is damaged"):
        load_checkpoint(path)
