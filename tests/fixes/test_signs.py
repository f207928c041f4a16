"""Constants that FP16 cannot hold keep their sign: what a maximum shall not find stays low, and for a minimum high."""

import pytest
import torch
from tests.fixes.sources import changed, finding, write

from floatline.fixes import find_fixes
from floatline.lint import RULES, lint_text
from floatline.lint.fixing import fix_text

LOW, HIGH = "torch.finfo(x.dtype).min", "torch.finfo(x.dtype).max"
HEAD = "import math\nimport sys\nimport numpy as np\nimport torch\nfrom math import inf\n"


def new_lines(tmp_path, text, cause="scalar-out-of-range"):
    """What stands on the line with `# here` after each change of its mask's constant."""
    path = write(tmp_path, text, head=HEAD)
    (line,) = [at for at, one in enumerate(path.read_text().splitlines(), 1) if one.endswith("# here")]
    kinds = ("mask-constant", "small-mask")
    found = [fix for fix in find_fixes(finding(path, line, cause, "aten.masked_fill")) if fix.kind in kinds]
    return [changed(fix).removesuffix("  # here") for fix in found]


def in_function(constant, before="", form="x.masked_fill(m, {})"):
    made = "".join(f"    {line}\n" for line in before.splitlines())
    return f"\n\ndef f(x, m):\n{made}    return {form.format(constant)}  # here\n"


CONSTANTS = [
    ("-1e9", LOW),
    ("1e9", HIGH),
    ("-10 ** 9", LOW),
    ("-3.4e38", LOW),
    ("3.4e38", HIGH),
    ("-(2 ** 31)", LOW),
    ("2 * 1e9", HIGH),
    ("-1 * 1e9", LOW),
    ("-1e9 / 2", LOW),
    ("torch.finfo(torch.float32).min", LOW),
    ("torch.finfo(torch.float32).max", HIGH),
    ("-torch.finfo(torch.float32).max", LOW),
    ("-torch.finfo(torch.float32).min", HIGH),
    ("torch.finfo(torch.float32).min / 2", LOW),
    ("np.finfo(np.float32).max", HIGH),
    ("sys.float_info.max", HIGH),
    ("-sys.float_info.max", LOW),
    ("float('inf')", HIGH),
    ("float('-inf')", LOW),
    ("-float('inf')", LOW),
    ("float(-1e9)", LOW),
    ("math.inf", HIGH),
    ("-inf", LOW),
    ("-np.inf", LOW),
    ("torch.inf", HIGH),
    ("torch.tensor(-1e9)", LOW),
    ("torch.full_like(x, 1e9)", HIGH),
    ("-1e9 if x.is_cuda else torch.finfo(torch.float32).min", LOW),
    ("1e9 if x.is_cuda else 1e8", HIGH),
]
WITHOUT_SIGN = [
    "fill",
    "-fill",
    "-1e9 if m.any() else 1e9",
    "x.max()",
    "-x",
    "torch.finfo(x.dtype).eps",
    "1e9 - 1e9",
    "-6e4",
    "torch.finfo(torch.float16).max",
    "args.fill",
    "self.fill",
    "math.nan",
    "f(1e9)",
]
FORMS = ["x.masked_fill(m, {})", "x.masked_fill(value={}, mask=m)", "torch.where(m, {}, x)", "torch.where(m, x, {})"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("constant", "new"), CONSTANTS)
def test_a_constant_keeps_its_sign(tmp_path, constant, new, form):
    assert new_lines(tmp_path, in_function(constant, form=form)) == [f"return {form.format(new)}"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("constant", WITHOUT_SIGN)
def test_where_nobody_can_tell_the_sign_the_constant_stays(tmp_path, constant, form):
    assert new_lines(tmp_path, in_function(constant, form=form)) == []


@pytest.mark.parametrize(
    ("before", "constant", "new"),
    [
        ("far = 1e9", "far", HIGH),
        ("far = 1e9", "-far", LOW),
        ("far = torch.finfo(torch.float32).max", "far", HIGH),
        ("far = -float('inf')", "-far", HIGH),
        ("limits = torch.finfo(torch.float32)", "limits.max", HIGH),
        ("limits = torch.finfo(torch.float32)", "-limits.max", LOW),
        ("near, far = -1e9, 1e9", "far", HIGH),
        ("near, far = -1e9, 1e9", "near", LOW),
        ("far = -1e9\nif x.is_cuda:\n    far = -3e38", "far", LOW),
        ("far = -1e9\nif x.is_cuda:\n    far = 3e38", "far", ""),
        ("far = 1e9\nfar = -far", "far", ""),
        ("far = 1e9\nfar *= -1", "far", ""),
        ("far = torch.tensor(m.sum())", "far", ""),
        ("for far in (1e9, -1e9):\n    pass", "far", ""),
        ("(near, *far) = -1e9, 1e9", "far", ""),
    ],
)
def test_a_name_has_the_sign_that_all_it_is_given_has(tmp_path, before, constant, new):
    text = in_function(constant, before)
    assert new_lines(tmp_path, text) == ([f"return x.masked_fill(m, {new})"] if new else [])


FILE = """
FAR = {far}


class Miner:
    fill = {shared}

    def __init__(self, away{default}):
        self.away = away

    def mine(self, x, m):
        return x.masked_fill(m, {constant})  # here


miner = Miner({given})
"""
PLAIN = {"far": "1e9", "shared": "-1e9", "default": "", "given": "1e9", "constant": "FAR"}


@pytest.mark.parametrize(
    ("parts", "new"),
    [
        ({}, HIGH),
        ({"constant": "-FAR"}, LOW),
        ({"far": "float('-inf')"}, LOW),
        ({"far": "1e9\nFAR = -1e9"}, ""),
        ({"constant": "self.fill"}, LOW),
        ({"constant": "self.fill", "far": "1e9\nclass Other:\n    fill = 1e9"}, ""),
        ({"constant": "self.away"}, HIGH),
        ({"constant": "self.away", "given": "-1e9"}, LOW),
        ({"constant": "self.away", "given": "away=-FAR"}, LOW),
        ({"constant": "self.away", "given": "1e9)\nother = Miner(-1e9"}, ""),
        ({"constant": "self.away", "default": "=-1e9"}, ""),
        ({"constant": "self.away", "default": "=1e9", "given": ""}, HIGH),
        ({"constant": "self.away", "given": "*[1e9]"}, ""),
        ({"constant": "self.away", "given": "1e9)\nmore = map(Miner, [-1e9]"}, ""),
        ({"constant": "self.away", "given": "1e9)\nminer.away = -1e9\nprint("}, ""),
        ({"constant": "fill"}, ""),  # a class's name is none of its methods'
    ],
)
def test_names_of_the_file_attributes_and_arguments_of_its_calls_are_followed(tmp_path, parts, new):
    text = FILE.format(**{**PLAIN, **parts})
    assert new_lines(tmp_path, text) == ([f"return x.masked_fill(m, {new})"] if new else [])


def test_an_argument_that_the_file_gives_nothing_may_be_anything(tmp_path):
    text = in_function("fill").replace("x, m", "x, m, fill=-1e9")
    assert new_lines(tmp_path, text) == []
    called = text + "\n\nf(torch.ones(2), None)\n"
    assert new_lines(tmp_path, called) == [f"return x.masked_fill(m, {LOW})"]


def test_a_fully_masked_softmax_keeps_it_too(tmp_path):
    text = in_function("-inf", form="x.masked_fill(m, {}).softmax(-1)")
    assert new_lines(tmp_path, text, "fully-masked-softmax") == [f"return x.masked_fill(m, {LOW}).softmax(-1)"]
    other = in_function("fill", form="x.masked_fill(m, {}).softmax(-1)")
    assert new_lines(tmp_path, other, "fully-masked-softmax") == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x + m * -1e9", "x + m * (torch.finfo(m.dtype).min / 2)"),
        ("x - m * 1e9", "x - m * (torch.finfo(m.dtype).max / 2)"),
        ("x - 1e9 * m", "x - (torch.finfo(m.dtype).max / 2) * m"),
        ("x + (1 - m) * 1e9", "x + (1 - m) * (torch.finfo(m.dtype).max / 2)"),
    ],
)
def test_a_mask_that_is_added_keeps_it_too(tmp_path, old, new):
    assert new_lines(tmp_path, in_function(old, form="{}")) == [f"return {new}"]


# What is chosen from what a mask leaves: each is what FP32 chooses with the user's own constant.
CHOICES = [
    ("largest", "x.masked_fill(m, torch.finfo(torch.float32).min)", ("max", "argmax")),
    ("smallest", "x.masked_fill(m, torch.finfo(torch.float32).max)", ("min", "argmin")),
    ("smallest by where", "torch.where(m, 1e9, x)", ("min", "argmin")),
    ("smallest by a sign", "x.masked_fill(m, -torch.finfo(torch.float32).min)", ("min", "argmin")),
    ("largest by where", "torch.where(m, -3e38, x)", ("max", "argmax")),
]


def choices(text, x, m, names):
    scope = {"torch": torch}
    exec(text, scope)
    filled = scope["f"](x, m)
    return [getattr(filled, name)(1) for name in names]


@pytest.mark.parametrize(("made", "names"), [one[1:] for one in CHOICES], ids=[one[0] for one in CHOICES])
def test_what_is_chosen_with_the_fix_in_fp16_is_what_fp32_chooses(tmp_path, made, names):
    path = tmp_path / "code.py"
    path.write_text(f"import torch\n\n\ndef f(x, m):\n    return {made}\n")
    (fix,) = [one for one in find_fixes(finding(path, 5, "scalar-out-of-range")) if one.kind == "mask-constant"]
    other, end = (".max", ".min") if "dtype).min" in fix.after else (".min", ".max")
    text = path.read_text()
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(32, 16, generator=generator).half()
        m = torch.rand(32, 16, generator=generator) < 0.6
        m[:, 0] = False
        wanted, got = choices(text, x.float(), m, names), choices(fix.after, x, m, names)
        values = [pair[0] if isinstance(pair, tuple) else pair for pair in (wanted[0], got[0])]
        assert torch.equal(values[0], values[1].float()) and torch.equal(wanted[1], got[1])
        turned = choices(fix.after.replace(f"x.dtype){end}", f"x.dtype){other}"), x, m, names)
        assert not torch.equal(wanted[1], turned[1])  # the twin: with the other sign something else is chosen


LINTED = [
    ("y = x.masked_fill(m, -1e9)", LOW),
    ("y = x.masked_fill(m, 1e9)", HIGH),
    ("far = 1e9\ny = x.masked_fill(m, -far)", LOW),
    ("far = 1e9\ny = x.masked_fill(m, far * -1.0)", LOW),
    ("y = x.masked_fill(m, -torch.finfo(torch.float32).max)", LOW),
    ("y = torch.where(m, x, 1e30)", HIGH),
    ("y = torch.where(m, 1e30, x)", HIGH),
    ("FAR = 1e9\ndef f(x, m):\n    return x.masked_fill(m, -FAR)", LOW),
    ("NEAR = -1e9\nLOW = NEAR\n\n\nclass A:\n    pass\n\n\ndef f(x, m):\n    return x.masked_fill(m, LOW)", LOW),
    ("y = x.masked_fill(m, -1e9 if k else 1e9)", ""),
    ("def f(x, m, fill=-1e9):\n    return x.masked_fill(m, fill)\nf(z, m, 1e9)", ""),
    ("def f(x, m, fill):\n    return x.masked_fill(m, fill)\nf(z, m, -1e9)\nf(z, m, 1e9)", ""),
    ("class A:\n    def __init__(self, v=1e9):\n        self.v = v\n    def f(self, x, m):\n"
     "        return x.masked_fill(m, self.v)\na = A(-1e9)", ""),
]  # fmt: skip


@pytest.mark.parametrize(("code", "new"), LINTED)
def test_lint_keeps_it_too_and_claims_no_fix_where_it_cannot_tell(code, new):
    text = f"import torch\n{code}\n"
    rule = RULES["FL105"]
    (found,) = lint_text(text, "a.py", rules=[rule], half=True)
    assert found.fix == ("mask-constant" if new else "")
    after, fixed = fix_text(text, "a.py", rules=[rule], unsafe=True)
    assert (new in after) if new else (after == text)
    assert len(fixed) == bool(new)
    if new == HIGH:
        assert "max" in found.advice and LOW not in after


def test_lint_advises_the_end_that_has_the_constants_sign():
    advice = [
        one.advice
        for fill in ("-1e9", "1e9")
        for one in lint_text(f"import torch\ny = x.masked_fill(m, {fill})\n", rules=[RULES["FL105"]], half=True)
    ]
    assert [LOW in advice[0], HIGH in advice[1]] == [True, True]
