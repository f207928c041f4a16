"""Cases with their model and batches on a GPU: the same causes and places, and silence on fixed twins."""

import re
import sys

import pytest
import torch
from tests.cases.harness import all_cases
from tests.cases.scoring import expected_verdict, find_alarms, is_cause_right, is_place_right
from tools.score_cases import diagnose_quietly

# A case says in its docstring what a GPU does. Those that autocast fixes there are another matter.
CASES = {
    case.name: case
    for case in all_cases()
    if case.kind == "build" and re.search(r"^CUDA: +same(\.|;| \()", case.path.read_text(), re.MULTILINE)
}
TARGET = """
import importlib

import torch
from torch.utils._pytree import tree_map

case = importlib.import_module("{name}")


def to_gpu(value):
    return value.cuda() if isinstance(value, torch.Tensor) else value


def on_gpu(function):
    def call(*args):
        with torch.device("cuda"):
            return function(*args)

    return call


def move(made):
    model, batches, loss_fn, precision, make_optimizer = made
    model.cuda().forward = on_gpu(model.forward)
    return model, tree_map(to_gpu, list(batches)), on_gpu(loss_fn), precision, on_gpu(make_optimizer)


def build():
    return move(case.build())


def fixed():
    return move(case.fixed())
"""
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def diagnose_on_gpu(case, folder, name=""):
    """Diagnose the case from a copy in which "cpu" is "cuda": every line stays where it is."""
    (folder / case.path.name).write_text(case.path.read_text().replace('"cpu"', '"cuda"'))
    file = folder / f"moved_{case.name}.py"
    file.write_text(TARGET.format(name=case.name))
    sys.modules.pop(case.name, None)
    try:
        return diagnose_quietly(f"{file}:{name}" if name else str(file))
    finally:
        sys.modules.pop(case.name, None)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_case_is_named_for_what_it_is_on_a_gpu(case, tmp_path):
    given = diagnose_on_gpu(case, tmp_path)
    first = given["findings"][0] if given["findings"] else None
    assert given["verdict"] == expected_verdict(case), first
    assert is_cause_right(case, given), first
    assert is_place_right(case, first), first


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_fixed_twin_is_left_in_peace_on_a_gpu(case, tmp_path):
    twin = diagnose_on_gpu(case, tmp_path, "fixed")
    assert not find_alarms(case, {"verdict": "healthy", "findings": []}, twin), twin["findings"]
