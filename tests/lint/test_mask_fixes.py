"""Fixes of mask constants (FL105): a mask that is turned round keeps its meaning, and what may be boolean stays."""

import pytest
import torch

from floatline.lint import RULES, lint_text
from floatline.lint.fixing import fix_text


def codes_of(text, *, half=True):
    return {one.rule.code for one in lint_text(text, "a.py", rules=[RULES["FL105"]], half=half)}


FLIPPED = ("~mask", "mask == 0", "mask.eq(0)", "(1 - mask).bool()", "mask.logical_not()", "mask[:, None] < 1")


@pytest.mark.parametrize("mask", FLIPPED)
@pytest.mark.parametrize("form", ["x.masked_fill({}, {c})", "torch.where({}, {c}, x)", "torch.where({}, x, {c})"])
def test_a_mask_that_is_turned_round_stays_so_and_means_the_same(form, mask):
    text = "import torch\ny = torch.softmax(" + form.replace("{}", mask) + ", -1)\n"
    before = text.replace("{c}", "-1e9")
    after, _ = fix_text(before, "a.py", rules=[RULES["FL105"]], unsafe=True)
    assert after == text.replace("{c}", "torch.finfo(x.dtype).min")
    drawn = torch.randn(4, 4, 3, generator=torch.Generator().manual_seed(0))
    scopes = [{"x": drawn, "mask": torch.tensor([1, 0, 1]).expand(4, 3)} for _ in range(2)]
    if mask == "~mask":
        scopes = [{**one, "mask": one["mask"].bool()} for one in scopes]
    for scope, code in zip(scopes, (before, after), strict=True):
        exec(code, scope)
    assert torch.equal(scopes[0]["y"], scopes[1]["y"])


@pytest.mark.parametrize(
    "used",
    ["x[~m]", "x[m]", "x.masked_fill(~m, 0.0)", "x.masked_fill(m == 0, 0.0)", "torch.where(m.eq(0), x, 0.0)", "1 - ~m"],
)
def test_what_is_turned_round_as_masks_are_may_be_boolean_and_is_told_on_demand_without_a_fix(used):
    text = f"import torch\ndef f(x, m, z):\n    a = {used}\n    return a, m.masked_fill(z > 0, -1e9)\n"
    assert fix_text(text, "a.py", rules=[RULES["FL105"]], unsafe=True)[0] == text
    assert "FL105" in codes_of(text) and "FL105" not in codes_of(text, half=False)
    other = text.replace("m.masked_fill(z", "x.masked_fill(z")
    assert fix_text(other, "a.py", rules=[RULES["FL105"]], unsafe=True)[0] != other


@pytest.mark.parametrize("name", ["keep", "valid", "self.pad", "v"])
def test_what_is_named_or_made_as_a_mask_is_not_filled_with_a_number_of_its_dtype(name):
    text = "import torch\nclass M:\n    def f(self, x, keep, valid, w):\n        v = w > 0\n        return {}\n"
    before = text.format(f"{name}.masked_fill(x, -1e9)")
    assert fix_text(before, "a.py", rules=[RULES["FL105"]], unsafe=True)[0] == before
    made = text.replace("w > 0", "w @ w").format("v.masked_fill(x, -1e9)")
    assert "torch.finfo(v.dtype).min" in fix_text(made, "a.py", rules=[RULES["FL105"]], unsafe=True)[0]


def test_a_fix_is_claimed_only_where_it_is_made():
    for filled, kind in (("x", "mask-constant"), ("(x + z)", "")):
        text = f"import torch\ny = {filled}.masked_fill(z > 0, -1e9)\n"
        assert [one.fix for one in lint_text(text, "a.py", rules=[RULES["FL105"]], half=True)] == [kind]
