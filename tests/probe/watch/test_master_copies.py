"""FP32 master copies that a loop keeps by itself: known as copies, and what is forgotten about them is named."""

import pytest
import torch
from tests.diagnosis.scripts.test_scripts import observe
from torch import nn

from floatline.probe.watch.watch import watch

LOOP = """
import math
import torch
from torch import nn
torch.manual_seed(0)
dtype = getattr(torch, DTYPE)
net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2)).to(dtype)
weights = list(net.parameters())
if FLAT:
    copies = [torch.cat([p.detach().float().flatten() for p in weights]).requires_grad_()]
else:
    copies = [p.detach().float().clone().requires_grad_() for p in weights]
opt = torch.optim.SGD(copies, lr=RATE)
scale = SCALE
for step in range(STEPS):
    x = torch.randn(16, 6)
    net.zero_grad()
    loss = (net(x.to(dtype)).float() - x[:, :2]).square().mean()
    (loss * scale).backward()
    if FLAT:
        copies[0].grad = torch.cat([p.grad.float().flatten() for p in weights])
    else:
        for copy, p in zip(copies, weights):
            copy.grad = p.grad.float()
    if UNSCALE:
        for copy in copies:
            copy.grad.div_(scale)
    if not all(copy.grad.isfinite().all() for copy in copies):
        scale = scale / 2 if SEARCH else scale
        continue
    opt.step()
    if COPY_BACK:
        with torch.no_grad():
            if FLAT:
                offset = 0
                for p in weights:
                    p.copy_(copies[0][offset : offset + p.numel()].view_as(p))
                    offset += p.numel()
            else:
                for copy, p in zip(copies, weights):
                    p.copy_(copy)
"""
GIVEN = {
    "DTYPE": "float16",
    "FLAT": False,
    "SCALE": 256.0,
    "RATE": 0.1,
    "STEPS": 40,
    "UNSCALE": True,
    "SEARCH": False,
    "COPY_BACK": True,
}


def observe_loop(folder, **given):
    script = folder / "train.py"
    values = GIVEN | given
    script.write_text("".join(f"{name} = {value!r}\n" for name, value in values.items()) + LOOP, encoding="utf-8")
    return observe(str(script))


def causes_of(answer):
    return [finding["cause"] for finding in answer["findings"]]


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize(("dtype", "scale"), [("float16", 256.0), ("bfloat16", 1.0), ("float32", 1.0)])
def test_a_loop_with_master_copies_is_left_in_peace(tmp_path, dtype, scale, flat):
    answer = observe_loop(tmp_path, DTYPE=dtype, SCALE=scale, FLAT=flat)
    assert (answer["findings"], answer["unexplained"], answer["unseen"]) == ([], "", "")
    assert answer["num_steps"] == 40
    assert "4 of 40 steps recorded (step 0, 2, 9, 36)" in answer["notes"][0]


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_copies_that_are_never_copied_back_are_named(tmp_path, flat):
    answer = observe_loop(tmp_path, COPY_BACK=False, FLAT=flat)
    assert causes_of(answer)[:1] == ["params-not-trained"], answer


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("copy_back", [True, False])
def test_copies_that_stand_still_are_not_said_to_be_in_no_optimizer(tmp_path, copy_back, flat):
    answer = observe_loop(tmp_path, RATE=0.0, COPY_BACK=copy_back, FLAT=flat)
    assert "params-not-trained" not in causes_of(answer), answer


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_gradients_of_the_copies_that_keep_the_scale_are_named(tmp_path, flat):
    answer = observe_loop(tmp_path, UNSCALE=False, RATE=0.1 / 256, FLAT=flat)
    assert causes_of(answer)[:1] == ["scaler-misuse"], answer


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_a_scale_at_which_every_step_is_left_out_is_named(tmp_path, flat):
    answer = observe_loop(tmp_path, SCALE=2.0**24, FLAT=flat)
    assert causes_of(answer)[:1] == ["gradient-overflow"], answer
    assert "2 of 40 steps recorded (step 8, 18)" in answer["notes"][0]  # each of them ended where the next began


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_a_loop_that_searches_its_scale_and_then_trains_is_left_in_peace(tmp_path, flat):
    answer = observe_loop(tmp_path, SCALE=2.0**24, SEARCH=True, FLAT=flat)
    assert (answer["findings"], answer["unexplained"], answer["unseen"]) == ([], "", "")
    assert any("left out" in note for note in answer["notes"])  # there was a search


def train_with_copies(*, flat, back=True, noise=0.0):
    """A short loop with copies; gives the model and the copies."""
    torch.manual_seed(0)
    net = nn.Linear(6, 2).bfloat16()
    weights = list(net.parameters())
    parts = [p.detach().float().flatten() for p in weights]
    copies = [nn.Parameter(part.clone()) for part in ([torch.cat(parts)] if flat else parts)]
    opt = torch.optim.SGD(copies, lr=0.1)
    for _ in range(4):
        net.zero_grad()
        net(torch.randn(16, 6).bfloat16()).square().mean().backward()
        gradients = [p.grad.float().flatten() for p in weights]
        for copy, gradient in zip(copies, [torch.cat(gradients)] if flat else gradients, strict=True):
            copy.grad = gradient
        opt.step()
        if back:
            values = torch.cat([copy.detach() for copy in copies]) + noise
            for p, value in zip(weights, values.split([p.numel() for p in weights]), strict=True):
                p.data.copy_(value.view_as(p))
    return net, copies


@pytest.mark.parametrize("light", [True, False], ids=["light", "full"])
def test_a_copy_is_known_by_its_values_and_by_what_moved(light):
    with watch(light=light) as seen:
        net, copies = train_with_copies(flat=False)
    assert {key: [id(p) for p in parts] for key, parts in seen.weights.masters.items()} == {
        id(copy): [id(p)] for copy, p in zip(copies, net.parameters(), strict=True)
    }


def test_a_flat_copy_holds_all_weights_in_their_order():
    with watch(light=True) as seen:
        net, (flat,) = train_with_copies(flat=True)
    assert [id(p) for p in seen.weights.masters[id(flat)]] == [id(p) for p in net.parameters()]


@pytest.mark.parametrize("given", [{"back": False}, {"noise": 0.5}], ids=["not_back", "other_values"])
@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_what_is_not_copied_back_is_no_copy(flat, given):
    with watch(light=True) as seen:
        train_with_copies(flat=flat, **given)
    assert seen.weights.masters == {}
