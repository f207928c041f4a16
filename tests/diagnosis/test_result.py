"""Diagnosis: the verdict follows from the primary cause, and JSON is as the command line promises."""

import dataclasses
import json
import subprocess
import sys

import pytest
from tests.slow import slow

from floatline.causes import CAUSES
from floatline.diagnosis.result import Diagnosis
from floatline.findings import Finding


def diagnosis(*causes: str) -> Diagnosis:
    findings = tuple(Finding(CAUSES[name], seen="seen", fix="fix") for name in causes)
    return Diagnosis("net.py", "fp16-mixed", findings, 1.23456)


@pytest.mark.parametrize("cause", CAUSES.values(), ids=list(CAUSES))
def test_the_family_of_the_cause_gives_the_verdict(cause):
    told = {"range": "precision", "rounding": "precision", "loop": "precision", "not-precision": "not-precision"}
    assert diagnosis(cause.id).verdict == told[cause.family]


def test_no_finding_is_healthy():
    assert diagnosis().verdict == "healthy"
    assert diagnosis().primary is None


def test_the_first_finding_decides():
    assert diagnosis("exp-overflow", "bad-input-data").verdict == "precision"
    assert diagnosis("bad-input-data", "exp-overflow").verdict == "not-precision"


def test_json_has_the_fields_of_the_contract_and_no_more():
    result = diagnosis("exp-overflow", "bad-input-data").as_json()
    assert list(result) == ["target", "precision", "verdict", "findings", "seconds"]
    names = ["cause", "module", "file", "line", "op", "seen", "fix", "patch", "tried", "remedies"]
    assert list(result["findings"][0]) == names
    assert [finding["cause"] for finding in result["findings"]] == ["exp-overflow", "bad-input-data"]
    assert json.loads(json.dumps(result)) == result


def test_a_diagnosis_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        diagnosis().seconds = 0.0


def test_it_reads_as_text():
    assert str(diagnosis()) == "net.py in fp16-mixed: healthy"
    assert str(diagnosis("exp-overflow")).startswith("net.py in fp16-mixed: precision\nthe model: exp-overflow: ")


def modules_after(code: str) -> list[str]:
    code += "; import sys; print(*sys.modules)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_a_diagnosis_does_not_load_torch():
    assert "torch" not in modules_after("import floatline.diagnosis.result, floatline.cli.diagnose")


@slow
def test_the_check_above_can_fail():
    assert "torch" in modules_after("import torch")
