"""The catalogue of causes: complete, well formed, found by id."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import re
import subprocess
import sys

import pytest
import torch

from floatline.causes import CAUSES, FAMILIES, SYMPTOMS, find_cause
from floatline.errors import CauseError

IDS = [
    "activation-overflow",
    "product-overflow",
    "reduction-overflow",
    "exp-overflow",
    "scalar-out-of-range",
    "input-out-of-range",
    "gradient-overflow",
    "eps-underflow",
    "gradient-underflow",
    "optimizer-state-underflow",
    "rounded-onto-singularity",
    "update-lost-to-rounding",
    "decay-lost-to-rounding",
    "accumulator-stagnation",
    "integer-not-exact",
    "cancellation",
    "choice-flipped",
    "eps-too-large",
    "kernel-off",
    "changed-in-16-bits",
    "clip-before-unscale",
    "fp16-params-with-scaler",
    "scaler-misuse",
    "scaler-state-lost",
    "scheduler-vs-skipped-step",
    "scaled-grad-in-penalty",
    "unsupported-half-op",
    "dtype-mismatch",
    "autocast-region-misuse",
    "params-not-trained",
    "bad-input-data",
    "optimization-divergence",
    "empty-reduction",
    "fully-masked-softmax",
    "nan-times-zero",
    "singular-gradient",
    "clamp-kills-gradient",
    "distributed-desync",
    "out-of-memory",
]

every_cause = pytest.mark.parametrize("cause", CAUSES.values(), ids=list(CAUSES))


def code_of(remedy: str) -> str:
    return "" if remedy.endswith(".") else remedy.partition("  # ")[0]


def misspelt_ids(text: str) -> list[str]:
    """Words that are almost the id of a cause."""
    words = set(re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)+", text)) - set(CAUSES)
    return [word for word in words if difflib.get_close_matches(word, CAUSES, cutoff=0.8)]


def unknown_torch_names(text: str) -> list[str]:
    """Dotted names below torch that torch does not have."""
    unknown = []
    for name in re.findall(r"\btorch(?:\.[A-Za-z_]\w*)+", text):
        target = torch
        for part in name.split(".")[1:]:
            target = getattr(target, part, None)
        if target is None:
            unknown.append(name)
    return unknown


def test_the_catalogue_holds_these_causes_in_this_order():
    assert list(CAUSES) == IDS


def test_families_come_in_one_piece_and_in_order():
    families = [cause.family for cause in CAUSES.values()]
    assert list(dict.fromkeys(families)) == list(FAMILIES)
    assert families == sorted(families, key=list(FAMILIES).index)


@every_cause
def test_every_field_says_something(cause):
    assert cause.title and len(cause.title) <= 50
    assert not cause.title.endswith(".")
    for text in (cause.mechanism, cause.told_apart, cause.wrong_fix):
        assert len(text) > 80
        assert text.endswith(".")
        assert "  " not in text
    assert len(cause.remedies) >= 2


@every_cause
def test_telling_apart_names_neighbours(cause):
    neighbours = [name for name in CAUSES if name in cause.told_apart and name != cause.id]
    assert neighbours
    assert misspelt_ids(" ".join((cause.mechanism, cause.told_apart, cause.wrong_fix))) == []


def test_a_misspelt_neighbour_is_seen():
    assert misspelt_ids("If the guard is at fault, it is eps-underflows.") == ["eps-underflows"]


@every_cause
def test_a_remedy_is_one_line_of_python_that_fits_a_terminal(cause):
    for code in filter(None, map(code_of, cause.remedies)):
        ast.parse(code + "\ndef _(): ..." if code.startswith("@") else code)
        assert len(code) <= 76
        assert "\n" not in code
    assert any(map(code_of, cause.remedies))


@every_cause
def test_every_name_below_torch_exists(cause):
    texts = (cause.mechanism, cause.told_apart, cause.wrong_fix, *cause.remedies)
    assert unknown_torch_names(" ".join(texts)) == []


def test_a_name_that_torch_does_not_have_is_seen():
    assert unknown_torch_names("torch.amp.GradScaler, torch.amp.LossScaler") == ["torch.amp.LossScaler"]


@every_cause
def test_no_text_promises_what_this_version_does_not_have(cause):
    texts = " ".join((cause.mechanism, cause.told_apart, cause.wrong_fix, *cause.remedies))
    assert not re.search(r"\bfl\.|floatline", texts)


@every_cause
def test_a_reference_leads_to_an_address(cause):
    assert cause.links
    for url in cause.links.values():
        assert re.fullmatch(
            r"https://(?:github\.com/[\w.-]+/[\w.-]+/issues/\d+|arxiv\.org/abs/\d{4}\.\d{5}"
            r"|docs\.pytorch\.org/docs/stable/[\w./#-]+)",
            url,
        )


@every_cause
def test_messages_are_patterns_that_do_not_match_nothing(cause):
    for message in cause.messages:
        assert not re.search(message, "")
        assert not re.search(message, "a healthy run: loss 2.31  applied  scale 65536  norm 0.8")


@every_cause
def test_an_entry_as_json_keeps_its_texts(cause):
    entry = cause.as_json()
    assert entry["id"] == cause.id
    assert entry["remedies"] == list(cause.remedies)
    assert "messages" not in entry


def test_symptoms_name_only_causes_of_the_catalogue():
    for symptom in SYMPTOMS:
        assert set(symptom.causes) <= set(CAUSES)
        assert len(set(symptom.causes)) == len(symptom.causes)
        assert misspelt_ids(symptom.check) == []


def test_a_cause_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CAUSES["cancellation"].title = "other"


@pytest.mark.parametrize("name", ["eps-underflow", "EPS_Underflow", " eps underflow ", "Eps-Underflow"])
def test_an_id_is_found_in_any_spelling(name):
    assert find_cause(name) is CAUSES["eps-underflow"]


def test_an_unknown_id_names_the_nearest():
    with pytest.raises(CauseError, match=r"'eps-underflw' is not in the catalogue.*'eps-underflow'"):
        find_cause("eps-underflw")


def modules_after(code: str) -> list[str]:
    program = f"{code}; import sys; print(*sys.modules)"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.split()


def test_the_catalogue_does_not_load_torch():
    loaded = modules_after("import floatline.causes")
    assert "floatline.causes" in loaded
    assert "torch" not in loaded


def test_the_check_above_can_fail():
    assert "decimal" in modules_after("import decimal")
