"""The same seed and plan give the same ledger: real commands, each in a process of its own."""

import json
from pathlib import Path

import pytest
from tests.preloaded import COMMAND, run_preloaded
from tests.shared import once
from tests.slow import slow

STEPS = 10
RUNS = {
    "first": [["--steps", str(STEPS)]],
    "again": [["--steps", str(STEPS)]],
    "in two parts": [["--steps", "4"], ["--steps", str(STEPS), "--resume"]],
    "another seed": [["--steps", str(STEPS), "--seed", "1"]],
    "another plan": [["--steps", str(STEPS), "--plan", "bf16-mixed"]],
}


def train_all(folder: Path) -> dict[str, tuple[list[dict], str]]:
    results = {}
    for name, parts in RUNS.items():
        for options in parts:
            run = run_preloaded(["-c", COMMAND, "train", "conditioned", "--folder", name, *options], cwd=folder)
            assert run.returncode == 0, run.stderr
        results[name] = lines_of(folder / name), weights_of(folder / name)
    return results


def found() -> dict[str, list]:
    """Of each run the lines of its ledger, without times and names, and the checksum of its last state."""
    return once("the same command", train_all)


def lines_of(folder: Path) -> list[dict]:
    lines = [json.loads(line) for path in sorted(folder.glob("ledger-*.jsonl")) for line in path.open()]
    return [{key: value for key, value in line.items() if key not in ("time", "started", "run_id")} for line in lines]


def weights_of(folder: Path) -> str:
    state = folder / f"checkpoint-{STEPS:08d}" / "state.json"
    return json.loads(state.read_text())["tensors_sha256"]


@slow
def test_the_same_command_writes_the_same_ledger_and_the_same_bits():
    lines, weights = found()["first"]
    assert found()["again"] == [lines, weights]
    assert [line["kind"] for line in lines].count("step") == STEPS


@slow
def test_a_run_in_two_parts_has_the_same_steps_and_the_same_bits():
    lines, weights = found()["in two parts"]
    assert [line for line in lines if line["kind"] == "step"] == steps_of("first")
    assert "resume" in [line["kind"] for line in lines]
    assert weights == found()["first"][1]


@slow
@pytest.mark.parametrize("name", ["another seed", "another plan"])
def test_another_seed_or_plan_writes_another_ledger(name):
    assert steps_of(name) != steps_of("first")
    assert found()[name][1] != found()["first"][1]


def steps_of(name: str) -> list[dict]:
    return [line for line in found()[name][0] if line["kind"] == "step"]
