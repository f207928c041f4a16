"""Several processes: the guard decides the same on all, loses nothing between them, and does not wait for ever."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.marks import needs_gloo
from tests.shared import once
from tests.slow import slow

SCRIPT = Path(__file__).with_name("guard_on_ranks.py")
ROOT = SCRIPT.parents[2]
WORLDS = [2, 4]
KINDS = ["DDP", "FSDP2"]
MAKES = ["floatline", "fused", "plain"]
# Means over processes are summed in another order than in one process: a rounding of float32 for each of six to
# eight steps, with weights of about 0.5.
TOLERANCE = 1e-6
# FP16 products of other pieces of the batch: weights differed by 5e-5 after 20 steps, and by 0.1 without the states.
LAYOUTS = 1e-3
# What a process tells the others in one message: four figures of its loss and gradients, and how it votes.
NUMBERS = 5

pytestmark = [
    slow,
    needs_gloo,
]
each_world = pytest.mark.parametrize("world", WORLDS)
each_kind = pytest.mark.parametrize("kind", KINDS)


def launch(world, *words, timeout=600):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*command, str(SCRIPT), *words], capture_output=True, text=True, cwd=ROOT, timeout=timeout, env=env
    )


def run_all(folder):
    """What each process found, for each number of processes, in the order of ranks."""
    for world in WORLDS:
        run = launch(world, str(folder))
        assert run.returncode == 0, run.stderr[-6000:]
    return {
        world: [json.loads((folder / f"{world}-{rank}.json").read_text("utf-8")) for rank in range(world)]
        for world in WORLDS
    }


def of(world, name):
    if ("FSDP2" in name or name in ("other kind", "8-bit blocks")) and torch.__version__.startswith("2.6."):
        pytest.skip("FSDP2 does not run on the CPU in torch 2.6")
    return [rank[name] for rank in once("guard on ranks", run_all)[str(world)]]


def assert_alike(found):
    """The same weights, bit for bit, and the same account on every process."""
    for rank in found:
        assert rank["weights"] == found[0]["weights"]
        assert rank["summary"] == found[0]["summary"]
    assert all(map(math.isfinite, found[0]["weights"]))


def distance(rank):
    """How far the weights are from those of one process with all the rows."""
    return max(abs(a - b) for a, b in zip(rank["weights"], rank["one"]["weights"], strict=True))


def guilty(fault, world):
    """The processes that are to blame, as far as anyone can know: a sum of gradients is NaN on all of them."""
    if fault == "NaN in a gradient":
        return [*range(world)]
    return [world - 1] if fault == "NaN in the batch" else [0]


@each_kind
@pytest.mark.parametrize(("world", "make"), [*((2, make) for make in MAKES), (4, "floatline")])
@pytest.mark.parametrize(
    ("fault", "reason", "scale"),
    [
        ("NaN in the batch", "forward-nonfinite", 1024.0),  # says nothing about the scale
        ("NaN in a gradient", "overflow", 512.0),
        ("NaN after the sum", "overflow", 512.0),
    ],
)
def test_a_nan_on_one_process_is_skipped_by_all(world, make, kind, fault, reason, scale):
    found = of(world, f"{fault}: {kind}, {make}")
    assert_alike(found)
    for rank in found:
        assert rank["reasons"] == [None, None, reason, None, None]
        assert rank["ranks"] == [[], [], guilty(fault, world), [], []]
        assert rank["scales"] == [1024.0] * 3 + [scale] * 2


@each_world
def test_processes_that_decide_alone_come_apart(world):
    found = of(world, "each by itself: NaN after the sum")
    assert found[0]["weights"] != found[1]["weights"]
    assert found[0]["scales"] != found[1]["scales"]
    first, *_, last = of(world, "each by itself: NaN in the batch")
    assert [first["reasons"][2], last["reasons"][2]] == ["overflow", "forward-nonfinite"]
    assert first["scales"] != last["scales"]


@each_world
@each_kind
def test_a_loss_spike_on_one_process_is_caught_by_all(world, kind):
    found = of(world, f"spike: {kind}")
    assert_alike(found)
    assert [rank["reasons"] for rank in found] == [[None] * 12 + ["outlier", None]] * world


@each_world
def test_the_first_process_alone_would_miss_the_spike_of_the_second(world):
    found = of(world, "each by itself: spike")
    assert found[0]["reasons"] == [None] * 14
    assert found[1]["reasons"][12] == "outlier"
    assert found[0]["weights"] != found[1]["weights"]


@each_kind
@pytest.mark.parametrize(
    ("world", "name"),
    [
        *((world, name) for world in WORLDS for name in ("whole batch", "weighted micro-batches", "unequal ranks")),
        *((2, name) for name in ("micro-batches", "clipped by 1-norm", "clipped by value")),
        (4, "clipped by inf-norm"),  # where one process holds nothing of the smallest parameter
    ],
)
def test_several_processes_end_where_one_does_with_all_the_rows(world, kind, name):
    found = of(world, f"{name}: {kind}")
    assert_alike(found)
    for rank in found:
        assert distance(rank) < TOLERANCE
        assert rank["losses"] == pytest.approx(rank["one"]["losses"], rel=1e-6)
        assert rank["norms"] == pytest.approx(rank["one"]["norms"], rel=1e-5)


@each_world
def test_without_weights_processes_with_fewer_rows_would_count_as_much(world):
    found = of(world, "unequal ranks without weights")
    assert_alike(found)
    assert distance(found[0]) > 0.01


@each_world
def test_the_guard_adds_one_small_all_reduce_to_a_step_of_ddp(world):
    for rank in of(world, "meetings: DDP"):
        assert rank["sizes"] == [NUMBERS * world]
        assert rank["weighted"] == [1, NUMBERS * world]  # how many items there are is known before the backward pass


@each_world
def test_norms_over_the_shards_of_fsdp2_take_no_other_one(world):
    for rank in of(world, "meetings: FSDP2"):
        assert rank["sizes"] == [NUMBERS * world]


@each_world
def test_micro_batches_exchange_gradients_once(world):
    assert [rank["exchanges"] for rank in of(world, "meetings: DDP")] == [1] * world
    assert [rank["unsynced"] for rank in of(world, "meetings: FSDP2")] == [[True] * 3] * world


@each_world
@each_kind
def test_half_a_step_leaves_nothing_behind(world, kind):
    for rank in of(world, f"half a step: {kind}"):
        assert rank == {"message": "RuntimeError: a bad file", "same": True}


@each_world
@each_kind
def test_nan_in_the_weights_of_one_process_takes_all_back_to_the_same_step(world, kind):
    found = of(world, f"damaged weights: {kind}")
    assert_alike(found)
    for rank in found:
        assert rank["reasons"] == [None] * 9 + ["forward-nonfinite"] + [None] * 5
        assert rank["event"] == found[0]["event"]
        assert "are those of step 7" in rank["event"]


@each_world
@each_kind
def test_the_module_that_overflows_on_one_process_is_raised_on_all(world, kind):
    found = of(world, f"overflowing module: {kind}")
    assert_alike(found)
    for rank in found:
        assert rank["islands"] == ["first", "head"]
        assert rank["reasons"][-1] is None


@each_world
@each_kind
def test_lost_gradients_raise_the_scale_on_all_processes_or_none(world, kind):
    found = of(world, f"lost gradients: {kind}")
    assert_alike(found)
    assert [rank["scale"] for rank in found] == [2048.0] * world


@each_world
def test_the_shards_of_one_process_alone_would_not_have_raised_it(world):
    assert of(world, "lost gradients: FSDP2")[-1]["own"] == 0.0


@each_kind
@pytest.mark.parametrize(("world", "make"), [*((2, make) for make in MAKES), (4, "floatline")])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(world, make, kind):
    for rank in of(world, f"resumed: {kind}, {make}"):
        assert rank["same"]
        assert rank["extra"] == {"place": 5}
        assert rank["other numbers differ"]  # dropout is part of it


REASONS = {
    **dict.fromkeys((2, 9, 14), "forward-nonfinite"),
    **dict.fromkeys((5, 16), "overflow"),
    18: "outlier",
}
each_format = pytest.mark.parametrize("half", ["single", "half"])


@each_world
@each_format
@pytest.mark.parametrize("kind", [*KINDS, "one"])
def test_the_same_steps_are_skipped_whatever_the_layout(world, kind, half):
    found = of(world, f"uninterrupted: {kind}, {half}")
    one = of(world, f"uninterrupted: one, {half}")[0]
    assert one["reasons"] == [REASONS.get(step) for step in range(20)]
    assert_alike(found)
    for rank in found:
        assert rank["reasons"] == one["reasons"]
        assert rank["scales"] == one["scales"]


@each_kind
@each_format
def test_a_run_resumed_on_another_number_of_processes_skips_the_same_steps(kind, half):
    first, legs = of(2, f"legs: {kind}, {half}"), of(4, f"legs: {kind}, {half}")
    whole = of(4, f"uninterrupted: {kind}, {half}")[0]
    for name in ("reasons", "scales"):
        assert first[0][name] + legs[0]["one"][name] + legs[0]["four"][name] == whole[name]
    assert legs[0]["one, loaded"] == {"weights": first[0]["weights"], "extra": {"place": 7}}  # every bit of them
    assert_alike([rank["four"] for rank in legs])
    for rank in legs:
        assert rank["four, loaded"]["weights"] == legs[0]["one"]["weights"]
        assert rank["four"]["attempted"] == 20
        assert rank["four"]["summary"].startswith("20 attempted, 14 applied, 6 skipped (2 overflow, 3 forward-nonfin")


@each_kind
def test_a_run_resumed_on_another_number_of_processes_ends_where_it_would_have(kind):
    whole = of(4, f"uninterrupted: {kind}, single")[0]["weights"]
    leg = of(4, f"legs: {kind}, single")[0]
    assert leg["four"]["weights"] == pytest.approx(whole, abs=LAYOUTS)
    assert leg["weights alone"]["weights"] != pytest.approx(whole, abs=10 * LAYOUTS)  # without the optimizer's states


@each_kind
def test_new_processes_draw_numbers_of_their_own_and_the_same_ones_each_time(kind):
    found = [rank["four, loaded"] for rank in of(4, f"legs: {kind}, single")]
    assert len({rank["draw"] for rank in found}) == 4
    assert all(rank["same draw"] for rank in found)


def test_where_shards_begin_is_known_without_torchs_private_function():
    assert [rank["offsets"] for rank in of(4, "legs: FSDP2, single")] == [[True] * 4] * 4
    assert [rank["offsets"] for rank in of(4, "legs: DDP, single")] == [[None] * 4] * 4


def test_shards_become_replicas_and_replicas_shards():
    expected = {kind: of(2, f"legs: {kind}, single")[0]["weights"] for kind in KINDS}
    for rank in of(2, "other kind"):
        assert rank == {"FSDP2": expected["DDP"], "DDP": expected["FSDP2"]}


def test_8_bit_states_of_shards_are_refused_in_one_line_and_those_of_replicas_taken():
    for rank in of(2, "8-bit blocks"):
        assert rank["FSDP2"].startswith("GuardError: 'optimizer.0.exp_avg_scale' belongs to 8-bit states of sharded")
        assert "\n" not in rank["FSDP2"]
        assert rank["DDP"] == "no error"


@each_kind
def test_the_same_seeds_give_the_same_ledger(kind):
    for rank in of(2, f"twice: {kind}"):
        assert rank == {"same": True, "other": False, "lines": 22}  # a header, 20 steps, an end


@each_world
def test_a_folder_without_a_whole_checkpoint_is_told_and_leftovers_are_passed_over(world):
    for rank in of(world, "odd folders"):
        assert "holds no checkpoint" in rank["none"]
        assert rank["beside an older run's"] == "no error"
        assert f"is a part of a checkpoint of {world} processes, not of 1. Give the folder" in rank["a part"]


@each_world
def test_the_newest_checkpoint_that_all_have_is_taken(world):
    assert [rank["attempts"] for rank in of(world, "torn checkpoints")] == [1] * world


@each_world
@pytest.mark.parametrize(
    ("case", "own", "others"),
    [
        ("damaged on one", "does not match its checksum", "Process 1 could not read"),
        ("not written on one", "cannot be written", "Process 1 could not write"),
    ],
)
def test_a_checkpoint_that_one_process_cannot_handle_is_an_error_on_all(world, case, own, others):
    for number, rank in enumerate(of(world, "torn checkpoints")):
        assert rank[case].startswith("GuardError: ")
        assert (own if number == 1 else others) in rank[case]


@each_world
@each_kind
def test_a_stop_is_raised_on_all_processes_and_recorded_by_one(world, kind):
    found = of(world, f"stopped: {kind}")
    for rank in found:
        assert rank["message"].startswith("GuardStop: Stopped at step 6: 3 steps in a row were skipped")
        assert rank["message"] == found[0]["message"]
        assert rank["summary"] == found[0]["summary"]
        assert rank["recorded"] == rank["resumed at"] == rank["attempts"] == 6
    assert [rank["writes"] for rank in found] == [True] + [False] * (world - 1)


def test_names_are_those_of_the_model_itself():
    for rank in of(2, "names"):
        assert rank["islands"] == ["head"]
        assert rank["layers"] == ["first.weight", "first.bias", "head.weight", "head.bias"]
        assert rank["average"]


@each_world
def test_processes_left_alone_fail_when_the_timeout_of_their_group_ends(world):
    *others, last = of(world, "left alone")
    assert last["message"] == "RuntimeError: this process's data is gone"
    # The first to give up closes its connections, and the others see that.
    assert any("Timed out" in rank["message"] for rank in others)
    for rank in others:
        assert rank["message"].startswith("RuntimeError: ")
        assert rank["no gradients left"]


def test_a_process_that_raises_ends_the_whole_launch(tmp_path):
    run = launch(2, str(tmp_path), "raises")
    assert run.returncode != 0
    assert "this process's data is gone" in run.stderr
