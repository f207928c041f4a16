"""Sums of masks: they end at the smallest number of the dtype, and no row is NaN."""

import pytest
import torch
from tests.fixes.sources import spans

SUMS = {
    "two masks": "return (scores + (causal + padding)).softmax(-1)  # here",
    "an assignment": "mixed = scores + mask_a + self.pad_mask\n    return mixed.softmax(-1)",
    "in place": "own = scores / 1.0\n    own += mask_a\n    own += causal  # here\n    return own.softmax(-1)",
    "many lines": "y = (\n        scores  # raw\n        + causal[None][0]\n    )  # here\n    return y.softmax(-1)",
    "a product": "return (scores @ torch.eye(3, dtype=scores.dtype) + causal + padding).softmax(-1)  # here",
    "walrus": "return (w := scores + mask_a).softmax(-1) + 0 * w.nan_to_num(0, 0, 0)  # here",
}


def write_sum(body):
    lines = body if "# here" in body else body.replace("self.pad_mask\n", "self.pad_mask  # here\n")
    return f"\n\ndef attend(self, scores, causal, padding, mask_a):\n    {lines}\n"


class Holder:
    def __init__(self, dtype):
        self.pad_mask = torch.zeros(3, 3, dtype=dtype)
        self.pad_mask[:, 0] = torch.finfo(dtype).min


def attend(text, dtype):
    values = {}
    exec(text, values)
    scores = torch.linspace(-40, -20, 9).view(3, 3).to(dtype)
    low = torch.finfo(dtype).min
    causal = torch.zeros(3, 3, dtype=dtype).masked_fill(torch.ones(3, 3, dtype=torch.bool).triu(1), low)
    padding = torch.zeros(3, 3, dtype=dtype)
    padding[:, 0] = low
    return values["attend"](Holder(dtype), scores, causal, padding, padding)


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_of_masks_ends_at_the_smallest_number(tmp_path, name):
    text = write_sum(SUMS[name])
    found = spans(tmp_path, "scalar-out-of-range", text, op="aten.add")
    after = found["mask-sum"]
    assert "# here" in after
    assert attend(after, torch.float16).isfinite().all()
    wide = attend("import torch\n" + text, torch.float32)
    torch.testing.assert_close(attend(after, torch.float32)[1:], wide[1:])  # of row 0, masks leave nothing


def test_what_is_no_sum_stays_in_16_bits(tmp_path):
    text = write_sum(SUMS["a product"])
    after = spans(tmp_path, "scalar-out-of-range", text, op="aten.add")["mask-sum"]
    assert "(scores @ torch.eye(3, dtype=scores.dtype) + causal.float() + padding).clamp(" in after


def test_the_sum_before_was_not_finite():
    text = "import torch\n" + write_sum(SUMS["two masks"])
    assert attend(text, torch.float16).isnan().any()


@pytest.mark.parametrize(
    "line",
    [
        "return x + y",  # no mask
        "return x + 1e9",
        "x += mask",  # the caller's own tensor
        "x[0] += mask",
        "return x + mask + 1.0",  # what the number is for, nobody knows
        "return self.attend(x) * mask",
    ],
)
def test_a_sum_that_is_no_sum_of_masks_stays(tmp_path, line):
    text = f"\n\ndef f(self, x, y, mask):\n    {line}  # here\n"
    assert "mask-sum" not in spans(tmp_path, "scalar-out-of-range", text, op="aten.add")
