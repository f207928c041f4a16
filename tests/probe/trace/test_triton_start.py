"""Triton hashes its sources once, on a thread that is waited for before the first launch."""

import sys
import threading
import types

import pytest
import torch
from torch import nn

from floatline.probe.scripts.setup import SetupRecorder
from floatline.probe.trace.triton_start import await_triton, begin_triton


@pytest.fixture
def hashing(monkeypatch):
    """A Triton whose hashing takes until it is let go; gives that, and the threads that it ran on."""
    state = types.SimpleNamespace(go=threading.Event(), ran=[], done=[])

    def hash_sources():
        state.ran.append(threading.current_thread())
        state.go.wait(60)
        state.done.append(True)

    monkeypatch.setitem(sys.modules, "triton.runtime.cache", types.SimpleNamespace(triton_key=hash_sources))
    begin_triton.cache_clear()
    yield state
    state.go.set()
    await_triton()
    begin_triton.cache_clear()


def test_it_runs_once_beside_the_thread_that_asks_and_is_waited_for(hashing):
    assert begin_triton() is begin_triton()
    assert hashing.done == []
    hashing.go.set()
    await_triton()
    assert (len(hashing.ran), hashing.done) == (1, [True])
    assert hashing.ran[0] is not threading.current_thread()


def test_waiting_begins_it_where_nobody_has(hashing):
    hashing.go.set()
    await_triton()
    assert hashing.done == [True]


@pytest.mark.parametrize("module", [None, types.SimpleNamespace()])
def test_without_triton_or_with_one_that_hashes_elsewhere_nothing_is_begun(hashing, monkeypatch, module):
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", module)
    assert begin_triton() is None
    await_triton()
    assert hashing.ran == []


@pytest.mark.parametrize(("device", "begun"), [
    ("cpu", 0),
    ("meta", 0),
    pytest.param("cuda", 1, marks=[
        pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ]),
])  # fmt: skip
def test_a_script_begins_it_with_what_it_first_makes_on_a_gpu(monkeypatch, device, begun):
    asked = []
    monkeypatch.setattr("floatline.probe.scripts.setup.begin_triton", lambda: asked.append(True))
    with SetupRecorder():
        nn.Linear(2, 2).to(device)
        torch.ones(2, device=device)
    assert len(asked) == begun
