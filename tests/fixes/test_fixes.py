"""Changes of source: the right text, a diff that applies, code that then runs, and look-alikes that stay."""

import math
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.fixes.sources import HEAD, changed, finding, write

from floatline.causes import find_cause
from floatline.fixes import fix_finding, fix_line, join_patches
from floatline.fixes.finding import KINDS_OF_CAUSES

EXPRESSIONS = [
    ("torch.log(torch.sigmoid(x))", "F.logsigmoid(x)", "log-sigmoid", True),
    ("x.sigmoid().log()", "F.logsigmoid(x)", "log-sigmoid", True),
    ("-torch.log(1 - torch.sigmoid(x + y)).mean()", "-F.logsigmoid(-(x + y)).mean()", "log-sigmoid", True),
    ("-torch.log(1 - torch.sigmoid(-x))", "-F.logsigmoid(x)", "log-sigmoid", True),
    ("torch.log1p(-torch.sigmoid(-x))", "F.logsigmoid(x)", "log-sigmoid", True),
    ("torch.log(torch.softmax(x, dim=-1))", "F.log_softmax(x, dim=-1)", "log-softmax", True),
    ("x.softmax(-1).log()", "F.log_softmax(x, -1)", "log-softmax", True),
    ("torch.log(1 + torch.exp(x))", "F.softplus(x)", "softplus", False),
    ("torch.log1p(x.exp())", "F.softplus(x)", "softplus", False),
    ("1 / (1 + torch.exp(-x))", "torch.sigmoid(x)", "exp-ratio", True),
    ("1.0 / (1.0 + torch.exp(-3 * x))", "torch.sigmoid(3 * x)", "exp-ratio", True),
    ("x.exp() / (1 + x.exp())", "torch.sigmoid(x)", "exp-ratio", True),
    ("x.exp() / x.exp().sum(-1, keepdim=True)", "torch.softmax(x, -1)", "exp-ratio", True),
    ("torch.exp(x) / torch.exp(x).sum(dim=1, keepdim=True)", "torch.softmax(x, dim=1)", "exp-ratio", True),
    (
        "F.binary_cross_entropy(torch.sigmoid(x), y)",
        "F.binary_cross_entropy_with_logits(x, y)",
        "bce-with-logits",
        True,
    ),
    ("x.masked_fill(m, -1e9)", "x.masked_fill(m, torch.finfo(x.dtype).min)", "mask-constant", True),
    ("torch.where(m, x, -1e9)", "torch.where(m, x, torch.finfo(x.dtype).min)", "mask-constant", True),
    ("x.masked_fill(m, value=-(10 ** 6))", "x.masked_fill(m, value=torch.finfo(x.dtype).min)", "mask-constant", True),
    ("x / (y + 1e-8)", "(x / (y.float() + 1e-8)).to(x.dtype)", "small-eps", True),
    ("torch.log(y + 1e-8)", "torch.log(y.float() + 1e-8)", "small-eps", True),
    ("x * torch.rsqrt(1e-6 + y)", "x * torch.rsqrt(1e-6 + y.float())", "small-eps", True),
    ("y.clamp(min=1e-8).log()", "y.float().clamp(min=1e-8).log()", "small-eps", True),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "kind", "safe"), EXPRESSIONS)
def test_an_expression_gets_its_better_form(tmp_path, old, new, kind, safe):
    fix = fix_line(write(tmp_path, f"\n\ndef f(x, y, m):\n    return {old}  # kept\n"), 6)
    assert fix is not None
    assert changed(fix) == f"return {new}  # kept"
    assert (fix.kind, fix.safe) == (kind, safe)


@pytest.mark.parametrize(("old", "new", "kind", "safe"), EXPRESSIONS)
def test_the_better_form_is_the_same_function(tmp_path, old, new, kind, safe):
    x = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    names = {"torch": torch, "F": torch.nn.functional, "x": x, "y": x.sigmoid(), "m": x > 0}
    # In FP64 1e-8 counts, -1e9 is a mask like any other, and .float() is what FP16 code needs, not this one.
    wide = {**names, "x": x.float(), "y": x.sigmoid().float()} if ".float()" in new else names
    before, after = eval(old, wide), eval(new, wide)
    if kind == "mask-constant":
        before, after = before.softmax(-1), after.softmax(-1)
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-8)


LOOK_ALIKES = [
    "torch.log(torch.sigmoid(x) + 1e-3)",
    "torch.log(torch.sigmoid(x) * 2)",
    "torch.log(2 - torch.sigmoid(x))",
    "log(sigmoid(x))",
    "torch.log(2 + torch.exp(x))",
    "2 / (1 + torch.exp(-x))",
    "x.exp() / y.exp().sum(-1, keepdim=True)",
    "x.exp() / x.exp().sum(-1)",
    "x.masked_fill(m, -1e4)",
    "x.masked_fill(m, float('-inf'))",
    "x.masked_fill(m, fill)",
    "x / (y + 1e-3)",
    "x / (y.float() + 1e-8)",
    "x / (y + eps)",
    "F.binary_cross_entropy(y, y)",
]


@pytest.mark.parametrize("code", LOOK_ALIKES)
def test_a_look_alike_has_no_fix(tmp_path, code):
    assert fix_line(write(tmp_path, f"\n\ndef f(x, y, m):\n    return {code}\n"), 6) is None


def test_a_probability_made_on_another_line_is_followed(tmp_path):
    path = write(tmp_path, "\n\ndef f(x):\n    p = torch.sigmoid(x)\n    return p.log()\n")
    assert changed(fix_line(path, 7)) == "return F.logsigmoid(x)"


@pytest.mark.parametrize("between", ["p = p * 2", "x = x + 1", "p[0] = 1", "p.clamp_(1e-3)", "x += 1"])
def test_but_not_where_something_changed_in_between(tmp_path, between):
    path = write(tmp_path, f"\n\ndef f(x):\n    p = torch.sigmoid(x)\n    {between}\n    return p.log()\n")
    assert fix_line(path, 8) is None


@pytest.mark.parametrize(
    ("head", "new"),
    [
        ("import torch as t\n", "t.nn.functional.logsigmoid(x)"),
        ("import torch as t\nfrom torch import nn\n", "nn.functional.logsigmoid(x)"),
        ("import torch as t\nfrom torch.nn.functional import logsigmoid\n", "logsigmoid(x)"),
    ],
)
def test_the_files_own_spelling_is_kept(tmp_path, head, new):
    path = write(tmp_path, "y = t.log(t.sigmoid(x))\n", head=head)
    assert changed(fix_line(path, head.count("\n") + 1)) == f"y = {new}"


@pytest.mark.parametrize(
    ("cause", "op", "old", "new"),
    [
        ("reduction-overflow", "aten.sum", "t = (p * y).sum()", "t = (p.float() * y).sum()"),
        ("reduction-overflow", "aten.sum", "t = p.sum() + y.sum()", "t = p.float().sum() + y.float().sum()"),
        ("product-overflow", "aten.pow", "t = x.pow(2).mean()", "t = x.float().pow(2).mean()"),
        ("product-overflow", "aten.mul", "t = self.scale * x", "t = self.scale * x.float()"),
        ("gradient-overflow", "DivBackward0", "t = self.f / (d * 0.2)", "t = self.f / (d.float() * 0.2)"),
        ("rounded-onto-singularity", "AcosBackward0", "t = torch.acos(c)", "t = torch.acos(c.float())"),
        (
            "scalar-out-of-range",
            "aten.masked_fill",
            "x.masked_fill_(m, -float('inf'))",
            "x.masked_fill_(m, torch.finfo(x.dtype).min)",
        ),
        (
            "eps-underflow",
            "aten.div",
            "t = x / (n + self.eps)",
            "t = (x / (n.float() + max(self.eps, 1e-4))).to(x.dtype)",
        ),
        ("eps-underflow", "aten.log", "t = torch.log(torch.sigmoid(x) + 1e-8)", "t = F.logsigmoid(x)"),
        (
            "params-not-trained",
            "",
            "self.g = torch.ones(4, requires_grad=True)",
            "self.g = torch.nn.Parameter(torch.ones(4))",
        ),
    ],
)
def test_a_finding_gets_the_rewrite_of_its_cause(tmp_path, cause, op, old, new):
    path = write(tmp_path, f"\n\ndef f(self, x, y, p, m, n, c, d, fill):\n    {old}\n")
    fix = fix_finding(finding(path, 6, cause, op))
    assert changed(fix) == new


@pytest.mark.parametrize("cause", ["optimization-divergence", "bad-input-data", "gradient-underflow"])
def test_where_no_rewrite_is_known_there_is_none(tmp_path, cause):
    path = write(tmp_path, "\n\ndef f(x):\n    return torch.log(torch.sigmoid(x))\n")
    assert fix_finding(finding(path, 6, cause)) is None


def test_files_that_cannot_be_read_or_parsed_have_no_fix(tmp_path):
    assert fix_line(tmp_path / "none.py", 1) is None
    assert fix_line(write(tmp_path, "def (:\n"), 3) is None
    assert fix_line(write(tmp_path, "x = 1\n"), 40) is None


LOOP = """
def train(model, opt, scaler, loss):
    scaler.scale(loss).backward()
    # bounded
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()


def wrong(opt, scaler, loss):
    scaler.scale(loss).backward()
    opt.step()
"""


def test_gradients_are_unscaled_before_they_are_clipped(tmp_path):
    fix = fix_finding(finding(write(tmp_path, LOOP), 7, "clip-before-unscale"))
    assert changed(fix) == "scaler.unscale_(opt)"
    assert "    # bounded\n    scaler.unscale_(opt)\n    torch.nn.utils.clip" in fix.after


def test_the_scaler_makes_the_step(tmp_path):
    fix = fix_finding(finding(write(tmp_path, LOOP), 14, "scaler-misuse"))
    assert changed(fix) == "scaler.step(opt)\nscaler.update()"


# --- diffs -------------------------------------------------------------------------------------------------------


APPLY = [["git", "apply", "-p1"]] + ([["patch", "-p1", "-i"]] if shutil.which("patch") else [])


@pytest.mark.parametrize("command", APPLY)
@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_the_patch_applies_and_gives_the_fixed_file(tmp_path, command, end, newline):
    text = HEAD + "\n\ndef f(x):\n    return torch.log(torch.sigmoid(x))" + end
    path = tmp_path / "pkg" / "losses.py"
    path.parent.mkdir()
    path.write_bytes(text.replace("\n", newline).encode())
    fix = fix_line(path, 6, root=tmp_path)
    (tmp_path / "fix.patch").write_bytes(fix.patch.encode())
    subprocess.run([*command, "fix.patch"], cwd=tmp_path, check=True, capture_output=True)
    assert path.read_bytes().decode() == fix.after
    function = runpy.run_path(str(path))["f"]
    assert function(torch.tensor([-30.0]).half()).item() == -30.0


def test_the_code_before_was_wrong(tmp_path):
    path = write(tmp_path, "\n\ndef f(x):\n    return torch.log(torch.sigmoid(x))\n")
    assert runpy.run_path(str(path))["f"](torch.tensor([-30.0]).half()).item() == -math.inf


def test_several_fixes_join_to_one_patch(tmp_path):
    body = "\n\ndef f(x):\n    a = torch.log(torch.sigmoid(x))\n    b = 1\n    c = x / (x + 1e-8)\n    return a, b, c\n"
    paths = [write(tmp_path, body, name=name) for name in ("one.py", "two.py")]
    fixes = [fix_line(path, line, root=tmp_path) for path in paths for line in (6, 8)]
    fixes.append(fixes[0])  # the same again
    (tmp_path / "fix.patch").write_text(join_patches(fixes), encoding="utf-8")
    subprocess.run(["git", "apply", "-p1", "fix.patch"], cwd=tmp_path, check=True, capture_output=True)
    for path in paths:
        a, _, c = runpy.run_path(str(path))["f"](torch.tensor([-30.0, 0.0]).half())
        assert a[0] == -30.0
        assert c.tolist() == [1.0, 0.0]


CASES = Path(__file__).parents[1] / "cases"


@pytest.mark.parametrize(
    ("name", "line", "cause", "op"),
    [
        ("016_mask_constant_raises.py", 27, "scalar-out-of-range", "aten.masked_fill"),
        ("031_adversary_log_one_minus.py", 38, "rounded-onto-singularity", "aten.log"),
        ("024_padded_history_cosine.py", 29, "eps-underflow", "aten.div"),
    ],
)
def test_a_case_computes_finite_gradients_after_its_patch(tmp_path, name, line, cause, op):
    from floatline.numerics.half_on_cpu import HalfOnCPU

    path = tmp_path / name
    shutil.copy(CASES / name, path)

    def is_sound():
        torch.manual_seed(0)
        model, batches, loss_fn, precision, _ = runpy.run_path(str(path))["build"]()
        true = precision == "fp16-true"
        model = model.half() if true else model
        with HalfOnCPU():
            for inputs, targets in batches:
                if true:
                    inputs = [x.half() if x.is_floating_point() else x for x in inputs]
                with torch.autocast("cpu", torch.float16, enabled=not true):
                    loss = loss_fn(model(*inputs), *targets)
                loss.backward()
        return all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())

    try:
        assert not is_sound()
    except RuntimeError as error:
        assert "without overflow" in str(error)
    fix = fix_finding(finding(path, line, cause, op), root=tmp_path)
    (tmp_path / "fix.patch").write_text(fix.patch, encoding="utf-8")
    subprocess.run(["git", "apply", "-p1", "fix.patch"], cwd=tmp_path, check=True, capture_output=True)
    assert is_sound()


def test_fixes_do_not_load_torch():
    code = "import floatline.fixes, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_cause_with_a_fix_is_in_the_catalogue():
    for cause in KINDS_OF_CAUSES:
        assert find_cause(cause).id == cause
