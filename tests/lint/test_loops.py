"""Rules of the training loop: what they see on each way through it, and that fixed scripts really train."""

import ast
import contextlib
import math
from pathlib import Path

import pytest
import torch

from floatline.lint import RULES, lint_text
from floatline.lint.fixing import fix_text
from floatline.lint.reading.branches import judge, learn

CASES = Path(__file__).parents[1] / "cases"
LOOP_RULES = [rule for code, rule in RULES.items() if code.startswith("FL2")]

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
x = torch.randn(32, 8)
y = x[:, :3].argmax(1)
losses = []
"""

FROZEN = f"""{HEAD}
class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(8, 16), nn.Linear(8, 4, bias=False), nn.Linear(4, 16, bias=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(torch.relu(self.base(x) + self.up(self.down(x))))

model = Adapted().half()
model.base.requires_grad_(False)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
scaler = torch.amp.GradScaler("cpu")
for _ in range(30):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
"""

WHOLE = f"""{HEAD}
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).half()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, foreach=True)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for _ in range(30):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x.half()).float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
"""

ADAM = f"""{HEAD}
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).half()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
for _ in range(30):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x.half()).float(), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""

SCALED = f"""{HEAD}
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.5)
scaler = torch.amp.GradScaler("cpu")
for _ in range(30):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    STEPS
    losses.append(loss.item())
"""


def run(source):
    scope = {}
    exec(compile(source, "script.py", "exec"), scope)  # the test's own scripts
    return scope


def fix(source, code):
    fixed, done = fix_text(source, "script.py", rules=[RULES[code]], unsafe=True)
    assert done
    return fixed


def falls(losses):
    return all(math.isfinite(one) for one in losses) and losses[-1] < 0.6 * losses[0] and max(losses) < 2 * losses[0]


def test_a_script_with_half_weights_and_a_scaler_raises_and_its_patch_trains():
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        run(FROZEN)
    assert falls(run(fix(FROZEN, "FL215"))["losses"])


def test_the_patch_keeps_the_frozen_base_in_fp16_and_trains_in_fp32():
    fixed = fix(FROZEN, "FL215")
    model = run(fixed)["model"]
    assert model.base.weight.dtype is torch.float16
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize(("source", "code", "breaks"), [(WHOLE, "FL215", True), (ADAM, "FL216", False)])
def test_of_half_weights_nothing_is_changed_and_what_is_advised_trains(source, code, breaks):
    (found,) = lint_text(source, "script.py", rules=[RULES[code]])
    assert "floatline.optim.AdamW" in found.advice
    assert fix_text(source, "script.py", rules=[RULES[code]], unsafe=True) == (source, [])
    if breaks:
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            run(source)
    else:
        assert not falls(run(source)["losses"])
    advised = source.replace("torch.optim.Adam", "floatline.optim.Adam").replace("torch.amp.Grad", "floatline.Loss")
    assert falls(run(f"import floatline\n{advised}")["losses"])


@pytest.mark.parametrize(
    ("code", "steps"),
    [
        (
            "FL201",
            "nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    scaler.step(optimizer)\n    scaler.update()",
        ),
        ("FL202", "optimizer.step()"),
        ("FL203", "scaler.step(optimizer)"),
    ],
)
def test_a_fixed_order_trains_where_the_old_one_did_not(code, steps):
    source = SCALED.replace("STEPS", steps)
    scope = {"losses": []}
    with contextlib.suppress(RuntimeError):
        scope = run(source)
    assert not scope["losses"] or not falls(scope["losses"])
    assert falls(run(fix(source, code))["losses"])


@pytest.mark.parametrize(
    ("case", "code"),
    [
        ("053", "FL201"),
        ("055", "FL215"),
        ("057", "FL202"),
        ("059", "FL205"),
        ("062", "FL212"),
        ("067", "FL211"),
        ("085", "FL204"),
    ],
)
def test_a_broken_loop_among_the_cases_is_flagged(case, code):
    (file,) = CASES.glob(f"{case}_*.py")
    assert code in {one.rule.code for one in lint_text(file.read_text("utf-8"), file.name, rules=LOOP_RULES)}


@pytest.mark.parametrize("case", ["086", "088", "090", "092", "094"])
def test_a_healthy_loop_among_the_cases_is_not(case):
    (file,) = CASES.glob(f"{case}_*.py")
    assert lint_text(file.read_text("utf-8"), file.name, rules=LOOP_RULES) == []


@pytest.mark.parametrize(
    ("before", "test", "outcome"),
    [
        ("amp", "amp", True),
        ("args.amp", "self.amp", True),
        ("amp", "not amp", False),
        ("amp and clip", "clip", True),
        ("scaler is not None", "scaler is None", False),
        ("scaler", "scaler is not None", True),
        ("dtype == half", "dtype != half", False),
        ("amp or clip", "clip", None),
        ("amp", "clip", None),
    ],
)
def test_what_one_test_says_of_another(before, test, outcome):
    known = learn(ast.parse(before, mode="eval").body, True)
    assert judge(ast.parse(test, mode="eval").body, known) is outcome


TWO_TESTS = """
import torch
scaler = torch.amp.GradScaler("cuda")
for batch in batches:
    scaler.scale(loss(batch)).backward()
    if FIRST:
        scaler.unscale_(optimizer)
    if SECOND:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(("second", "is_flagged"), [("clip", False), ("not clip", True), ("other", True)])
def test_two_tests_that_are_the_same_come_out_the_same(second, is_flagged):
    source = TWO_TESTS.replace("FIRST", "clip").replace("SECOND", second)
    assert bool(lint_text(source, "train.py", rules=[RULES["FL201"]])) is is_flagged


def test_code_with_more_ways_than_can_be_followed_is_not_judged():
    many = "\n".join(f"    if a{i}:\n        optimizer.zero_grad()" for i in range(12))
    source = (
        TWO_TESTS.replace("    if FIRST", f"{many}\n    if FIRST").replace("FIRST", "clip").replace("SECOND", "other")
    )
    assert lint_text(source, "train.py", rules=[RULES["FL201"]]) == []


ISLAND = """
import torch
import torch.nn.functional as F
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
with torch.autocast("cpu", dtype=torch.bfloat16):
    h = model(torch.randn(3, 4))
    beside = F.mse_loss(h, torch.zeros_like(h))
    with torch.autocast("cpu", enabled=False):
        loss = F.mse_loss(h, torch.zeros_like(h))
"""


def test_an_island_without_a_cast_computes_in_16_bits_what_autocast_would_widen():
    scope = run(ISLAND)
    assert (scope["beside"].dtype, scope["loss"].dtype) == (torch.float32, torch.bfloat16)
    assert run(ISLAND.replace("loss = F", "h = h.float()\n        loss = F"))["loss"].dtype == torch.float32


@pytest.mark.parametrize("off", ["enabled=False", "enabled = False"])
def test_a_region_that_is_off_is_seen_however_it_is_spelled(off):
    source = ISLAND.replace("enabled=False", off).replace("mse_loss(h, torch.zeros_like(h))", "cross_entropy(h, y)")
    assert [one.rule.code for one in lint_text(source, "loop.py", rules=[RULES["FL211"]])] == ["FL211"]
    cast = source.replace("loss = F.cross_entropy(h", "loss = F.cross_entropy(h.float()")
    assert lint_text(cast, "loop.py", rules=[RULES["FL211"]]) == []
