"""The linter on the collection of real failures: what can be seen in source is seen, and healthy training is not."""

import ast
from pathlib import Path

import pytest

from floatline.lint import RULES, lint_text

FOLDER = Path(__file__).parent.parent / "cases"
FILES = sorted(FOLDER.glob("[0-9]*.py"))
# What fails there is a matter of numbers, of data, or of a precision that is only named at run time.
NOT_IN_SOURCE = {
    "001": "activations grow", "003": "features grow", "019": "16-bit inputs", "030": "gradients are small",
    "037": "weights are made half by whoever calls", "039": "weights are made half by whoever calls",
    "040": "updates are small beside the weights", "042": "updates are small beside the weights",
    "052": "keys are near-duplicates", "096": "a kernel is wrong",
    "072": "rows of the data are broken", "074": "labels are shuffled", "075": "the learning rate is too large",
    "077": "a batch has no labels", "079": "a document is empty", "097": "a mask multiplies, and the data is NaN",
    "098": "the decay is small beside the weights",
}  # fmt: skip


def expected(file: Path) -> dict[str, str]:
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "EXPECT":
            return {word.arg: ast.literal_eval(word.value) for word in node.value.keywords}
    raise AssertionError(file)


def is_seen(file: Path) -> bool:
    """Whether a finding names the cause, or the line."""
    truth = expected(file)
    found = lint_text(file.read_text(), file.name, rules=list(RULES.values()), half=True)
    return any(
        (one.rule.cause is not None and one.rule.cause.id == truth["cause"]) or truth["where"].endswith(f":{one.line}")
        for one in found
    )


HEALTHY = [file for file in FILES if expected(file)["cause"] == "healthy"]
VISIBLE = [file for file in FILES if file not in HEALTHY and file.name[:3] not in NOT_IN_SOURCE]


@pytest.mark.parametrize("file", HEALTHY, ids=lambda file: file.stem)
def test_healthy_training_has_no_finding(file):
    assert lint_text(file.read_text(), file.name, rules=list(RULES.values())) == []


def test_most_failures_that_are_visible_in_source_are_named():
    seen = [file.stem for file in VISIBLE if is_seen(file)]
    assert len(VISIBLE) == 37
    assert len(seen) >= 23, seen  # 60 %


def test_the_list_of_exceptions_names_cases():
    assert set(NOT_IN_SOURCE) <= {file.name[:3] for file in FILES}
    assert len(HEALTHY) == 5
