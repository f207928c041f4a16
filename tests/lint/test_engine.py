"""The engine: names are resolved by imports, values are followed, and only what the file shows counts."""

import ast
import subprocess
import sys

import pytest
from tests.slow import slow

from floatline.lint import RULES, lint_text
from floatline.lint.reading.source import Source
from floatline.lint.rule import Rule


def parse(text: str) -> tuple[Source, ast.expr]:
    """A file, and the expression of its last statement."""
    source = Source(text)
    found = [node for node in ast.walk(source.tree) if isinstance(node, ast.Name) and node.id == "here"]
    if found:
        return source, found[-1]
    last = source.tree.body[-1]
    while isinstance(last, (ast.FunctionDef, ast.If, ast.For, ast.With)):
        last = last.body[-1]
    assert isinstance(last, (ast.Expr, ast.Assign, ast.Return))
    return source, last.value


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import torch\ntorch.log(x)", "log"),
        ("import torch as t\nt.log(x)", "log"),
        ("from torch import log as l\nl(x)", "log"),
        ("import torch.nn.functional as F\nF.softmax(x)", "softmax"),
        ("from torch.nn import functional as fn\nfn.softmax(x)", "softmax"),
        ("from torch import nn\nnn.functional.softmax(x)", "softmax"),
        ("import torch\nx.masked_fill_(m, 0)", "masked_fill"),
        ("import torch\ntorch.special.expit(x)", "sigmoid"),
        ("import torch\nx * 2", "mul"),
    ],
)
def test_an_operation_is_known_however_it_is_written(text, name):
    source, node = parse(text)
    assert source.operation(node).name == name


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nlog(x)",
        "import numpy as torch_like\nimport torch\ntorch_like.log(x)",
        "import torch\nx.sum()",
        "import torch\nlogger.step(x)",
        "from mylib import log\nimport torch\nlog(x)",
        "import torch\ntorch.optim.Adam(x)",
    ],
)
def test_what_is_not_shown_to_be_torchs_is_no_operation(text):
    source, node = parse(text)
    assert source.operation(node) is None


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("import torch\nx = a.half()\nhere = 0\nx", "half"),
        ("import torch\nx = a.float()\nx + 1e-8", "wide"),
        ("import torch\nx = a.to(torch.bfloat16)\nx.T[0]", "half"),
        ("import torch\nx = a.to(device)\nx", ""),
        ("import torch\nx = a.half().to(device)\nx", "half"),
        ("import torch\nx = torch.zeros(3)\nx", "wide"),
        ("import torch\nx = torch.zeros(3, dtype=torch.float16)\ny = torch.zeros_like(x)\ny", "half"),
        ("import torch\nx = a.half()\nif c:\n    x = a.float()\nx", ""),
        ("import torch\nx = a.half()\nif c:\n    x = b.half()\nx", "half"),
        ("import torch\nx = a.half()\nx = x.float()\nx", "wide"),
        ("import torch\ndef f(x):\n    if c:\n        x = x.float()\n    return x", ""),
        ("import torch\ndef f(x):\n    x = x.float()\n    for i in j:\n        y = x * 2\n    return x", "wide"),
        ("import torch\ndef f(x):\n    x = x.float()\n    for i in j:\n        x = x.half()\n    return x", ""),
        ("import torch\ntorch.softmax(x, dim=-1, dtype=torch.float32)", "wide"),
        ("import torch\na.float() * b.half()", "wide"),
        ("import torch\ntorch.matmul(a.float(), b.float())", ""),  # autocast makes it half
        ("import torch\na.half() > 0", "integer"),
        ("import torch\nd = torch.float16\nx = a.to(d)\nx", "half"),
        ("import torch\ntorch.arange(10)", "integer"),
    ],
)
def test_a_dtype_is_what_the_file_shows(text, dtype):
    source, node = parse(text.replace("here = 0\n", ""))
    assert source.dtype(node) == dtype


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("-1e9", -1e9),
        ("-10 ** 9", -1e9),
        ("float('-inf')", float("-inf")),
        ("import math\n-math.inf", float("-inf")),
        ("N = -1e4\ndef f():\n    return N", -1e4),
        ("N = -1e4\nN = 3\ndef f():\n    return N", None),
        ("def f(N=3):\n    return N", None),
        ("True", None),
        ("10 ** 10 ** 10", None),
    ],
)
def test_a_number_is_followed_to_where_it_is_written(text, number):
    source, node = parse(text)
    assert source.number(node) == number


def flagged(text: str) -> list[str]:
    return [one.rule.code for one in lint_text(text, rules=[RULES["FL101"]])]


LOG = "import torch\ny = torch.log(torch.softmax(x.half(), dim=-1))"


def test_a_file_without_torch_is_not_even_parsed(monkeypatch):
    monkeypatch.setattr(ast, "parse", None)
    assert flagged("x = log(softmax(y))") == []
    with pytest.raises(TypeError):
        flagged(LOG)


def test_a_comment_allows_a_line_the_line_below_or_the_file():
    assert flagged(LOG) == ["FL101"]
    assert flagged(LOG + "  # floatline: allow[log-of-softmax]") == []
    assert flagged(LOG + "  # floatline: allow[FL101, other]") == []
    assert flagged(LOG + "  # floatline: allow[other]") == ["FL101"]
    assert flagged(LOG.replace("\n", "\n# floatline: allow[log-of-softmax]\n")) == []
    assert flagged("# floatline: allow[log-of-softmax]\n" + LOG + "\n" + LOG) == []
    below = "import torch\n# floatline: allow[log-of-softmax]\nz = 1\ny = torch.log(torch.softmax(x.half(), dim=-1))"
    assert flagged(below) == ["FL101"]


@pytest.mark.parametrize("text", ["import torch\ndef (", "import torch\n\0", "import torch\n" + "(" * 5000])
def test_what_is_not_python_has_no_finding_and_raises_nothing(text):
    assert flagged(text) == []


def test_columns_count_characters_not_bytes():
    text = "import torch\nö = 'äöü'; y = torch.log(torch.softmax(x.half(), dim=-1))"
    (one,) = lint_text(text, rules=[RULES["FL101"]])
    assert (one.line, one.column) == (2, 16)


def test_every_rule_says_which_files_it_wants():
    assert all(rule.words or rule.calls for rule in RULES.values())
    assert all(issubclass(rule, Rule) for rule in RULES.values())


def modules_after(code: str) -> str:
    command = [sys.executable, "-c", f"{code}\nimport sys; print(' '.join(sys.modules))"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@slow
def test_lint_does_not_load_torch():
    assert "torch" not in modules_after("import ast, floatline.lint; floatline.lint.lint_paths([ast.__file__])").split()


@slow
def test_the_check_above_can_fail():
    assert "torch" in modules_after("import torch").split()
