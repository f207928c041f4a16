"""`floatline doctor`: what it says about machines, plans and targets, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.preloaded import COMMAND, run_preloaded
from torch import nn
from typer.testing import CliRunner

from floatline.checkup import Checkup, examine
from floatline.checkup.model_checks import find_vanishing_eps
from floatline.cli.main import app
from floatline.plans import KeptModule, Plan
from floatline.plans.presets import PLANS
from floatline.workload import Target, Workload

TARGET = """
import torch
from torch import nn

print("a target may print")

def build(seed=0):
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)){cast}
    batches = [((torch.randn(8, 16),), (torch.randn(8, 8),))]
    return model, batches, nn.functional.mse_loss, "fp16-mixed", lambda m: torch.optim.SGD(m.parameters(), lr=0.1)
"""


def write(folder: Path, *, cast: str = "") -> str:
    path = folder / "target.py"
    path.write_text(TARGET.format(cast=cast))
    return str(path)


def target_of(model: nn.Module, *inputs: Any, precision: str = "fp16-mixed", make: Any = torch.optim.SGD) -> Target:
    def build() -> Workload:
        return Workload(
            model=model,
            batches=[(inputs, ())],
            loss_fn=lambda out: out.float().sum(),
            precision=precision,
            make_optimizer=lambda m: make(m.parameters()),
        )

    return Target("here", build, None, Path.cwd())


def run(*words: str, prelude: str = "") -> subprocess.CompletedProcess[str]:
    if prelude:  # it changes what can be loaded
        code = prelude + COMMAND
        return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    return run_preloaded(["-c", COMMAND, *words])


def notes(checkup: Checkup, topic: str) -> str:
    return " ".join(note.text for note in checkup.notes if note.topic == topic)


def causes(checkup: Checkup) -> list[str]:
    return [finding.cause.id for finding in checkup.findings]


# --- machines and plans ---


def test_this_machine_is_described_and_a_plan_chosen():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    for part in ("floatline", f"torch {torch.__version__}", "cpu", "fp16", "bf16", "Use"):
        assert part in result.stdout


def test_another_machine_is_answered_for():
    result = CliRunner().invoke(app, ["doctor", "--on", "titan rtx"])
    assert "sm_75  NVIDIA Turing  native  emulated" in result.stdout
    assert "fp16-mixed: NVIDIA Turing has FP16 tensor cores" in result.stdout


def test_json_has_the_promised_keys():
    result = json.loads(CliRunner().invoke(app, ["doctor", "--on", "h100", "--format", "json"]).stdout)
    assert set(result) == {"machine", "choice", "target", "plan", "findings", "notes", "memory", "holdings", "scale"}
    assert result["machine"]["hardware"]["formats"]["fp8"]["level"] == "native"
    assert result["choice"]["plan"] == "bf16-mixed"
    assert result["choice"]["settings"]["compute"] == "bf16"


def test_bf16_asked_where_it_is_emulated_is_noted():
    assert "bf16 is emulated" in notes(examine(on="t4", plan="bf16-mixed"), "speed")
    assert "bf16 is slow" in notes(examine(on="arm-fp16", plan="bf16-mixed"), "speed")
    assert not examine(on="a100", plan="bf16-mixed").notes
    assert not examine(on="t4", plan="fp32").notes


def test_answering_for_another_machine_does_not_load_torch():
    code = "import sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); "
    assert run("doctor", "--on", "t4", prelude=code).stdout.splitlines()[-1] == "False"


def test_the_check_above_can_fail():
    code = "import sys, atexit, types; sys.modules['torch'] = types.ModuleType('torch'); "
    code += "atexit.register(lambda: print('torch' in sys.modules)); "
    assert run("doctor", "--on", "t4", prelude=code).stdout.splitlines()[-1] == "True"


def test_a_machine_without_torch_is_told_how_to_install_it(tmp_path: Path):
    hidden = "import sys; sys.modules['torch'] = None; "
    done = run("doctor", prelude=hidden)
    assert done.returncode == 0
    assert "torch is not installed: pip install 'floatline[torch]'" in done.stdout
    done = run("doctor", write(tmp_path), prelude=hidden)
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs torch. Install it with: pip install 'floatline[torch]'" in done.stderr


# --- targets ---


def test_a_healthy_target_has_no_finding_and_a_memory_table(tmp_path: Path):
    done = CliRunner().invoke(app, ["doctor", write(tmp_path), "--on", "t4"])
    assert done.exit_code == 0, done.output
    assert "No finding" in done.stdout
    for part in ("weights", "master", "gradients", "states", "copies", "activations", "total"):
        assert f"\n  {part} " in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


def test_what_a_target_prints_stays_out_of_the_json(tmp_path: Path):
    done = CliRunner().invoke(app, ["doctor", write(tmp_path), "--on", "t4", "--format", "json"])
    assert json.loads(done.stdout)["memory"]["plans"]["fp32"]["weights"] == (16 * 32 + 32 + 32 * 8 + 8) * 4
    assert "a target may print" in done.stderr


def test_fp16_parameters_under_a_scaler_are_found_and_named(tmp_path: Path):
    done = run("doctor", write(tmp_path, cast=".half()"), "--on", "t4", "--format", "json")
    assert done.returncode == 1, done.stderr
    (finding,) = json.loads(done.stdout)["findings"]
    assert finding["cause"] == "fp16-params-with-scaler"
    assert finding["module"] == "0.weight"
    assert finding["seen"] == "4 of 4 trained parameters are FP16: 0.weight, 0.bias, 2.weight and 1 more"
    assert finding["remedies"]


def test_the_finding_above_is_what_torch_refuses_and_the_fix_cures_it():
    model = nn.Linear(2, 2).half()
    fix = examine(target_of(model, torch.ones(1, 2)), on="t4").findings[0].fix
    for fixed in (False, True):
        if fixed:
            exec(fix, {"model": model})
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu")
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.ones(1, 2)).sum()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if fixed:
            scaler.step(optimizer)
        else:
            with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
                scaler.step(optimizer)
    assert not examine(target_of(model, torch.ones(1, 2)), on="t4").findings


@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "fp16-true"])
def test_fp16_parameters_without_a_scaler_or_meant_to_be_are_not_found(plan: str):
    assert not causes(examine(target_of(nn.Linear(2, 2).half(), torch.ones(1, 2)), on="t4", plan=plan))


def test_frozen_fp16_parameters_are_not_found():
    model = nn.Sequential(nn.Linear(2, 2).half().requires_grad_(False), nn.Linear(2, 2))
    assert not causes(examine(target_of(model, torch.ones(1, 2)), on="t4"))


def test_an_eps_that_fp16_rounds_to_zero_is_found():
    checkup = examine(
        target_of(nn.Linear(2, 2), torch.ones(1, 2), precision="fp16-true", make=torch.optim.Adam), on="t4"
    )
    assert causes(checkup) == ["optimizer-state-underflow"]
    assert "Adam has eps=1e-08" in checkup.findings[0].seen


def test_the_finding_above_is_what_really_happens():
    model = nn.Linear(2, 2).half()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    model(torch.ones(1, 2, dtype=torch.float16)).mul(1e-5).sum().backward()  # squares below 6e-8
    optimizer.step()
    assert not model.weight.isfinite().all()


def test_an_eps_that_survives_is_not_found():
    model, true = nn.Linear(2, 2), PLANS["fp16-true"]
    adam = torch.optim.Adam
    assert find_vanishing_eps(model, adam(model.parameters()), true)
    assert not find_vanishing_eps(model, adam(model.parameters(), eps=1e-6), true)
    assert not find_vanishing_eps(model, adam(model.parameters(), fused=True), true)
    assert not find_vanishing_eps(model, adam(model.parameters()), PLANS["bf16-true"])
    assert not find_vanishing_eps(model, torch.optim.SGD(model.parameters()), true)


def test_a_forward_pass_that_names_its_cause_is_a_finding():
    class Masked(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).masked_fill(torch.ones(2, dtype=torch.bool), -1e9)

    checkup = examine(target_of(Masked(2, 2), torch.ones(1, 2)), on="t4")
    assert causes(checkup) == ["scalar-out-of-range"]
    assert "first forward pass in fp16-mixed raised RuntimeError" in checkup.findings[0].seen
    assert "Activations are not known" in notes(checkup, "memory")
    assert not causes(examine(target_of(Masked(2, 2), torch.ones(1, 2)), on="t4", plan="bf16-mixed"))


def test_a_bf16_checkpoint_in_fp16_is_held_against_the_range():
    model = nn.Linear(2, 2, bias=False).bfloat16()
    assert "All weights fit FP16's range" in notes(examine(target_of(model, torch.ones(1, 2)), on="t4"), "precision")
    with torch.no_grad():
        model.weight[0] = 1e6
    said = notes(examine(target_of(model, torch.ones(1, 2)), on="t4"), "precision")
    assert "Weights beyond FP16's 65504, which become infinite in it: 2, in weight." in said
    assert "infinite" not in notes(
        examine(target_of(model, torch.ones(1, 2)), on="a100", plan="bf16-mixed"), "precision"
    )


def test_why_memory_is_not_lower_is_answered_with_numbers():
    model = nn.Linear(100, 100, bias=False)
    said = notes(examine(target_of(model, torch.ones(1, 100), make=torch.optim.AdamW), on="t4"), "memory")
    assert "AdamW holds 8 bytes for each trained weight (80 KB)" in said
    assert "Weights, gradients and optimizer states stay in FP32 (160 KB), and autocast adds 20 KB" in said
    assert "(+13 %)" in said


def test_why_it_is_not_faster_is_answered_for_odd_and_small_sizes():
    odd = nn.Sequential(nn.Linear(64, 10, bias=False), nn.Linear(10, 64, bias=False))
    said = notes(examine(target_of(odd, torch.ones(8, 64)), on="t4"), "speed")
    assert "2 of 2 matrix products (100 % of the work)" in said
    assert "Layers of such a width: 0, 1 (100 % of the weights)" in said
    assert "5,120 multiply-adds" in said
    even = nn.Linear(512, 1024)
    assert notes(examine(target_of(even, torch.ones(64, 512)), on="t4"), "speed") == ""
    # Without tensor cores the sizes do not matter.
    assert "multiple of 8" not in notes(examine(target_of(odd, torch.ones(8, 64)), on="p100"), "speed")


def test_a_target_with_only_a_training_loop_is_told_what_it_needs(tmp_path: Path):
    (tmp_path / "loop.py").write_text("def train():\n    pass\n")
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "loop.py"), "--on", "t4"])
    assert result.exit_code == 0
    assert "only train(): add build()" in " ".join(result.stdout.split())


def test_a_plan_from_a_file_is_compared_with_the_named_ones(tmp_path: Path):
    plan = Plan(name="mine", weights="fp16", compute="fp16", fp32_modules=(KeptModule(pattern="2"),))
    plan.save(tmp_path / "mine.yaml")
    words = ["doctor", write(tmp_path), "--on", "t4", "--plan", str(tmp_path / "mine.yaml"), "--format", "json"]
    done = CliRunner().invoke(app, words)
    plans = json.loads(done.stdout)["memory"]["plans"]
    kept = 32 * 8 + 8
    assert plans["mine"]["weights"] - plans["fp16-true"]["weights"] == kept * 2


# --- bad input: one line with the value and what to do, exit code 2 ---

PLAN = "weights: fp32\ncompute: fp16\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py"], ["'nowhere.py' does not exist", "Check the path"]),
        (["--on", "sm_57"], ["Device 'sm_57' is not known", "Did you mean 'sm_75'"]),
        (["--plan", "none.yaml"], ["Plan 'none.yaml' does not exist", "Give a YAML file"]),
        (["--plan", "fp16-mixd"], ["Plan 'fp16-mixd' is not known", "'fp16-mixed'"]),
        (["--plan", "64-true"], ["'64-true' is FP64", "Use 'fp32'"]),
        (["--format", "xml"], ["--format takes text or json, not 'xml'", "Try 'floatline doctor -h'"]),
        (["--onn", "t4"], ["--onn", "Try 'floatline doctor -h'"]),
    ],
)
def test_wrong_use_ends_with_2_and_one_line(words: list[str], said: list[str]):
    check_refusal(run("doctor", *words), said)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("", ["plan.yaml' is empty", "needs at least weights and compute"]),
        (PLAN + "acumulate: 2\n", ["'acumulate' is not known", "Did you mean 'accumulate'"]),
        (PLAN + "accumulate: many\n", ["accumulate is 'many'", "a whole number, 1 or more"]),
        (PLAN.replace("fp16", "fp61"), ["'fp61' is not a known format", "Did you mean 'fp16'"]),
        (PLAN + "clip: {max_norm: 0}\n", ["clip.max_norm is 0", "a number above 0"]),
        (PLAN + "weights: !!python/name:os.system\n", ["not plain YAML"]),
    ],
)
def test_a_bad_plan_ends_with_2_and_one_line(tmp_path: Path, plan: str, said: list[str]):
    (tmp_path / "plan.yaml").write_text(plan)
    check_refusal(run("doctor", "--plan", str(tmp_path / "plan.yaml")), said)


def test_a_plan_that_names_no_module_ends_with_2_and_the_nearest_names(tmp_path: Path):
    text = "def build():\n    from torch import nn, optim, ones\n    m = nn.ModuleDict({'encoder': nn.Linear(2, 2)})\n"
    text += "    return m, [((ones(1, 2),), ())], sum, 'fp32', lambda m: optim.SGD(m.parameters())\n"
    (tmp_path / "quiet.py").write_text(text)
    (tmp_path / "plan.yaml").write_text(PLAN + "fp32_modules: [{pattern: encodr, reason: norms}]\n")
    done = run("doctor", str(tmp_path / "quiet.py"), "--plan", str(tmp_path / "plan.yaml"))
    check_refusal(done, ["keeps 'encodr' in FP32", "no such module", "Did you mean 'encoder'"])


def check_refusal(done: subprocess.CompletedProcess[str], said: list[str]) -> None:
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("floatline: ")
    for part in said:
        assert part in line
