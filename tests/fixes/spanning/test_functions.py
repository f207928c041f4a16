"""A function in FP32: the parameters that reach the line are widened, and autocast is off."""

import pytest
import torch
from tests.fixes.sources import spans

VARIANCES = '''

def structure(left, right, window, index, c=1e-4):
    """How alike they are."""
    shown = right[index]
    m1 = F.conv1d(left, window)
    s1 = F.conv1d(left * left, window) - m1 * m1  # here
    return (s1 + c).sqrt().mean() + 0 * shown.sum()
'''


def test_a_function_is_computed_in_fp32_and_gives_what_fp32_gives(tmp_path):
    after = spans(tmp_path, "cancellation", VARIANCES)["fp32-function"]
    assert '"""How alike they are."""\n    with torch.autocast(left.device.type, enabled=False):\n' in after
    assert "right = " not in after and "index = " not in after  # they do not reach the line
    torch.manual_seed(0)
    left, window, index = 200 + torch.rand(1, 1, 50), torch.full((1, 1, 5), 0.2), torch.zeros(3, dtype=torch.long)
    results = []
    for text in (VARIANCES, after):
        values = {"torch": torch, "F": torch.nn.functional}
        exec(text, values)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=text is after):
            results.append(values["structure"](left, left, window, index))
    assert results[1].dtype is torch.float32
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    shown = ", "    yield left\n    shown = "),
        ("    shown = ", "    def inner():\n        return left\n    shown = "),
        ("    shown = ", "    left.sum().backward()\n    shown = "),
        ("left, right, window", "*left"),
    ],
)
def test_a_function_that_trains_or_hands_values_out_stays(tmp_path, old, new):
    assert old in VARIANCES
    text = VARIANCES.replace(old, new)
    assert "fp32-function" not in spans(tmp_path, "cancellation", text)


def test_a_parameter_that_is_called_is_no_tensor(tmp_path):
    text = VARIANCES.replace("F.conv1d(left, window)\n", "F.conv1d(net(left), window)\n")
    after = spans(tmp_path, "cancellation", text.replace("(left, right,", "(net, left, right,"))["fp32-function"]
    assert "torch.autocast(left.device.type" in after and "net = " not in after


SCORES = """

class Reward(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.p, self.size = None, 4
        self.words = torch.nn.Embedding(9, 4)
        self.rows = torch.nn.Embedding.from_pretrained(torch.ones(9, 4))
        self.head = torch.nn.Linear(4, 1)

    def forward(self, p, r, x):
        return self.head(self.words(p) * self.rows(r) * x).squeeze(-1)  # here
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("self.rows(r)", "x[r]"),
        ("self.rows(r)", "x[0, r]"),
        ("* x)", "* x * (p == 0)[:, None])"),
        ("* x)", "* x.to(p.device))"),
    ],
)
def test_what_only_picks_rows_is_not_cast(tmp_path, old, new):
    after = spans(tmp_path, "cancellation", SCORES.replace(old, new))["fp32-function"]
    assert "x = x.float() if" in after and "p = p.float()" not in after and "r = r.float()" not in after


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("torch.nn.Embedding(9, 4)", "torch.nn.Linear(4, 4)"),
        ("torch.nn.Embedding(9, 4)", "Words(9, 4)"),
        ("* x)", "* x * p)"),
        ("* x)", "* x * (p > 0.5))"),
        ("self.words(p)", "self.words(p, 1)"),
        ("self.words(p)", "x[p][p] * p"),
        ("self.words(p)", "other.words(p)"),
        ("self.words(p)", "(p == 0)"),  # which floats may be, too
        ("        return", "        p = p / 2\n        return"),
        ("        self.head =", "        self.words = torch.nn.Linear(4, 4)\n        self.head ="),
    ],
)
def test_what_may_be_a_number_is(tmp_path, old, new):
    assert old in SCORES
    after = spans(tmp_path, "cancellation", SCORES.replace(old, new))["fp32-function"]
    assert "p = p.float() if p.is_floating_point() else p" in after and "r = r.float()" not in after


def as_method(first="s, ", above=""):
    """The function as a method that uses its object."""
    text = VARIANCES.strip().replace("(left, right,", f"({first}left, right,")
    lines = [*above.split(), *text.replace("F.conv1d(left *", "s.conv(left *").split("\n")]
    return "\n\nclass Alike:\n" + "\n".join(f"    {line}" if line else "" for line in lines)


def test_the_object_of_a_method_is_no_tensor_whatever_it_is_called(tmp_path):
    after = spans(tmp_path, "cancellation", as_method() + "\n")["fp32-function"]
    assert "torch.autocast(left.device.type" in after and "s = s.float()" not in after


AS_FUNCTION = VARIANCES.replace("(left, right,", "(s, left, right,").replace("F.conv1d(left *", "s * F.conv1d(left *")


@pytest.mark.parametrize("text", [AS_FUNCTION, as_method(above="@staticmethod").replace("s.conv", "s * F.conv1d")])
def test_the_first_parameter_of_a_function_and_of_a_static_method_is_one(tmp_path, text):
    assert "s.float()" in spans(tmp_path, "cancellation", text + "\n")["fp32-function"]
