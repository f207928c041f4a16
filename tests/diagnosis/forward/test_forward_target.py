"""A target with forward(seed): a change of its source is tried on the outputs before it is told."""

import json
import subprocess

import pytest
import torch
from tests.slow import slow
from typer.testing import CliRunner

from floatline.cli.main import app
from floatline.diagnosis.changed_runs import run_changed
from floatline.diagnosis.forward.forward_target import diagnose_forward

TARGET = """
import torch
from torch import nn


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        size = (x * x).sum(-1, keepdim=True).sqrt()
        return x / size * self.scale


def forward(seed):
    return Energy(), 300 * torch.randn(4, 8)
"""


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "net.py"
    path.write_text(TARGET)
    return path


@slow
def test_a_change_that_makes_the_outputs_fp32s_is_told_with_its_patch(target):
    found = diagnose_forward(str(target), searches=False, tries_fixes=True)
    assert found.primary is not None
    assert found.primary.line == 12
    assert "healthy: its outputs are 0." in found.primary.tried
    subprocess.run(["patch", "-p1"], input=found.primary.patch.encode(), check=True, cwd=target.parent)
    assert diagnose_forward(str(target), searches=False).verdict == "healthy"


@slow
def test_a_change_of_what_fp32_computes_does_not_hold(target, tmp_path):
    from safetensors.torch import save_file

    save_file({"output": torch.ones(4, 8)}, tmp_path / "kept.safetensors")
    tame = TARGET.replace("300 *", "3 *")
    job = {"target": str(target), "seed": 0, "kept": str(tmp_path / "kept.safetensors")}
    seen = run_changed("floatline.diagnosis.forward.forward_target", {str(target): tame}, **job)
    assert seen["findings"] == []
    assert "it changes what FP32 computes" in seen["unexplained"]


@slow
def test_diff_prints_the_patch_alone_and_fix_writes_it(target):
    done = CliRunner().invoke(app, ["diagnose", "--forward", str(target), "--diff"])
    assert done.exit_code == 1
    assert done.stdout.startswith("--- a/net.py")
    assert target.read_text() == TARGET
    fixed = CliRunner().invoke(app, ["diagnose", "--forward", str(target), "--fix", "--format", "json"])
    assert json.loads(fixed.stdout)["findings"][0]["patch"]
    assert target.read_text() != TARGET


EXPORTED = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.up, self.down, self.size = nn.Linear(8, 16), nn.Linear(16, 8), size

    def forward(self, x):
        y = self.size * self.up(x)
        return self.down(y * y) / self.size


def export(size):
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    return torch.export.export(Net(size).eval(), (x,)).module(), x


def forward(seed):
    return export(300.0)


def tame(seed):
    return export(1.0)
"""


@slow
def test_an_exported_program_run_eagerly_is_looked_at_as_any_model(tmp_path):
    path = tmp_path / "exported.py"
    path.write_text(EXPORTED)
    found = diagnose_forward(str(path))
    assert found.primary is not None
    assert found.primary.cause.id == "product-overflow"
    assert found.primary.op == "aten.mul"
    assert (found.primary.file, found.primary.line) == (str(path), 13)  # the line that was exported
    healthy = diagnose_forward(f"{path}:tame")
    assert healthy.verdict == "healthy"
    assert healthy.outputs[0].worst.distance < 0.01
