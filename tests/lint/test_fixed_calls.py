"""No fix calls a layer, draws random numbers or takes a batch more or less often than the code that it fixes."""

import ast
import builtins
import re

import pytest

from floatline.fixes import rewriting
from floatline.lint import RULES
from floatline.lint.fixing import fix_text
from floatline.lint.rule import read_examples

HEAD = "import torch\nimport torch.nn.functional as F\n"
CALLS = ("self.layer(x0)", "F.dropout(x0)", "next(it)")
# What is looked through: the name stays, and what made it would run again.
MADE = {
    "FL101": "p = torch.softmax({}, dim=-1)\ny = torch.log(p)",
    "FL102": "p = torch.sigmoid({})\ny = torch.log(p) + torch.log(1 - p)",
    "FL106": "e = torch.exp({})\ny = e / e.sum(-1, keepdim=True)",
    "FL107": "e = torch.exp({})\ny = torch.log1p(e)",
    "FL111": "with torch.autocast('cuda'):\n    p = torch.sigmoid({})\n    y = F.binary_cross_entropy(p, t)",
    "FL120": "s = ({} ** 2).sum(-1)\ny = s.sqrt()",
    "FL123": "h = {}\nm = h.mean()\ny = (h**2).mean() - m * m",
}
# What is said twice, and the better form says once.
TWICE = {
    "FL106": ("y = torch.exp({0}) / torch.exp({0}).sum(-1, keepdim=True)", "y = {0}.exp() / (1 + {0}.exp())"),
    "FL120": ("y = torch.sqrt(({0} * {0}).sum(-1))",),
    "FL123": ("y = ({0} ** 2).mean() - {0}.mean() ** 2",),
}
PLAIN = [
    ("FL105", "y = {}.masked_fill(mask, -1e9)"),
    ("FL105", "y = torch.where(mask, {}, -1e9)"),
    ("FL108", "y = {} / (h.norm(dim=-1, keepdim=True) + 1e-8)"),
    ("FL108", "y = h / ({}.norm(dim=-1, keepdim=True) + 1e-8)"),
    ("FL108", "y = F.normalize({}, dim=-1, eps=1e-12)"),
    (
        "FL203",
        "scaler.scale(loss).backward()\ntorch.nn.utils.clip_grad_norm_(w, 1.0)\nscaler.step({})\nscaler.update()",
    ),
]


def with_calls(source):
    """An example whose names are replaced by calls, one after the other."""
    tree = ast.parse(source)
    names = [one for one in ast.walk(tree) if isinstance(one, ast.Name)]
    own = {one.id for one in names if not isinstance(one.ctx, ast.Load)} | {*dir(builtins), "self"}
    own |= {alias.asname or alias.name for one in ast.walk(tree) if hasattr(one, "names") for alias in one.names}
    own |= {one.arg for one in ast.walk(tree) if isinstance(one, (ast.arg, ast.keyword))}
    return [re.sub(rf"(?<![\w.]){given}\b(?!\()", "{}", source) for given in sorted({one.id for one in names} - own)]


def forms():
    for rule in RULES.values():
        if rule.fix_safety == "no":
            continue
        for bad in read_examples(rule.bad):
            if bad.file.endswith(".py"):
                yield from ((rule.code, form) for form in with_calls(bad.source) if "{}" in form)
    yield from MADE.items()
    yield from ((code, form.replace("{0}", "{}")) for code, all_ in TWICE.items() for form in all_)
    yield from PLAIN


FORMS = [*forms()]


def count(call, form, code):
    """How often a call stands in a form, and in what the fix makes of it."""
    before = HEAD + form.replace("{}", call)
    (rule,) = (one for one in RULES.values() if one.code == code)
    after, _ = fix_text(before, "example.py", rules=[rule], unsafe=True)
    ast.parse(after)
    return before.count(call), after.count(call), before != after


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("code", "form"), FORMS, ids=[f"{code}-{at}" for at, (code, _) in enumerate(FORMS)])
def test_a_fix_calls_nothing_more_or_less_often(code, form, call):
    before, after, _ = count(call, form, code)
    assert after == before


def test_forms_of_every_rule_with_an_expression_to_fix_are_fixed():
    fixed = {code for code, form in FORMS if count(CALLS[0], form, code)[2]}
    assert fixed >= {"FL101", "FL102", "FL106", "FL107", "FL108", "FL111", "FL120", "FL123"}


def test_without_a_name_for_it_a_layer_would_run_again(monkeypatch):
    monkeypatch.setattr(rewriting, "keep_calls", lambda old, new, scene, around: rewriting.KeptCalls(new))
    wrong = {code for code, form in FORMS if (found := count(CALLS[0], form, code))[0] != found[1]}
    assert wrong >= {"FL101", "FL102", "FL106", "FL107", "FL111", "FL120", "FL123"}


def test_what_is_looked_through_gets_a_name():
    before = f"{HEAD}p = torch.sigmoid(self.head(x))  # kept\ny = torch.log(p) + torch.log(1 - p)\n"
    after, _ = fix_text(before, "example.py", rules=[*RULES.values()], unsafe=True)
    assert after == (
        f"{HEAD}p_input = self.head(x)\np = torch.sigmoid(p_input)  # kept\n"
        "y = F.logsigmoid(p_input) + F.logsigmoid(-p_input)\n"
    )


@pytest.mark.parametrize(
    "lines",
    [
        "p_input = 1\np = torch.sigmoid(self.head(x))\ny = torch.log(p)",  # the name is taken
        "if c: p = torch.sigmoid(self.head(x))\ny = torch.log(p)",
        "with torch.no_grad():\n    p = torch.sigmoid(x)\ny = torch.log(p)",  # no gradient goes through it
        "p = torch.sigmoid(x)\ntorch.add(x, 1, out=x)\ny = torch.log(p)",
        "def f(x, p=None):\n    if p is None:\n        p = torch.sigmoid(x)\n    return torch.log(p)",
    ],
)
def test_where_it_cannot_be_named_nothing_is_fixed(lines):
    before = f"{HEAD}{lines}\n"
    assert fix_text(before, "example.py", rules=[*RULES.values()], unsafe=True)[0] == before


def test_the_same_is_fixed_where_it_can_be():
    before = f"{HEAD}p = torch.sigmoid(x)\ny = torch.log(p)\n"
    assert fix_text(before, "example.py", rules=[*RULES.values()], unsafe=True)[0] != before
