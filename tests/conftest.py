"""Set before any test is imported: Triton without a GPU runs in its interpreter, and Ctrl-C is heard."""

import contextlib
import os
import signal

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell ignores it in what it starts in the background
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)  # else every process of the tests ignores it, too
