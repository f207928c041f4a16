"""Integers and truth values that 16 bits choose otherwise than FP32."""

import pytest
import torch
from torch import nn

from floatline.numerics.half_on_cpu import HalfOnCPU
from floatline.probe.trace.recorder import Recorder

CLOSE = torch.tensor([[2048.0, 2048.5, 2049.0, 2047.0], [1.0, 2.0, 3.0, 4.0]])


def last_of(calculate):
    with HalfOnCPU(), Recorder(nn.Identity()) as recorder:
        calculate()
    assert recorder.trace.meta["failures"] == {}
    return recorder.trace.ops[-1]


@pytest.mark.parametrize(
    ("choose", "share"),
    [
        (lambda x: x.argmax(1), 0.5),
        (lambda x: x.topk(1).indices, 0.5),
        (lambda x: x > 2048.5, 0.125),
        (lambda x: x.long(), 0.125),
    ],
    ids=["argmax", "topk", "greater", "to_integers"],
)
def test_the_share_of_other_choices_is_counted(choose, share):
    choices = [out for out in last_of(lambda: choose(CLOSE.half())).outputs if not out.dtype.startswith("float")]
    assert choices[0].error == pytest.approx(share)
    exact = [out for out in last_of(lambda: choose(CLOSE / 1.0)).outputs if not out.dtype.startswith("float")]
    assert exact[0].error is None  # FP32 has nothing to be held against


def test_a_list_of_another_length_is_another_choice():
    found = last_of(lambda: torch.nonzero((CLOSE.half() - 2048).relu()))  # 2049 is 2048 in half
    assert found.outputs[0].shape == (0, 2)
    assert found.outputs[0].error == 1.0
