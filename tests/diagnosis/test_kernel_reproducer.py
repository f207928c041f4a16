"""The script about a wrong kernel shows it again, in a process of its own."""

import subprocess
import sys

import pytest
import torch
from tests.marks import judges_kernels
from tests.probe.trace.test_wrong_kernels import PLANTS, in_fp64, record
from tests.slow import slow

from floatline.diagnosis.kernel_reproducer import write_kernel_reproducer
from floatline.probe.trace.recorder import Recorder

pytestmark = judges_kernels
KERNEL = """
import torch

@torch.library.custom_op("reproduced::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    result = 2 * x
    if x.dtype is torch.float16:
        result[-1] = 0
    return result
"""


@slow
def test_the_script_ends_with_1_for_a_kernel_that_is_wrong(tmp_path):
    (tmp_path / "kernel.py").write_text(KERNEL)
    namespace = {}
    exec(compile(KERNEL, "kernel.py", "exec"), namespace)
    with Recorder(torch.nn.Identity()) as recorder:
        namespace["double"](torch.arange(1.0, 9.0).half())
    script = write_kernel_reproducer(recorder.trace, tmp_path / "out", defined_in=str(tmp_path / "kernel.py"))
    assert script is not None
    assert len(script.read_text().splitlines()) <= 30
    shown = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stderr) == (1, "")
    assert "in 16 bits 0, in FP32 16" in shown.stdout
    fixed = KERNEL.replace("result[-1] = 0", "pass")
    (tmp_path / "kernel.py").write_text(fixed)
    assert subprocess.run([sys.executable, script], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant", ["sums in 16 bits", "stale scale", "collisions lost", "cast that rounds towards zero"]
)
def test_the_script_passes_with_torchs_own_kernel(plant, tmp_path):
    name, call, kernel = PLANTS[plant]
    script = write_kernel_reproducer(record(name, call, kernel, torch.float16), tmp_path)
    assert script is not None
    shown = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")


def test_nothing_is_written_where_no_kernel_is_wrong(tmp_path):
    name, call, _ = PLANTS["sums in 16 bits"]
    assert write_kernel_reproducer(record(name, call, in_fp64, torch.float16), tmp_path) is None
    assert list(tmp_path.iterdir()) == []
