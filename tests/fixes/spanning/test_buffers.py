"""Buffers that keep their dtype when the model is cast."""

import pytest
import torch
from tests.fixes.sources import spans

SCHEDULE = """

class Schedule(torch.nn.Module):
    # tables first
    def __init__(self, n=8):
        super().__init__()
        self.register_buffer("steps", torch.arange(n))
        self.register_buffer("tail", torch.logspace(0, -9, n), persistent=False)

    def forward(self, x, t):
        row = self.tail[t]
        scale = row.sqrt()
        return x / scale  # here
"""


def make(text):
    values = {}
    exec(text, values)
    return values["Schedule"]()


def test_a_buffer_keeps_what_16_bits_would_round_to_0(tmp_path):
    found = spans(tmp_path, "rounded-onto-singularity", SCHEDULE, op="aten.div")
    assert [kind for kind in found if not kind.startswith("fp32-")][-1] == "buffer-keeps-dtype"
    old, new = make("import torch\n" + SCHEDULE).half(), make(found["buffer-keeps-dtype"]).half()
    x = torch.ones(1, dtype=torch.float16)
    assert old(x, 7).isinf()
    assert new(x, 7).isfinite()
    assert new.tail.dtype is torch.float32
    assert new.steps.dtype is torch.int64


def test_the_buffer_moves_and_is_stored_as_before(tmp_path):
    text = SCHEDULE.replace(", persistent=False", "")
    new = make(spans(tmp_path, "rounded-onto-singularity", text, op="aten.div")["buffer-keeps-dtype"])
    new.load_state_dict(make("import torch\n" + text).state_dict())
    assert torch.nn.Sequential(new).to("meta")[0].tail.is_meta
    assert new.to_empty(device="cpu").tail.device.type == "cpu"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def forward", "def _apply(self, fn):\n        return self\n\n    def forward"),
        ("row = self.tail[t]", "row = t"),  # not used here
        ("        super().__init__()\n", "        super().__init__()\n        self.tail = None\n"),
        ('"tail", torch.logspace(0, -9, n)', '"tail", None'),
        ('"tail", torch', '"tail" + str(n), torch'),
    ],
)
def test_a_buffer_that_is_not_plain_stays(tmp_path, old, new):
    assert old in SCHEDULE
    text = SCHEDULE.replace(old, new)
    assert "buffer-keeps-dtype" not in spans(tmp_path, "rounded-onto-singularity", text, op="aten.div")
