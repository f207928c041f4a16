"""The kernels compile for real GPUs, without one: Triton needs only the name of the target."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.slow import slow

pytest.importorskip("triton", reason="triton is not installed")

SCRIPT = """
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from floatline.optim.kernels.triton_kernels import step_kernel

update, states, dtype, capability = sys.argv[1:]
constants = dict(
    BLOCK=256, PIECE=256 if states == "int8" else 32, RULE="adamw",
    DECIDED=True, UPDATE=update, STATES=states, MOMENTUM=False, NESTEROV=False,
    WEIGHT_TYPE=getattr(tl, dtype), GRAD_TYPE=getattr(tl, dtype), WHOLE=True,
)
pointers = dict(table="*i64", tensors="*i32", offsets="*i64", derived="*fp32", applied="*i1", seed="i64",
                num_tensors="i32")
signature = {name: pointers.get(name, "constexpr") for name in step_kernel.arg_names}
places = {(step_kernel.arg_names.index(name),): value for name, value in constants.items()}
source = ASTSource(fn=step_kernel, signature=signature, constexprs=places)
options = {"num_warps": 1, "enable_fp_fusion": False}
compiled = triton.compile(source, target=GPUTarget("cuda", int(capability), 32), options=options)
print(len(compiled.asm["cubin"]))
"""


def compile_step(*arguments: str, cache: Path) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(cache)  # not the user's: every run compiles, and nothing is left behind
    script = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.run(script, capture_output=True, text=True, timeout=600, env=env)


@slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("exact", "fp32", "float16", "75"),
        pytest.param(("exact", "fp32", "bfloat16", "90"), marks=slow),
        pytest.param(("stochastic", "bf16", "bfloat16", "80"), marks=slow),
        pytest.param(("kahan", "int8", "float16", "90"), marks=slow),
    ],
    ids=" ".join,
)
def test_the_step_compiles_for_the_gpu(arguments, tmp_path):
    run = compile_step(*arguments, cache=tmp_path)
    assert run.returncode == 0, run.stderr[-2000:]
    assert int(run.stdout) > 1000


@slow
def test_a_kernel_that_does_not_compile_would_be_found(tmp_path):
    assert compile_step("exact", "fp32", "float64", "90", cache=tmp_path).returncode != 0
