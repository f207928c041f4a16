"""Several processes have a manifest each, and what differs between them is told first."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.manifests import toys
from tests.marks import needs_fsdp2, needs_gloo
from tests.preloaded import COMMAND, run_preloaded
from tests.slow import mostly_slow

from floatline.manifests.script import combine_ranks

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
SCRIPT = str(Path(__file__).with_name("on_ranks.py"))
# The exit code, and what is said: as the first line of the verdict, or as the error.
SAID = {
    "healthy": (0, ""),
    "reduced in FP32": (0, ""),
    "other weights": (1, "rank 1 and rank 0 have other weights after the same step"),
    "switch": (1, "switch matmul: high on rank 1, highest on rank 0"),
    "reduced in BF16": (1, "FSDP2 sums up gradients of 2 processes in BF16"),
    "alone": (1, "every process makes the same step of the same loss, and exchanges nothing"),
    "hook": (1, "a communication hook of DDP sums up gradients of 2 processes in FP16"),
    "own hook": (1, "a communication hook of DDP sums up gradients of 2 processes in BF16"),
    "BF16 weights": (1, "DDP sums up gradients of 2 processes in BF16"),
    "BF16 weights by the loop": (1, "the loop sums up gradients of 2 processes in BF16"),
    "nan": (2, "that of rank 1 from step 0 on, those of rank 0 were finite, so that it came before the reduction"),
    "dies": (2, "Rank 1 ended with exit code 1 before an optimizer of torch made a step"),
}


@needs_gloo
@needs_fsdp2
@pytest.mark.parametrize("kind", mostly_slow(SAID, every=100, rare=5))
def test_two_processes_are_measured_and_what_is_wrong_is_said(kind, tmp_path):
    code, said = SAID[kind]
    words = ["--format", "json", "--", TORCHRUN, "--standalone", "--nproc-per-node", "2", SCRIPT, kind]
    found = run_preloaded(["-c", COMMAND, "manifest", *words], cwd=tmp_path)
    assert found.returncode == code, found.stderr[-3000:]
    if code == 2:
        assert said in found.stderr
        return
    report = json.loads(found.stdout)
    assert [(one["rank"], one["num_ranks"], one["step"]) for one in report["ranks"]] == [(0, 2, 1), (1, 2, 1)]
    lines = [one["seen"] for one in report["findings"]]
    if kind.startswith("BF16"):  # that updates round away is worse
        lines = [line for line in lines if " sums up " in line]
    assert lines[0].startswith(said) if said else lines == []


OTHER = "other weights"


@pytest.fixture
def manifests():
    first = replace(toys.measure(toys.make()), num_ranks=2, num_collectives=1)
    return {0: first, 1: replace(first, rank=1)}


def test_processes_that_are_alike_have_nothing_told(manifests):
    first, second = combine_ranks(manifests)
    assert (first.rank, second.rank, first.apart, first.lines) == (0, 1, (), ())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"digest": OTHER}, "rank 1 and rank 0 have other weights after the same step: they train apart"),
        (
            {"bad_loss": 3},
            "loss: not finite at step 3 on rank 1, finite on rank 0, so that it came before the reduction",
        ),
        ({"num_ranks": 4}, "processes: 4 on rank 1, 2 on rank 0"),
        ({"optimizers": ("SGD",)}, "optimizers: SGD on rank 1, AdamW on rank 0"),
    ],
)
def test_what_is_different_is_told_first(manifests, change, said):
    if change.get("digest") == OTHER:
        change = {"digest": f"{manifests[0].digest.partition('-')[0]}-0123"}
    manifests[1] = replace(manifests[1], **change)
    assert combine_ranks(manifests)[0].lines[0].text == said


def without(found, kind, group):
    return replace(found, holdings=tuple(row for row in found.holdings if (row.kind, row.group) != (kind, group)))


def test_layers_that_only_one_process_has_are_not_told():
    """As ZeRO cuts states between processes, and a pipeline the model."""
    found = replace(toys.measure(toys.make()), num_ranks=2)
    second = replace(without(found, "states", "head"), rank=1, digest="other-names")
    assert combine_ranks({0: without(found, "states", "embeddings"), 1: second})[0].apart == ()
    bare = replace(found, rank=1, holdings=tuple(row for row in found.holdings if row.kind != "states"))
    assert {row.other for row in combine_ranks({0: found, 1: bare})[0].apart} == {"none"}  # all of a kind is missing


@pytest.mark.parametrize(
    ("change", "told"), [({}, True), ({"num_collectives": 1}, False), ({"loss": 0.5}, False), ({"loss": None}, False)]
)
def test_processes_that_make_the_same_step_and_exchange_nothing_are_told(change, told):
    first = replace(toys.measure(toys.make()), num_ranks=2)
    found = combine_ranks({0: replace(first, **change), 1: replace(first, rank=1)})[0]
    assert any("each trains alone" in line.text for line in found.lines) is told


def test_what_several_ranks_have_is_told_once(manifests):
    names = manifests[0].digest.partition("-")[0]
    others = {rank: replace(manifests[1], rank=rank, digest=f"{names}-{rank}", bad_loss=2) for rank in (1, 2, 3)}
    texts = [line.text for line in combine_ranks({0: manifests[0], **others})[0].lines]
    assert texts == [
        "ranks 1, 2, 3 and rank 0 have other weights after the same step: they train apart",
        "loss: not finite at step 2 on ranks 1, 2, 3, finite on rank 0, so that it came before the reduction",
    ]


def test_several_things_that_are_apart_in_the_same_way_are_told_once(manifests):
    wide, narrow = (tuple(replace(row, format=name) for row in manifests[0].holdings) for name in ("fp32", "bf16"))
    found = combine_ranks({0: replace(manifests[0], holdings=wide), 1: replace(manifests[1], holdings=narrow)})[0]
    (text,) = [line.text for line in found.lines if "rank 1" in line.text]
    assert text.startswith("weights of embeddings, weights of norms")
    assert text.endswith("BF16 on rank 1, FP32 on rank 0")


def test_how_many_there_are_and_their_seeds_come_before_everything(manifests):
    assert str(combine_ranks(manifests)[0]).startswith("2 processes\n")
    manifests[1] = replace(manifests[1], seed=(manifests[0].seed or 0) + 1)
    found = combine_ranks(manifests)[0]
    assert str(found).startswith("2 processes; the seed of torch is ")
    assert found.lines == ()  # most runs have one for each process
    manifests[1] = replace(manifests[1], num_ranks=4)
    assert str(combine_ranks(manifests)[0]).startswith("2 processes that are not alike; ")
    assert "processes" not in str(manifests[0].__class__(manifests[0].holdings))
