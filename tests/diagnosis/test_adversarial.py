"""Trainings of many kinds: each failure has its cause and place, fixed twins and look-alikes are left in peace."""

import importlib.util
from pathlib import Path

import pytest
from tests.slow import mostly_slow, slow

from floatline.diagnosis.target_diagnosis import diagnose

FAILURES = Path(__file__).parent / "targets" / "adversarial_failures.py"
HEALTHY = FAILURES.with_name("adversarial_healthy.py")
LINES = FAILURES.read_text().splitlines()


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CAUSES = load(FAILURES).CAUSES
LOOK_ALIKES = load(HEALTHY).LOOK_ALIKES
# What shows over many steps only; and what is tested elsewhere.
LONG = {"gram_distances", "ratio_of_rounded_logs", "slow_finetuning", "minute_of_the_day", "losses_far_apart"}
# A failure that leaves the loop by an exception at the scaler's own call.
RAISED = {"backward_without_scale": 1}


def steps_of(name):
    return None if name.removesuffix("_fixed") in LONG else 12


@slow
@pytest.mark.parametrize("name", mostly_slow(CAUSES, every=8, rare=5))
def test_a_failure_has_its_cause_and_place(name):
    cause, place = CAUSES[name]
    found = diagnose(f"{FAILURES}:{name}", steps=steps_of(name)).primary
    assert found is not None
    assert found.cause.id == cause
    guilty = [number for number, line in enumerate(LINES, 1) if line.endswith(f"# guilty: {name}")]
    guilty = [line + RAISED.get(name, 0) for line in guilty]
    assert (place and found.module == place) or (Path(found.file) == FAILURES and found.line in guilty), found


@slow
@pytest.mark.parametrize("name", mostly_slow(CAUSES, every=8, rare=5))
def test_its_fixed_twin_is_healthy(name):
    result = diagnose(f"{FAILURES}:{name}_fixed", steps=steps_of(name))
    assert (result.verdict, result.findings) == ("healthy", ())


@slow
@pytest.mark.parametrize("name", mostly_slow(LOOK_ALIKES, every=8, rare=5))
def test_a_look_alike_is_healthy(name):
    result = diagnose(f"{HEALTHY}:{name}", steps=16)
    assert (result.verdict, result.findings) == ("healthy", ())
