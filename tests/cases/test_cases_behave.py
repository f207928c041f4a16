"""Every case does what it says: it fails as given, behaves in FP32 as stated, and trains when fixed."""

import ast
import sys

import pytest
from tests.cases.harness import Case, all_cases
from tests.slow import mark_of

from floatline.causes import CAUSES
from floatline.workload import Workload, load_target

CASES = all_cases()
NAMES = [case.name for case in CASES]


def imported_packages(source: str) -> set[str]:
    """First names of everything that a source imports, standard library apart."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or "").split(".")[0])
    return found - set(sys.stdlib_module_names)


def named_line(case: Case, line: int) -> str:
    return case.path.read_text(encoding="utf-8").splitlines()[line - 1]


@pytest.mark.parametrize(
    ("case", "variant"),
    [
        pytest.param(c, v, id=f"{c.name}-{v}", marks=mark_of(number, every=8, rare=6))
        for number, c in enumerate(CASES)
        for v in c.variants
    ],
)
def test_the_case_behaves_as_documented(case, variant):
    outcome = case.run(variant)
    assert outcome.trains == case.expects_training(variant), outcome.text


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_case_needs_torch_and_nothing_else(case):
    assert imported_packages(case.path.read_text(encoding="utf-8")) == {"torch"}


def test_an_import_of_more_than_torch_would_be_found():
    source = "import os\nimport torch.nn\n\ndef f():\n    from floatline import Guard\n    from . import harness"
    assert imported_packages(source) == {"torch", "floatline", "."}


@pytest.mark.parametrize("case", [c for c in CASES if c.line], ids=lambda case: case.name)
def test_the_line_it_names_holds_the_code_it_quotes(case):
    assert case.expect["code"] in named_line(case, case.line)


def test_a_line_that_moved_would_be_found():
    case = next(case for case in CASES if case.line)
    assert case.expect["code"] not in named_line(case, case.line + 1)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_case_names_places_unless_it_is_healthy(case):
    assert (not case.expect["where"]) == case.healthy
    assert bool(case.line) == ("code" in case.expect)


def test_every_cause_of_the_catalogue_has_a_case():
    # What is said where no other cause is known, and what ends a script before there is anything to diagnose.
    named = set(CAUSES) - {"changed-in-16-bits", "out-of-memory"}
    assert {case.expect["cause"] for case in CASES} == {*named, "healthy"}


@pytest.mark.parametrize("suffix", ["", ":fixed"])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_case_and_its_fixed_twin_load_as_targets(case, suffix):
    target = load_target(f"{case.path}{suffix}")
    if case.kind == "train":
        assert target.builder is None
        assert target.trainer is not None
    else:
        assert target.trainer is None
        assert isinstance(target.build(), Workload)
