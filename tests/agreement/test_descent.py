"""The way down to a part: what it is run on."""

import pytest
import torch

from floatline.agreement.descent import _gradients_of
from floatline.agreement.measuring import Measured
from floatline.agreement.sides import Ran


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_part_starts_from_gradients_that_both_sides_can_hold(dtype):
    gradient = torch.randn(64)
    a = Ran(layer_gradients={"up": gradient, "up[1]": gradient, "upper": gradient})
    b = Ran(layers={"up": torch.zeros(64, dtype=dtype)})
    given = _gradients_of(Measured((), a, b, a, (a, b)), "up")
    assert given.keys() == {"output", "output[1]"}
    assert torch.equal(given["output"], gradient.to(dtype).float())
    assert torch.equal(given["output[1]"], gradient)  # B gives no such output
    assert torch.equal(given["output"], gradient) == (dtype == torch.float32)
