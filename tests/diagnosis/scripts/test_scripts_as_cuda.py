"""`floatline diagnose --as cuda -- python train.py`: scripts for a GPU, on a machine without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.preloaded import COMMAND, run_preloaded
from tests.slow import slow

from floatline.probe.runs import cuda_on_cpu

SCRIPTS = Path(__file__).parents[1] / "loops"
NOTE = "--as cuda, without a GPU: cuda is the CPU"
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


def run(*words: str, cwd: Path = SCRIPTS) -> subprocess.CompletedProcess:
    return run_preloaded(["-c", COMMAND, "diagnose", *words], cwd=cwd, timeout=300)


def answer_of(*words: str) -> tuple[subprocess.CompletedProcess, dict]:
    result = run("--format", "json", *words)
    return result, json.loads(result.stdout)


@slow
@without_gpu
def test_a_failure_of_a_script_for_a_gpu_is_named_at_its_line():
    result, answer = answer_of("--as", "cuda", "--", "written_for_cuda.py")
    assert (result.returncode, answer["precision"]) == (1, "fp16-mixed"), result.stderr
    first = answer["findings"][0]
    line = (SCRIPTS / first["file"]).read_text(encoding="utf-8").splitlines()[first["line"] - 1]
    assert (first["cause"], line.strip()) == ("product-overflow", "return self.head(h * h)")


@slow
@without_gpu
def test_it_is_said_once_at_the_start_and_once_in_the_answer():
    result, answer = answer_of("--as", "cuda", "--", "written_for_cuda.py", "--fixed")
    assert (result.returncode, answer["verdict"], answer["precision"]) == (0, "healthy", "fp16-mixed"), result.stderr
    assert [note.startswith(NOTE) for note in answer["notes"]].count(True) == 1
    assert result.stderr.splitlines()[1].startswith(f"floatline: {NOTE}")
    assert result.stderr.count(NOTE) == 1
    assert "memory 0" in result.stderr


@slow
@without_gpu
def test_without_the_option_such_a_script_fails_and_nothing_is_said_of_it():
    result = run("--", "written_for_cuda.py")
    assert result.returncode == 2
    said = ("Torch not compiled with CUDA", "NVIDIA driver", "No CUDA GPUs are available")
    assert any(words in result.stderr for words in said), result.stderr
    assert NOTE not in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--as", "mps", "--", "written_for_cuda.py"), "--as takes cuda or cpu, not 'mps'"),
        (("--as", "cuda", "written_for_cuda.py"), "--as cuda is for a script: give its command after --"),
    ],
)
def test_wrong_use_is_one_line_and_exits_with_2(words, said):
    result = run(*words)
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert said in result.stderr


def test_with_a_gpu_nothing_is_changed_and_that_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    autocast, tensor = torch.autocast.__init__, torch.ones(1)
    with cuda_on_cpu.as_cuda() as note:
        assert torch.autocast.__init__ is autocast
        assert tensor.cpu() is tensor  # inside, where something is changed, it is a copy
    assert note == "--as cuda was not needed: there is a GPU, Some GPU"


COMPILED = """
import torch
from floatline.probe.runs.cuda_on_cpu import cuda_on_cpu
with cuda_on_cpu():
    model = torch.compile(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()).cuda())
    for _ in range(3):
        with torch.autocast("cuda"):
            y = model(torch.ones(2, 4, device="cuda"))
        y.float().sum().backward()
print(y.dtype, model._orig_mod[0].weight.grad.isfinite().all().item())
"""


@slow
@without_gpu
def test_a_compiled_model_runs_without_its_compiler(tmp_path):
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=300, env=env, check=False
    )
    assert result.stdout == "torch.float16 True\n", result.stderr
