"""Triton without a GPU runs in its interpreter, Ctrl-C is heard, and no answer depends on how busy the machine is."""

import contextlib
import importlib
import os
import signal

# Before torch is loaded, here and in every process that a test starts: tests run side by side, small tensors are faster
# on one thread, and sums are cut by the number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from tests import shared
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# Before any test is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell ignores it in what it starts in the background
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)  # else every process of the tests ignores it, too


@pytest.fixture(autouse=True, scope="session")
def time_enough():
    """A diagnosis leaves replays out where time is short; in a test it has as much as it wants."""
    module = importlib.import_module("floatline.diagnosis.target_diagnosis")  # the package has a function of that name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ENOUGH", 600.0)
        yield


@pytest.fixture(autouse=True, scope="session")
def one_folder_for_all(tmp_path_factory):
    """Processes of a test run share what takes long to compute."""
    shared.begin(tmp_path_factory)


@pytest.fixture(autouse=True)
def no_mode_left_on():
    """A recorder that a test leaves on would record all that later tests compute."""
    before = _modes()
    yield
    left = _modes()[len(before) :]
    assert not left, f"the test leaves {left} on"


def _modes():
    return [type(mode).__name__ for mode in (*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack())]
