"""Muon: torch's numbers to the last bit on matrices, AdamW's on the rest, in groups that say which."""

import copy

import pytest
import torch
from tests.optim.steps import DTYPES, HALVES, copies, make_params, masters, same_bits, set_grads, snapshot
from torch import nn

from floatline import optim
from floatline.errors import OptimizerError
from floatline.optim.kernels import matrices
from floatline.optim.survey import Decision

MATRICES = [(17, 33), (33, 17), (0, 4), (4, 0), (24, 24), (1, 5)]
SETTINGS = {
    "plain": {},
    "no nesterov": {"nesterov": False, "weight_decay": 0.0, "lr": 0.02},
    "as AdamW": {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "momentum": 0.5, "eps": 1e-3},
    "coefficients": {"ns_coefficients": (3.0, -3.2, 1.2)},
}
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch's, on a CPU without bfloat16
needs_torch_muon = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon exists from torch 2.9 on"
)


@needs_torch_muon
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_the_trained_matrices_are_those_of_torch_on_float32(settings, dtype):
    shapes = [shape for shape in MATRICES if shape != (4, 0)]  # torch divides by its columns
    params = make_params(dtype, shapes=shapes)
    wide = copies(params)
    ours, theirs = optim.Muon(params, **settings), torch.optim.Muon(wide, **settings)
    for step in range(4):
        set_grads(params, wide, step=step)
        ours.step()
        theirs.step()
    assert all(torch.equal(a, b) for a, b in zip(masters(ours), wide, strict=True))
    start = copies(make_params(dtype, shapes=shapes))
    assert min((a - b).abs().max() for a, b in zip(wide, start, strict=True) if a.numel()) > 1e-4


@needs_torch_muon
@pytest.mark.parametrize("other", [{"ns_dtype": "fp32"}, {"momentum": 0.94}, {"update": "kahan"}], ids=str)
def test_another_setting_ends_elsewhere(other):
    params = make_params(torch.bfloat16, shapes=[(17, 33)])
    wide = copies(params)
    ours, theirs = optim.Muon(params, **other), torch.optim.Muon(wide)
    for step in range(4):
        set_grads(params, wide, step=step)
        ours.step()
        theirs.step()
    assert not torch.equal(masters(ours)[0], wide[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_matrix_is_trained_by_adamw(dtype):
    params = make_params(dtype)
    wide = copies([p for p in params if p.ndim != 2])
    settings = {"lr": 3e-4, "betas": (0.8, 0.95), "weight_decay": 0.1}
    ours, theirs = optim.Muon(params, adamw=settings), torch.optim.AdamW(wide, foreach=True, **settings)
    others = ours.param_groups[1]["params"]
    for step in range(5):
        set_grads(params, step=step)
        for param, other in zip(wide, others, strict=True):
            param.grad = other.grad.float()
        ours.step()
        theirs.step()
    assert [group["algorithm"] for group in ours.param_groups] == ["muon", "adamw"]
    assert all(torch.equal(a, b) for a, b in zip(masters(ours)[len(params) - len(wide) :], wide, strict=True))


def test_a_group_chooses_adamw_for_its_matrices():
    body, embedding = make_params(torch.float32, shapes=[(6, 6), (9, 6)])
    twin = copies([embedding])
    optimizer = optim.Muon([{"params": [body]}, {"params": [embedding], "algorithm": "adamw", "lr": 5e-4}])
    reference = torch.optim.AdamW(twin, lr=5e-4, foreach=True)
    set_grads([body, embedding])
    twin[0].grad = embedding.grad.clone()
    optimizer.step()
    reference.step()
    assert torch.equal(embedding, twin[0])
    assert optimizer.state[embedding].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.state[body].keys() == {"step", "momentum_buffer"}


def test_names_and_settings_follow_their_parameters_into_the_groups():
    model = nn.Linear(3, 3)
    optimizer = optim.Muon([{"params": list(model.named_parameters()), "lr": 0.5, "note": "x"}], adamw={"lr": 0.25})
    assert [group["param_names"] for group in optimizer.param_groups] == [["weight"], ["bias"]]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    assert [group["note"] for group in optimizer.param_groups] == ["x", "x"]


def test_a_copy_and_a_later_group_keep_what_was_said_of_adamw():
    optimizer = copy.deepcopy(optim.Muon(nn.Linear(3, 3).parameters(), adamw={"lr": 0.25}))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert optimizer.param_groups[-1]["lr"] == 0.25


@pytest.mark.parametrize("ns_dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("dtype", HALVES)
def test_clip_and_scale_change_the_direction_no_more_than_the_gradient(dtype, ns_dtype):
    """Unscaled, clipped gradients give the step of gradients that came so."""
    one, two = (make_params(dtype, shapes=[(17, 33)]) for _ in range(2))
    scaled, plain = (optim.Muon(params, ns_dtype=ns_dtype) for params in (one, two))
    for step in range(3):
        set_grads(one, two, step=step)
        one[0].grad = one[0].grad * 8
        scaled.step(scale=8.0)
        plain.step()
    assert same_bits(snapshot(scaled), snapshot(plain))
    set_grads(one, step=5)
    scaled.step(clip_norm=1e-3)
    assert float(scaled.decision.norm) > 1e-3
    assert not same_bits(snapshot(scaled), snapshot(plain))


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("update", ["exact", "stochastic", "kahan"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decision_that_stays_on_the_device_is_followed_as_one_that_is_read(dtype, update, states, monkeypatch):
    """As on a GPU, where nothing is read: everything is computed, and written where the step is made."""
    read, kept = (make_params(dtype, shapes=MATRICES) for _ in range(2))
    pair = [optim.Muon(params, update=update, states=states) for params in (read, kept)]
    for step, applied in enumerate((True, False, True)):
        set_grads(read, kept, step=step)
        pair[0].step(scale=2.0, skip=not applied)
        with monkeypatch.context() as patch:
            patch.setattr(matrices, "_is_read", lambda decision: False)
            pair[1].step(scale=2.0, skip=not applied)
        assert same_bits(snapshot(pair[0]), snapshot(pair[1]))
    assert float(pair[1].state[kept[0]]["step"]) == 2


def test_the_decision_above_would_be_missed():
    params = make_params(torch.bfloat16, shapes=[(4, 4)])
    optimizer = optim.Muon(params)
    set_grads(params)
    optimizer.step()
    before = snapshot(optimizer)
    optimizer.decision = Decision(torch.tensor(True), torch.tensor(1.0), None)
    optimizer.step()
    assert not same_bits(before, snapshot(optimizer))


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
def test_strides_do_not_change_the_numbers(states):
    start = make_params(torch.bfloat16, shapes=[(33, 17)])[0].detach()
    wide = torch.zeros(33, 34, dtype=torch.bfloat16)
    wide[:, ::2] = start
    found = []
    for weight in (start.clone(), wide[:, ::2]):
        params = [nn.Parameter(weight)]
        optimizer = optim.Muon(params, states=states)
        for step in range(3):
            set_grads(params, step=step)
            optimizer.step(clip_norm=1.0)
        found.append(masters(optimizer)[0].clone())
    assert torch.equal(*found)


def test_memory_counts_one_momentum_for_a_matrix():
    params = make_params(torch.bfloat16, shapes=[(32, 32)])
    optimizer = optim.Muon(params)
    set_grads(params)
    optimizer.step()
    per = optimizer.memory().per_parameter
    assert (per["weights"], per["remainder"], per["momentum_buffer"], per["gradients"]) == (2, 2, 4, 2)


@needs_torch_muon
def test_a_checkpoint_of_torch_muon_goes_on_as_torch_would():
    wide = make_params(torch.float32, shapes=[(17, 33), (24, 24)])
    theirs = torch.optim.Muon(wide, lr=0.01)
    for step in range(3):
        set_grads(wide, step=step)
        theirs.step()
    params = copies(wide)
    ours = optim.Muon(params)
    ours.load_state_dict(theirs.state_dict())
    for step in range(3, 6):
        set_grads(params, wide, step=step)
        ours.step()
        theirs.step()
    assert all(torch.equal(a, b) for a, b in zip(params, wide, strict=True))


@needs_torch_muon
def test_torch_muon_is_converted_with_its_momentum():
    wide = make_params(torch.float32, shapes=[(17, 33)])
    theirs = torch.optim.Muon(wide, lr=0.01, ns_steps=3)
    params = copies(wide)
    source = torch.optim.Muon(params, lr=0.01, ns_steps=3)
    for step in range(4):
        set_grads(params, wide, step=step)
        if step == 2:
            source = optim.convert(source, update="exact")
            assert type(source) is optim.Muon
        source.step()
        theirs.step()
    assert torch.equal(params[0], wide[0])
    again = optim.convert(optim.Muon(nn.Linear(3, 3).parameters(), adamw={"lr": 0.25}), update="kahan")
    assert [group["lr"] for group in again.param_groups] == [1e-3, 0.25]


REFUSED = {
    "algorithm": (
        [{"params": [torch.ones(2, 2)], "algorithm": "muoon"}],
        {},
        r"'muoon' is not known\. Did you mean 'muon'",
    ),
    "a vector": (
        [{"params": [torch.ones(3)], "algorithm": "muon"}],
        {},
        r'shape \(3,\) is no matrix\. Give its group "al',
    ),
    "adamw": ([torch.ones(2, 2)], {"adamw": {"beta": 1}}, r"adamw has no setting 'beta'\. Did you mean 'betas'"),
    "adamw's lr": ([torch.ones(2)], {"adamw": {"lr": -1.0}}, r"lr is -1\.0"),
    "ns_dtype": ([torch.ones(2, 2)], {"ns_dtype": "fp8"}, r"ns_dtype 'fp8' is not known"),
    "adjust": ([torch.ones(2, 2)], {"adjust_lr_fn": "orginal"}, r"'orginal' is not known\. Did you mean 'original'"),
    "steps": ([torch.ones(2, 2)], {"ns_steps": 100}, r"ns_steps is 100\. Use a whole number from 1 to 99"),
    "coefficients": (
        [torch.ones(2, 2)],
        {"ns_coefficients": (1.0, 2.0)},
        r"ns_coefficients are \(1\.0, 2\.0\)\. Use three",
    ),
    "momentum": ([torch.ones(2, 2)], {"momentum": -0.1}, r"momentum is -0\.1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_muon_cannot_do_is_refused_in_one_line(case):
    params, settings, message = REFUSED[case]
    with pytest.raises(OptimizerError, match=message) as refused:
        optim.Muon(params, **settings)
    assert "\n" not in str(refused.value)
