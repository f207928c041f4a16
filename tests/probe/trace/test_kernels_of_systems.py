"""No operation of the five reference systems is called a wrong kernel, where kernels are judged."""

import pytest
from tests.marks import judges_kernels
from tests.slow import slow

from floatline.probe.runs.runs import trace_target
from floatline.workload import load_target

pytestmark = judges_kernels
PICTURES = ["num_images=4", "batch_size=2", "image_size=64", "held_out=2", "total_steps=4"]
SYSTEMS = {"dbnet": PICTURES, "mmgcn": [], "conditioned": [], "distill": [], "audio_lora": []}


@slow
@pytest.mark.parametrize("precision", ["fp16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_no_kernel_of_a_reference_system_is_called_wrong(system, precision):
    trace = trace_target(load_target(system, pairs=SYSTEMS[system]), step=1, steps=2, precision=precision)
    assert len(trace.ops) > 100
    assert "kernels" not in trace.meta
