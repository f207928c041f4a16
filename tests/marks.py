"""Marks of tests that need something of torch which not every torch has."""

import pytest
import torch
import torch.distributed as dist

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo backend"
)
needs_fsdp2 = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="FSDP2 does not run on the CPU in torch 2.6"
)
