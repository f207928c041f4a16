"""Set before any test is imported: without a GPU, Triton's kernels run in its interpreter."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
