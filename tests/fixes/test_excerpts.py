"""Excerpts: rewrites of a file see what they look at, and make of it what they would make of the whole file."""

import ast

import pytest

from floatline.fixes import rewriting
from floatline.fixes.excerpts import SourceSpan, cut_out, take_whole
from floatline.lint.fixing import fix_text
from floatline.lint.rule import read_examples
from floatline.lint.rules import RULES

UGLY = '''"""A file with all kinds of blocks."""

import torch; import torch.nn.functional as F
from torch.cuda.amp import GradScaler, autocast

LIMIT = -1e9
table = {"a": 1,
         "b": 2}; other = 3


@torch.no_grad()
def unused(x):
    """Nothing to fix.

no indentation in here"""
    return x


class Model(torch.nn.Module):
    def one(self, x): return torch.log(torch.softmax(x, dim=-1))

    @property
    @torch.cuda.amp.autocast()
    def two(self):
        return 1

    def three(self, x):
        def inner(y):
            p = torch.softmax(y, dim=-1)
            return torch.log(p)
        if x is None:
            pass
        elif (q := inner(x)) is not None:
            with autocast(enabled=False): return torch.log(torch.softmax(x, dim=-1))
        elif x:  # a comment
            a = 1; s = GradScaler(); b = 2
        else:
            a = 2
        try:
            z = 1
        except ValueError:
            z = torch.cuda.amp.autocast()
        except TypeError:
            z = 2
        finally:
            z = 3
        return \\
            z


if LIMIT: scaler = GradScaler(init_scale=2.0)
else: scaler = None
for _ in range(3):
\tscaler.step(optimizer); scaler.update()  # tabs
'''


ALL = tuple(RULES.values())


def fix(text, rules=ALL):
    return fix_text(text, "example.py", rules=rules, unsafe=True)


def fix_by_the_whole_file(text, monkeypatch, rules=ALL):
    with monkeypatch.context() as patch:
        patch.setattr(rewriting, "cut_out", lambda text, tree, **_: take_whole(text))
        return fix(text, rules)


def surround(text):
    """An example among other code, in the file and in a function of its own."""
    tree = ast.parse(text)
    body = "".join(f"    {line}\n" if line.strip() else "\n" for line in text.splitlines())
    others = "def earlier(x):\n    y = x\n    return y\n\n\n"
    copies = [f"{others}{text}\n{others}".replace("\n", "\r\n")]
    if not any(isinstance(node, ast.Constant) and "\n" in str(node.value) for node in ast.walk(tree)):
        copies.append(f"import torch\n{others}def middle():\n{body}\n\n{others}class A:\n    b = 1\n")
    return copies


FIXED = [
    (rule, bad.source)
    for rule in RULES.values()
    for bad in read_examples(rule.bad)
    if bad.fixed is not None and bad.file.endswith(".py")
]


@pytest.mark.parametrize(("rule", "text"), FIXED)
def test_an_example_is_fixed_as_by_the_whole_file(rule, text, monkeypatch):
    for copy in surround(text):
        assert fix(copy, [rule]) == fix_by_the_whole_file(copy, monkeypatch, [rule])


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_every_kind_of_block_is_fixed_as_by_the_whole_file(end, monkeypatch):
    text = UGLY.replace("\n", end)
    new, fixed = fix(text)
    assert (new, fixed) == fix_by_the_whole_file(text, monkeypatch)
    assert len({one.line for one in fixed}) == 7
    assert len(new.split(end)) == len(text.split(end))


def test_what_is_cut_out_comes_back_and_little_is_left():
    lines = [f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(200)]
    text = "".join(
        [*lines, "class A:\n    x = 1\n    y = [1,\n         2]\n\n    def g(self):\n        z = 0\n        return z\n"]
    )
    at = text.split("\n").index("        return z") + 1
    excerpt = cut_out(text, ast.parse(text), alone=[SourceSpan(at, at)], within=[])
    assert excerpt.text.count("\n") == 9
    assert excerpt.text.split("\n")[excerpt.line(at) - 1] == "        return z"
    assert excerpt.restore(excerpt.text) == text
    assert excerpt.restore(excerpt.text.replace("return z", "return\n")) == text.replace("return z", "return\n")
    around = cut_out(text, ast.parse(text), alone=[], within=[SourceSpan(at, at)])
    assert "z = 0" in around.text
    assert "z = 0" not in excerpt.text


def test_a_rewrite_that_looks_at_the_file_gets_the_file():
    text = "import torch\n\n\ndef f(x):\n    return x\n\n\ny = torch.log(torch.softmax(x, dim=-1))\n"
    assert cut_out(text, ast.parse(text), alone=[], within=[SourceSpan(8, 8)]).text == text
    assert cut_out(text, ast.parse(text), alone=[SourceSpan(8, 8)], within=[]).text != text


@pytest.mark.parametrize("odd", ["\r", "# floatline: lines 0\n"])
def test_a_file_with_lines_that_only_python_sees_or_with_the_mark_is_taken_whole(odd):
    text = f"import torch\n{odd}def f(x):\n    return x\n\n\ny = 1\n"
    assert cut_out(text, ast.parse(text), alone=[SourceSpan(1, 1)], within=[]).text == text


def test_an_excerpt_that_is_no_python_is_not_used(monkeypatch):
    decorated = "@(\n    {}\n)\ndef f(x):\n    return x\n\n\n"
    broken = "import torch\n\n\n" + decorated.format("torch.cuda.amp.autocast()") + decorated.format("wrap")
    new, fixed = fix(broken)
    assert (new, fixed) == fix_by_the_whole_file(broken, monkeypatch)
    assert 'torch.amp.autocast("cuda")' in new
