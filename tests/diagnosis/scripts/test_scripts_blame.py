"""Of several things that are wrong with a script, the one that the others follow from is named; and no other."""

import pytest
from tests.diagnosis.scripts.test_scripts import line_of, observe

from floatline.diagnosis.detectors.not_precision import overflows
from floatline.probe.trace.trace import Op, Operand, Trace, Values

SCHEDULED = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 8))
opt = torch.optim.SGD(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: max(0.0, 1 - step / 30))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**SCALE)
for step in range(60):
    x, y = torch.randn(16, 6), torch.randint(0, 8, (16,))
    opt.zero_grad()
    with torch.autocast("cpu", torch.float16):
        out = net(x) * GAIN
    p = torch.softmax(out.float(), 1).to(out.dtype)
    loss = -torch.log(p + GUARD).float().gather(1, y[:, None]).mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    scheduler.step()
"""


@pytest.mark.parametrize(
    ("settings", "cause", "code"),
    [
        ("SCALE, GAIN, GUARD = 16, 60.0, 0.0", "rounded-onto-singularity", "torch.log(p + GUARD)"),
        ("SCALE, GAIN, GUARD = 44, 1.0, 1e-3", "scheduler-vs-skipped-step", "scheduler.step()"),
    ],
)
def test_steps_that_fail_are_not_blamed_on_the_schedule_that_runs_ahead_of_them(tmp_path, settings, cause, code):
    script = tmp_path / "train.py"
    script.write_text(f"{settings}\n{SCHEDULED}", encoding="utf-8")
    answer = observe(str(script))
    first = answer["findings"][0]
    assert first["cause"] == cause, answer
    assert code in line_of(first)


def number(largest=1.0, *, bad=0):
    return Values("float32", (4,), 4, largest=largest, pos_inf=bad)


@pytest.mark.parametrize(
    ("operand", "diverged"),
    [
        (Operand(number(1e30)), True),
        (Operand(number(2.0)), False),
        (Operand(number(bad=2), role="param:w"), True),
        (Operand(number(bad=2), role="buffer:b"), False),
        (Operand(number(bad=2)), False),
    ],
)
def test_what_was_not_finite_before_a_step_is_no_divergence_unless_it_is_a_weight(operand, diverged):
    op = Op(0, "aten.mul", "forward", inputs=[operand], outputs=[number(bad=1)])
    assert overflows(Trace([op])) == diverged


FUSED = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Embedding(64, 16), nn.Flatten(), nn.Linear(128, 32), nn.Tanh(), nn.Linear(32, 2))
net = net.to(DTYPE)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True, eps=EPS)
for step in range(40):
    x = torch.randint(0, 64, (16, 8))
    loss = nn.functional.cross_entropy(net(x).float(), (x.sum(1) > 252).long())
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize(
    ("settings", "causes"),
    [
        ("DTYPE, EPS = torch.float16, 1e-8", ["optimizer-state-underflow"]),  # weights go from 4 to 999
        ("DTYPE, EPS = torch.float16, 1e-3", []),
        ("DTYPE, EPS = torch.float32, 1e-8", []),
    ],
)
def test_second_moments_that_are_0_are_told_also_where_nothing_becomes_nan(tmp_path, settings, causes):
    script = tmp_path / "train.py"
    script.write_text(f"import torch\n{settings}\n{FUSED}", encoding="utf-8")
    assert [finding["cause"] for finding in observe(str(script))["findings"]] == causes
