"""Fixes of quotients (FL108) keep the dtype and the numbers of FP32: of counts, of FP64, of numbers of Python."""

import pytest
import torch

from floatline.lint import RULES, lint_text
from floatline.lint.fixing import fix_text

EPS = "import torch\n{}\nq = a / (b + 1e-8)\n"


def fixed(text):
    return fix_text(text, "a.py", rules=[RULES["FL108"]], unsafe=True)[0]


@pytest.mark.parametrize(
    "made",
    [
        "a = (x * y).sum(-1)\nb = torch.sum(y, -1)",
        "a = x\nb = torch.sum(x, -1)",
        "a = torch.masked_select(x, y)\nb = torch.amax(x)",
    ],
)
def test_a_quotient_of_what_may_be_two_counts_is_left_alone(made):
    text = EPS.format(made)
    assert fixed(text) == text
    assert lint_text(text, "a.py", rules=[RULES["FL108"]], half=True)


@pytest.mark.parametrize("made", ["a = x\nb = torch.norm(x, dim=-1)", "a = torch.sigmoid(x)\nb = torch.sum(y, -1)"])
def test_one_of_fractions_is_fixed(made):
    assert ".to(torch.result_type(a, b))" in fixed(EPS.format(made))


@pytest.mark.parametrize(
    ("above", "below"),
    [
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
        (torch.int64, torch.float32),
        (None, torch.float32),
    ],
)
def test_the_quotient_has_the_numbers_and_the_dtype_that_it_had(above, below):
    draw = torch.Generator().manual_seed(0)
    y = torch.rand(8, generator=draw).to(below)
    x = 3.0 if above is None else (torch.rand(8, generator=draw) * 9).to(above)
    text = EPS.format("a = x\nb = torch.sqrt(y)")
    after = fixed(text)
    assert after != text
    scopes = {}
    for name, code in (("before", text), ("after", after), ("narrow", after.replace("result_type(a, b)", "float16"))):
        scopes[name] = {"x": x, "y": y}
        exec(code, scopes[name])
    assert torch.equal(scopes["before"]["q"], scopes["after"]["q"])
    assert scopes["before"]["q"].dtype is scopes["after"]["q"].dtype
    assert not torch.equal(scopes["before"]["q"], scopes["narrow"]["q"])  # the check can fail
