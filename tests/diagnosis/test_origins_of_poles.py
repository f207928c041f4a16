"""A value that is rounded onto a pole in one line and fails in another: the first line is named, and changed."""

from pathlib import Path

import pytest
import torch

from floatline.diagnosis.target_diagnosis import diagnose
from floatline.findings import Finding, RoundedAt
from floatline.fixes.finding import find_fixes

TARGET = """
import torch
import torch.nn.functional as F


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(8, 4)

    def forward(self, x):
        return {returned}


def loss_fn(p, y):
    {clamped}
    {rounded}
    return -(y * torch.log(p + 1e-3) + (1 - y) * torch.log({failing})).mean()


def build(seed=0):
    torch.manual_seed(seed)
    x = torch.randn(64, 8)
    y = (x[:, :4] > 0).float()
    return Net(), [((x,), (y,))], loss_fn, "fp16-mixed", lambda m: torch.optim.SGD(m.parameters(), 1e-3)
"""
LINES = {"returned": "torch.sigmoid(6 * self.out(x))", "clamped": "p = p.clamp(max=1.0)", "rounded": "q = 1 - p"}


def diagnosed(folder, **lines):
    path = folder / "net.py"
    text = TARGET.format(**{**LINES, "failing": "q", **lines})
    path.write_text(text)
    return diagnose(str(path), steps=16).primary, text.splitlines(), path


def line_of(text, code):
    return next(number for number, line in enumerate(text, 1) if code in line)


def test_a_sigmoid_that_rounds_to_1_in_another_function_is_the_origin_of_a_logarithm_of_0(tmp_path):
    found, text, path = diagnosed(tmp_path)
    assert (found.cause.id, found.line) == ("rounded-onto-singularity", line_of(text, "torch.log(q)"))
    line = line_of(text, "torch.sigmoid")
    assert found.origin == RoundedAt(str(path), line, "aten.sigmoid")
    assert found.seen.endswith(f"in FP32: sigmoid rounds them in line {line}")
    assert Finding.read(found.as_json()) == found


def test_a_product_in_the_line_above_is_the_origin_where_it_rounds(tmp_path):
    found, text, _ = diagnosed(
        tmp_path, returned="torch.sigmoid(6 * self.out(x)).float()", rounded="q = (1 - p).half() * 1e-7"
    )
    assert found.cause.id == "rounded-onto-singularity"
    assert (found.origin.line, found.origin.op) == (line_of(text, "1e-7"), "aten.mul")


def test_what_rounds_in_the_failing_line_itself_has_no_origin_and_says_none(tmp_path):
    found, _, _ = diagnosed(tmp_path, returned="torch.sigmoid(self.out(x))", failing="1 - torch.sigmoid(14 * p)")
    assert found.cause.id == "rounded-onto-singularity"
    assert found.origin is None
    assert found.seen.endswith("not in FP32")
    assert "origin" not in found.as_json()


def test_the_first_change_that_is_tried_is_of_the_origin(tmp_path):
    found, _, path = diagnosed(tmp_path)
    first, *others = find_fixes(found, root=tmp_path)
    assert first.new_code == "return torch.sigmoid(6 * self.out(x).float())"
    assert "torch.log(q.float())" in "".join(fix.new_code for fix in others)
    tried = diagnose(str(path), steps=16, tries_fixes=True).primary
    assert "+        return torch.sigmoid(6 * self.out(x).float())" in tried.patch


@pytest.mark.parametrize("returned", ["torch.sigmoid(6 * self.out(x))", "torch.sigmoid(6 * self.out(x).float())"])
def test_a_cast_of_the_failing_line_alone_does_not_help_and_one_of_the_origin_does(tmp_path, returned):
    path = Path(tmp_path, "cast.py")
    path.write_text(TARGET.format(**{**LINES, "failing": "q.float()", "returned": returned}))
    assert diagnose(str(path), steps=16).verdict == ("healthy" if ".float()" in returned else "precision")
    assert torch.sigmoid(torch.tensor(9.0, dtype=torch.float16)) == 1
