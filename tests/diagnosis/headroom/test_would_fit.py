"""What would not fit a narrower format is named before anyone trains in it, with the bits that are missing."""

import io
import json
import math

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from floatline.diagnosis.headroom.would_fit import would_fit
from floatline.errors import FormatError
from floatline.probe.steps.capture import capture_step
from floatline.report.fit import as_json, print_fit
from floatline.workload import Workload


class Net(nn.Module):
    """Two layers; the second's outputs are raised by a gain, and its loss may be tiny."""

    def __init__(self, gain=1.0, eps=0.0):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.gain, self.eps = gain, eps

    def forward(self, x):
        hidden = self.second(F.relu(self.first(x)))
        hidden = hidden * self.gain
        if self.eps:
            hidden = hidden + self.eps
        return self.head(hidden / self.gain)


def make_step(net=None, *, factor=1.0, plan="fp32"):
    torch.manual_seed(0)
    net = net or Net()
    x = torch.randn(16, 8)
    y = x[:, :4].argmax(1)
    loss = lambda batch: F.cross_entropy(net(batch[0]).float(), batch[1]) * factor  # noqa: E731
    return capture_step(net, None, loss, (x, y), plan=plan)


def find(fit, **wanted):
    return [row for row in fit.rows if all(getattr(row, name) == value for name, value in wanted.items())]


def test_a_healthy_step_fits_and_says_how_many_bits_are_left():
    (fit,) = would_fit(make_step())
    assert fit.unfit == ()
    assert fit.rows[0].headroom > 0
    assert [row.headroom for row in fit.rows] == sorted(row.headroom for row in fit.rows)


def test_an_activation_beyond_the_format_is_first_with_its_missing_bits():
    (fit,) = would_fit(make_step(Net(gain=2.0**20)))
    worst = next(row for row in fit.unfit if row.kind == "activation")
    assert worst.op == "mul"
    assert worst.headroom == pytest.approx(math.log2(65504 / worst.largest))
    assert worst.headroom < 0
    assert worst.file.endswith("test_would_fit.py")
    (wide,) = would_fit(make_step(Net(gain=2.0**20)), formats=["bf16"])
    assert not [row for row in wide.unfit if row.kind == "activation"]


def test_the_headroom_is_that_of_the_fp32_value_not_of_what_overflowed_before_it():
    step = make_step(Net(gain=2.0**20))
    (fit,) = would_fit(step)
    head = find(fit, kind="activation", module="head")[0]
    assert 0 < head.headroom < 20  # it reads inf in FP16, and small numbers in FP32
    assert head.fits


def test_gradients_are_judged_at_the_scale_that_fits_them():
    (best,) = would_fit(make_step(factor=1e-7))
    assert best.scale > 2.0**20
    assert not [row for row in best.unfit if row.kind == "gradient"]
    (bare,) = would_fit(make_step(factor=1e-7), scale=1.0)
    assert [row for row in bare.unfit if row.kind == "gradient" and row.lost > 0.05]


def test_a_constant_that_the_format_makes_zero_is_named():
    (fit,) = would_fit(make_step(Net(eps=1e-9)))
    (row,) = find(fit, kind="constant")
    assert row.largest == 1e-9
    assert row.headroom < 0
    assert not row.fits
    assert not find(would_fit(make_step(Net(eps=1e-3)))[0], kind="constant")


def test_a_line_that_raises_in_the_format_is_named_and_the_rest_is_still_seen():
    class Masked(Net):
        def forward(self, x):
            hidden = super().forward(x)
            return hidden.masked_fill(hidden > 1e3, -1e9)

    (fit,) = would_fit(make_step(Masked(gain=2.0**20)))
    assert fit.unfit[0].kind == "refused"
    assert "overflow" in fit.unfit[0].op
    assert any(row.op == "mul" for row in fit.unfit)


def test_a_weight_beyond_the_format_is_named():
    net = Net()
    with torch.no_grad():
        net.first.weight[0, 0] = 1e6
        net.second.weight.mul_(1e-9)
    (fit,) = would_fit(make_step(net))
    rows = {row.op: row for row in fit.unfit if row.kind == "weight"}
    assert rows["first.weight"].headroom < -3
    assert rows["second.weight"].lost > 0.5
    assert "first" in {row.module for row in fit.unfit}


def test_eight_bits_are_judged_by_what_a_tensor_spans():
    e4m3, e5m2 = would_fit(make_step(), formats=["fp8_e4m3fn", "fp8_e5m2"])
    assert e4m3.scale is None
    assert {row.kind for row in e4m3.rows} == {"activation", "gradient"}
    assert min(row.headroom for row in e4m3.rows) < min(row.headroom for row in e5m2.rows)  # one exponent bit less
    wide = make_step(Net())
    wide.batches[0][0][0] *= 2.0**40  # one row drowns all others
    (fit,) = would_fit(wide, formats=["fp8_e4m3fn"])
    assert [row for row in fit.unfit if row.module == "first" and row.lost > 0.5]


def test_a_workload_is_trained_in_its_own_precision_first():
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    batches = [((x,), (x[:, :4].argmax(1),))]
    make = lambda m: torch.optim.SGD(m.parameters(), 0.1)  # noqa: E731
    (fit,) = would_fit(Workload(Net(), batches, F.cross_entropy, "fp32", make), steps=5)
    assert fit.steps == (0, 1, 2, 4)


def test_a_bf16_step_can_be_asked_too():
    (fit,) = would_fit(make_step(Net(gain=2.0**20), plan="bf16-mixed"))
    assert fit.unfit


def test_fp32_is_no_narrower_format():
    with pytest.raises(FormatError, match="as wide as FP32"):
        would_fit(make_step(), formats=["fp32"])


def test_the_report_names_the_worst_and_the_json_is_plain():
    fits = would_fit(make_step(Net(gain=2.0**20)), formats=["fp16", "bf16"])
    out = io.StringIO()
    print_fit(fits, Console(file=out, width=120))
    assert "would not fit" in out.getvalue()
    assert "activation of mul" in out.getvalue()
    found = json.loads(json.dumps(as_json("net.py", fits)))
    assert found["formats"][0]["fits"] is False
    assert found["formats"][0]["unfit"][0]["headroom"] < 0
