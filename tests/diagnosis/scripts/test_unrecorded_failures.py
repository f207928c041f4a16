"""A step that fails and was not recorded is recorded when the script runs again."""

import sys

import pytest
from tests.slow import slow

from floatline.diagnosis.scripts.script import diagnose_script

SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(80):
    x = torch.randn(32, 8)
    y = x.sum(1, keepdim=True)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (model(x) - y).square().mean()
    rare = {size} if step == 61 else 1.0
    loss = loss + 1e-9 * torch.exp(rare * loss.detach().to(torch.{dtype}) ** 0)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
"""


def diagnose(folder, size, dtype="float16", **options):
    script = folder / "train.py"
    script.write_text(SCRIPT.format(size=size, dtype=dtype), encoding="utf-8")
    said = []
    return diagnose_script([sys.executable, str(script)], on_progress=said.append, **options), said


def line_of(text):
    return SCRIPT[: SCRIPT.index(text)].count("\n") + 1


@pytest.mark.slow
def test_a_rare_failure_of_16_bits_is_named_at_its_line(tmp_path):
    found, said = diagnose(tmp_path, 20.0)
    assert (found.verdict, found.primary.cause.id) == ("precision", "exp-overflow"), found
    assert found.primary.line == line_of("torch.exp(rare")
    assert "step 61 was looked into when the script ran again" in found.notes
    assert said[1].startswith("the script runs again to step 61")


@slow
@pytest.mark.parametrize("unscales", [True, False])
def test_a_step_that_is_made_though_gradients_overflowed_is_blamed_and_not_the_overflow(tmp_path, unscales):
    text = SCRIPT.replace(" + 1e-9 * torch.exp(rare * loss.detach().to(torch.{dtype}) ** 0)", "")
    text = text.replace("scaler.step(opt)", "scaler.unscale_(opt)\n    opt.step()" if unscales else "scaler.step(opt)")
    script = tmp_path / "train.py"
    script.write_text(text.replace("{size}", "1").replace("init_scale=1024.0", "growth_interval=8"), encoding="utf-8")
    found = diagnose_script([sys.executable, str(script)], fp32_steps=0)
    assert (found.primary is not None) == unscales, found
    if unscales:
        assert found.primary.cause.id == "scaler-misuse", found
        assert script.read_text().splitlines()[found.primary.line - 1].strip() == "opt.step()"


@pytest.mark.slow
def test_what_fails_in_fp32_as_well_is_no_precision_problem_and_its_line_is_named(tmp_path):
    found, _ = diagnose(tmp_path, 200.0, "float32")
    assert found.verdict == "not-precision", found
    assert (
        f"aten.exp at train.py:{line_of('torch.exp(rare')} makes inf or NaN, and in FP32 as well" in found.unexplained
    )


@slow
def test_a_script_that_may_run_once_is_not_run_again(tmp_path):
    found, said = diagnose(tmp_path, 20.0, fp32_steps=0)
    assert "not finite from step 61 on" in found.unexplained
    assert not found.findings
    assert [line for line in said if " again" in line] == []
