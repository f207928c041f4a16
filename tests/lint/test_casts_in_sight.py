"""What a file casts to FP32 behind a test of the dtype is believed: in place, in a helper, in a decorator."""

import pytest

from floatline.lint import RULES, lint_text

HEAD = "import torch\nimport torch.nn.functional as F\nfrom functools import wraps\nfrom torch import nn\n"
RULES_OF_NUMBERS = [RULES[code] for code in ("FL101", "FL102", "FL105", "FL106")]
USES = (
    "y = torch.log(torch.sigmoid(x))",
    "y = x.masked_fill(m, -1e9)",
    "y = torch.log(torch.softmax(x, -1))",
    "y = x.exp() / x.exp().sum(-1, keepdim=True)",
)
CASTS = {
    "a test of two dtypes": "if x.dtype in (torch.float16, torch.bfloat16):\n        x = x.float()",
    "a test of one": "if x.dtype is torch.half:\n        x = x.to(torch.float32)",
    "a test with an else": "if x.dtype == torch.float16:\n        x = x.float()\n    else:\n        x = x.contiguous()",
    "what is not FP32": "if x.dtype != torch.float32:\n        x = x.float()",
    "a flag": "is_half = x.dtype in (torch.float16, torch.bfloat16)\n    if is_half:\n        x = x.float()",
    "its size": "if x.element_size() < 4:\n        x = x.float()",
    "an old type": "if isinstance(x, torch.HalfTensor):\n        x = x.float()",
    "an expression": "x = x.float() if x.dtype == torch.half else x",
    "the other way round": "x = x if x.dtype == torch.float32 else x.float()",
    "and back": "kind = x.dtype\n    x = x.to(torch.float32)",
    "a helper": "x = up(x)",
    "a helper of several": "x, m = all_up(x, m)",
    "a helper with a way out": "x = up_early(x)",
    "a lambda": "x = up_short(x)",
}
HELPERS = """
def up(x):
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    return x
def up_early(x):
    if x.dtype == torch.float16:
        return x.float()
    return x
def all_up(*xs):
    return tuple(x.float() if x.dtype == torch.half else x for x in xs)
up_short = lambda x: x.float() if x.dtype == torch.half else x
def again(x):
    return again(x)
def sometimes(x):
    if x.dim() > 2:
        return x.float()
    return x
def down(x):
    return x.half() if x.dtype == torch.float32 else x
"""
DECORATORS = {
    "by a list": "args = [a.float() if a.dtype == torch.half else a for a in args]\n        return fn(*args)",
    "in the call": "return fn(*[a.float() for a in args])",
    "and back": "kind = args[0].dtype\n        return fn(*[a.to(torch.float32) for a in args]).to(kind)",
}
IN_FP32 = "def whole(fn):\n    @wraps(fn)\n    def inner(*args):\n        {}\n    return inner\n@whole\n"


def found(text):
    return [str(one) for one in lint_text(HEAD + text, "e.py", rules=RULES_OF_NUMBERS, half=True)]


def body(cast, use):
    return f"{HELPERS}\ndef f(x, m):\n    {cast}\n    {use}\n    return y\n"


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", CASTS)
def test_a_cast_by_the_dtype_is_believed(name, use):
    assert found(body(CASTS[name], use)) == []


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "cast",
    [
        "x = x.contiguous()",
        "if x.dim() > 2:\n        x = x.float()",
        "x = sometimes(x)",
        "x = down(x)",
        "x = again(x)",
        "if x.dtype == torch.float32:\n        x = x.half()",
        "x = x.half() if x.dtype == torch.float32 else x",
    ],
)
def test_what_casts_by_something_else_or_to_16_bits_is_not(cast, use):
    assert found(body(cast, use))


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", DECORATORS)
def test_a_decorator_that_casts_what_it_hands_on_is_believed(name, use):
    text = IN_FP32.format(DECORATORS[name]) + f"def f(x, m):\n    {use}\n    return y\n"
    assert found(text) == []


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "inner", ["return fn(*args).float()", "y = fn(*args)\n        return y.float()", "return fn(*args)"]
)
def test_one_that_casts_what_comes_back_is_not(inner, use):
    assert found(IN_FP32.format(inner) + f"def f(x, m):\n    {use}\n    return y\n")


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("is_method", [True, False])
def test_a_method_that_casts_is_believed_and_one_of_another_class_is_unknown(use, is_method):
    owner = "self" if is_method else "other"
    text = (
        "class Head(nn.Module):\n    def _up(self, x):\n        return x.float() if x.dtype == torch.half else x\n"
        f"    def forward(self, x, m, other):\n        x = {owner}._up(x)\n        {use}\n        return y\n"
    )
    assert (found(text) == []) == is_method


@pytest.mark.parametrize("inputs", ["torch.randn(4, 8)", "torch.randn(4, 8, dtype=torch.float32)"])
def test_what_a_model_makes_of_fp32_inputs_need_not_be_fp32(inputs):
    use = "def loss(z):\n    return -torch.log(torch.softmax(z, -1)).mean()\n"
    run = f"with torch.autocast('cpu', torch.float16):\n    loss(nn.Linear(8, 4)({inputs})).backward()\n"
    found = lint_text(HEAD + use + run, rules=RULES_OF_NUMBERS)
    assert [one.rule.code for one in found] == ["FL101"]
    assert lint_text(HEAD + use.replace("z, -1", "z.float(), -1") + run, rules=RULES_OF_NUMBERS) == []
