"""Marks of tests that need something of torch which not every torch has."""

import pytest
import torch
import torch.distributed as dist

from floatline.probe.trace.kernel_checks import is_measured

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo backend"
)
needs_fsdp2 = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="FSDP2 does not run on the CPU in torch 2.6"
)
judges_kernels = pytest.mark.skipif(
    not is_measured(torch.device("cpu")), reason="kernels are judged where their bounds were measured, not on this CPU"
)
