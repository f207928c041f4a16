"""Traces: saved as columns, read back the same, without torch."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.probe.trace.recorded_steps import trace_of
from tests.probe.trace.test_recorder import STEPS

from floatline.errors import TraceError
from floatline.probe.trace.trace import Op, Trace, Values


@pytest.fixture
def trace():
    trace = trace_of(*STEPS["mask"], precision="fp16-mixed", optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))
    trace.meta |= {"precision": "fp16-mixed", "scale": 256.0, "step": 3}
    return trace


def test_a_trace_reads_back_as_it_was(trace, tmp_path):
    trace.save(tmp_path / "step.npz")
    again = Trace.load(tmp_path / "step.npz")
    assert again == trace
    assert len(again.ops) > 20
    assert again.gradients


def test_a_trace_that_differs_is_not_equal(trace, tmp_path):
    trace.save(tmp_path / "step.npz")
    again = Trace.load(tmp_path / "step.npz")
    again.ops[0].inputs[0].value.largest += 1
    assert again != trace


def test_a_value_that_two_operations_share_is_shared_again(trace, tmp_path):
    trace.save(tmp_path / "step.npz")
    ops = Trace.load(tmp_path / "step.npz").ops
    shared = [o for op in ops for o in op.inputs if o.made_by is not None and o.value in ops[o.made_by].outputs]
    assert shared
    assert any(o.value is v for o in shared for v in ops[o.made_by].outputs)


def test_an_empty_trace_and_one_without_figures_read_back(tmp_path):
    for i, trace in enumerate((Trace(), Trace([Op(0, "aten.add", "outside", outputs=[Values("float32", (), 1)])]))):
        trace.save(tmp_path / f"{i}.npz")
        assert Trace.load(tmp_path / f"{i}.npz") == trace


def test_loading_does_not_need_torch(trace, tmp_path):
    trace.save(tmp_path / "step.npz")
    code = (
        "import sys; from floatline.probe.trace.trace import Trace; "
        f"print(len(Trace.load({str(tmp_path / 'step.npz')!r}).ops), 'torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == [str(len(trace.ops)), "False"]


def test_what_is_not_a_trace_is_refused_in_one_line(tmp_path):
    (tmp_path / "text.npz").write_text("no trace")
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    np.savez(tmp_path / "pickle.npz", json=np.array([{"schema": 1}], dtype=object))
    for name, word in (
        ("text", "not a trace"),
        ("other", "not a trace"),
        ("pickle", "not a trace"),
        ("none", "no trace"),
    ):
        with pytest.raises(TraceError, match=word) as caught:
            Trace.load(tmp_path / f"{name}.npz")
        assert "\n" not in str(caught.value)


def test_a_newer_schema_is_refused(tmp_path):
    note = np.frombuffer(json.dumps({"schema": 99}).encode(), dtype=np.uint8)
    np.savez(tmp_path / "new.npz", json=note)
    with pytest.raises(TraceError, match="schema 99"):
        Trace.load(tmp_path / "new.npz")
