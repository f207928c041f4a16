"""A script in FP32, with its own text and a changed one; a change that moves its losses is no fix."""

import contextlib
import json
import math
import sys
from dataclasses import replace

import pytest
from tests.slow import slow

import floatline.fixes
from floatline.diagnosis.scripts.fp32_runs import MAIN, FP32Runs
from floatline.diagnosis.scripts.script import diagnose_script
from floatline.running.command import parse_command
from floatline.running.quiet_runs import QuietRuns

SCRIPT = """
import torch

model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range({steps}):
    x = torch.randn(16, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
        loss = -torch.log(torch.softmax(12 * out, dim=1))[:, 0].mean()
    optimizer.zero_grad()
    loss.float().backward()
    {step}
"""
LOG = "-torch.log(torch.softmax(12 * out, dim=1))"
SAME, OTHER = "-torch.log_softmax(12 * out, dim=1)", "-0.5 * torch.log_softmax(12 * out, dim=1)"


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"

    def write(steps=6, step="optimizer.step()"):
        path.write_text(SCRIPT.replace("{steps}", str(steps)).replace("{step}", step), encoding="utf-8")
        return path

    return write


@pytest.fixture
def runs_of():
    with contextlib.ExitStack() as stack:

        def begin(path, steps=4):
            command = parse_command([sys.executable, str(path)])
            return FP32Runs(command, stack.enter_context(QuietRuns(command, [MAIN])), "", steps, lambda _: None)

        yield begin


@slow
def test_the_same_losses_come_of_the_same_text_and_others_of_another(script, runs_of):
    path = script()
    runs = runs_of(path)
    before = runs.changed({})
    assert len(before.losses) == 4
    assert all(map(math.isfinite, before.losses))  # in FP16 some are not
    text = path.read_text() + "#" * 200_000  # more than one word of a command line may hold
    same, other = (runs.changed({str(path): text.replace(LOG, new)}) for new in (SAME, OTHER))
    assert same.losses == pytest.approx(before.losses, rel=1e-4)
    assert other.losses[0] == pytest.approx(before.losses[0] / 2, rel=1e-4)


@slow
@slow
def test_each_run_after_the_first_says_how_long_the_one_before_it_took(script, runs_of):
    said = []
    runs = runs_of(script())
    runs._say = said.append
    runs.nudged(0.0)
    runs.in_part([])
    assert [text.partition("not shown")[2][:24] for text in said] == ["", "; the run before it took"]


@slow
def test_a_script_that_raises_ends_with_nan(script, runs_of):
    found = runs_of(script(step="optimizer.step(); assert step < 2")).changed({})
    assert math.isnan(found.losses[-1])
    assert len(found.losses) == 4
    assert found.unsound == "FP32 itself fails"


def test_ctrl_c_ends_the_run_and_not_the_answer(script, runs_of, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(QuietRuns, "run", stop)
    runs = runs_of(script())
    assert runs.nudged(0.0) == "it was stopped by Ctrl-C"
    assert runs.changed({}).unsound == "it was stopped by Ctrl-C"
    runs._is_last = False
    with pytest.raises(KeyboardInterrupt):
        runs.with_changes({"train.py": ""}).nudged(0.0)


@slow
def test_a_script_that_makes_no_step_is_no_reference(script, runs_of):
    assert runs_of(script(step="pass")).changed({}).unsound == "no optimizer of torch makes a step in FP32"


@slow
@pytest.mark.parametrize(("new", "holds"), [(SAME, True), (OTHER, False)])
def test_a_change_of_a_script_that_moves_fp32_is_refused(script, monkeypatch, new, holds):
    path, known = script(steps=40), floatline.fixes.find_fixes

    def offer(finding, **options):
        first = next(iter(known(finding, **options)))
        return [replace(first, after=path.read_text().replace(LOG, new))]

    monkeypatch.setattr(floatline.fixes, "find_fixes", offer)
    found = diagnose_script([sys.executable, "train.py"], tries_fixes=True)
    assert found.primary.cause.id == "rounded-onto-singularity", json.dumps(found.as_json())
    assert bool(found.fixes) == holds
    refused = f"loss = {new}[:, 0].mean() changes what FP32 computes."
    said = "With this change the script is healthy" if holds else refused
    assert found.primary.tried.startswith(said), found.primary.tried
    assert "not compared" not in found.primary.tried


LOUD = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
for step in range(60):
    x = torch.randn(64, 8)
    out = model(x).half()
    loss = ((out - 3) * 300).square().mean() / 9e4
    optimizer.zero_grad()
    loss.float().backward()
    optimizer.step()
"""
SCALED = "((out - 3) * 300).square().mean() / 9e4"


@slow
@pytest.mark.parametrize(
    ("new", "refused"),
    [
        ("(out.float() - 3).square().mean()", ""),
        ("(out.float() - (2 if out.dtype is torch.half else 3)).square().mean()", "and in FP32, from the same seed, "),
    ],
)
def test_a_change_after_which_16_bits_are_finite_and_apart_from_fp32_is_refused(tmp_path, monkeypatch, new, refused):
    path, known = tmp_path / "train.py", floatline.fixes.find_fixes
    monkeypatch.chdir(tmp_path)
    path.write_text(LOUD, encoding="utf-8")

    def offer(finding, **options):
        first = next(iter(known(finding, **options)))
        return [replace(first, after=LOUD.replace(SCALED, new))]

    monkeypatch.setattr(floatline.fixes, "find_fixes", offer)
    found = diagnose_script([sys.executable, "train.py"], tries_fixes=True)
    assert found.primary is not None and found.fails_in_fp32 is False, json.dumps(found.as_json())
    assert bool(found.fixes) != bool(refused), found.primary.tried
    assert refused in found.primary.tried
