"""A guard around a captured forward and backward pass: CUDA graphs replay the closure, the decision stays outside."""

import math

import pytest
import torch
import torch.nn.functional as F

import floatline as fl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_a_captured_model_is_guarded():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 2)).cuda()
    data = [(torch.randn(4, 8, device="cuda"), torch.randn(4, 2, device="cuda")) for _ in range(6)]
    with torch.autocast("cuda", dtype=torch.float16, cache_enabled=False):
        captured = torch.cuda.make_graphed_callables(model, (data[0][0],))
    guard = fl.Guard(model, fl.optim.AdamW(model.parameters(), lr=1e-2), plan="fp16-mixed")
    outcomes = []
    for i, (x, y) in enumerate(data):
        bad = math.nan if i == 3 else 1.0
        outcomes.append(guard.step(lambda b: F.mse_loss(captured(b[0]).float(), b[1]), (x * bad, y)))
    assert [outcome.reason for outcome in outcomes] == [None, None, None, "forward-nonfinite", None, None]
    assert all(param.isfinite().all() for param in model.parameters())
