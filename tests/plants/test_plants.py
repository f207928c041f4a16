"""The generator of plants: the same by its seed, scripts that parse, truths that fit; a few are run."""

from __future__ import annotations

import ast
import os
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tests.plants.bare import Outcome
from tests.plants.catalogue import HAZARDS, draw_number, hosts
from tests.plants.planting import Hazard, draw, fits, read_sites
from tests.slow import mostly_slow
from tools.plant import judge, table

from floatline.causes import find_cause

TRACES = re.compile(r"# site|# end|#!|\|\||\{call\}")
ANY = {"precision", "not-precision"}


def names_of(hazard: Hazard) -> str:
    return hazard.name


def hosts_for(hazard: Hazard) -> list[str]:
    return [name for name, text in hosts().items() if fits(hazard, read_sites(text))]


def draws(hazard: Hazard, num: int):
    for number in range(num):
        for control in (False, True):
            yield draw(hazard, hosts(), random.Random(number), control=control)


def test_names_are_unique_and_there_are_enough() -> None:
    assert set(Counter(one.name for one in HAZARDS).values()) == {1}
    assert sum(one.loud is True for one in HAZARDS) >= 20
    assert sum(one.loud is False for one in HAZARDS) >= 20


@pytest.mark.parametrize("hazard", HAZARDS, ids=names_of)
def test_hazard_has_two_hosts(hazard: Hazard) -> None:
    assert len(hosts_for(hazard)) >= 2


@pytest.mark.parametrize("hazard", HAZARDS, ids=names_of)
def test_causes_are_in_the_catalogue(hazard: Hazard) -> None:
    assert hazard.causes
    for name in set(hazard.causes) - ANY:
        assert (find_cause(name).family == "not-precision") == (hazard.verdict == "not-precision") or len(
            hazard.causes
        ) > 1


@pytest.mark.parametrize("hazard", HAZARDS, ids=names_of)
def test_scripts_parse_and_show_no_trace(hazard: Hazard) -> None:
    for plant in draws(hazard, 6):
        ast.parse(plant.text)
        assert not TRACES.search(plant.text)
        lines = plant.text.splitlines()
        assert plant.control or plant.places
        assert all(0 < place <= len(lines) and lines[place - 1].strip() for place in plant.places)
        assert plant.text.count(f'default="{plant.dtype}"') >= 1


def test_a_control_has_the_look_of_its_plant() -> None:
    plant, control = draws(next(one for one in HAZARDS if one.name == "squares"), 1)
    assert plant.text != control.text
    assert set(plant.drawn) == set(control.drawn)


def test_draws_depend_on_the_seed_and_on_nothing_else() -> None:
    first = [draw_number(5, number, 0, control=False) for number in range(30)]
    again = [draw_number(5, number, 0, control=False) for number in range(30)]
    other = [draw_number(6, number, 0, control=False) for number in range(30)]
    assert [one.text for one in first] == [one.text for one in again]
    assert [one.text for one in first] != [one.text for one in other]


def test_a_scale_of_its_own_is_not_mixed_with_that_of_other_backward_passes() -> None:
    (hazard,) = [one for one in HAZARDS if one.name == "second_moment_too_small"]
    drawn = [draw_number(3, number, 0, control=True, hazards=[hazard]) for number in range(60)]
    assert all(plant.text.count("backward(") == 1 for plant in drawn)
    mixed = [draw_number(3, n, 0, control=True, hazards=[replace(hazard, alone=False)]) for n in range(60)]
    assert any(plant.text.count("backward(") > 1 for plant in mixed)  # the twin


def test_all_hazards_are_drawn_before_one_is_drawn_again() -> None:
    drawn = [draw_number(0, number, 0, control=False).hazard.name for number in range(len(HAZARDS))]
    assert sorted(drawn) == sorted(one.name for one in HAZARDS)


def test_numbers_are_read_from_the_last_lines() -> None:
    outcome = Outcome(lines=["step 3 loss 4", "gap 1.5e-03", "recall@1 0.25 loss nan"])
    assert outcome.numbers(2)[:3] == [1.5e-3, 1.0, 0.25]
    assert outcome.numbers(2)[3] != outcome.numbers(2)[3]


def test_skips_of_a_fifth_are_loud() -> None:
    assert Outcome(num_steps=10, num_skipped=2).loud
    assert not Outcome(num_steps=10, num_skipped=1).loud
    assert not Outcome().loud


def truth(**changed):
    given = {"id": "0", "control": False, "causes": ["cancellation"], "verdict": "precision", "places": [7], "loud": 0}
    return {**given, "host": "h", "hazard": "z", "dtype": "fp16", **changed}


@pytest.mark.parametrize(
    ("changed", "said", "right", "placed"),
    [
        ({}, ("precision", "cancellation", 7), True, True),
        ({}, ("precision", "cancellation", 8), True, False),
        ({}, ("precision", "exp-overflow", 7), False, False),
        ({"causes": ["precision"]}, ("precision", "exp-overflow", 7), True, True),
        ({"causes": ["precision"]}, ("precision", "exp-overflow", 8), False, False),
        ({"control": True}, ("healthy", "", 0), True, True),
        ({"control": True}, ("precision", "cancellation", 7), False, False),
    ],
)
def test_answers_are_judged(changed, said, right, placed) -> None:
    verdict, cause, line = said
    finding = {"cause": cause, "line": line, "file": "x.py"}
    row = judge(truth(**changed), {"verdict": verdict, "findings": [finding] if cause else []}, Path("x.py"))
    assert (row["right"], row["placed"]) == (right, placed)
    assert "median seconds" in table([(truth(**changed), {**row, "seconds": 1.0})])


ROOT = Path(__file__).parents[2]
CHECK = """
import random, sys
from tests.plants.catalogue import HAZARDS, hosts
from tests.plants.check import Checker
from tests.plants.planting import draw

name, control = sys.argv[1:]
hazard = next(one for one in HAZARDS if one.name == name)
cheap = {host: hosts()[host] for host in ("metric", "convnet")}
checked = Checker().check(draw(hazard, cheap, random.Random(1), control=control == "control"))
assert checked.holds, checked
"""


@pytest.mark.parametrize("name", mostly_slow(["squares", "counter_of_steps", "mean_over_nothing"], every=100, rare=3))
@pytest.mark.parametrize("control", ["plant", "control"])
def test_plants_do_what_they_say(name: str, control: str) -> None:
    # Scripts are forked, which only a process that has computed nothing can do.
    path = os.pathsep.join([str(ROOT), *sys.path])
    command = [sys.executable, "-c", CHECK, name, control]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
