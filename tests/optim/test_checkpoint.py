"""Stopping and going on changes no bit; weights and moments travel to and from other tools."""

import copy
import io

import pytest
import safetensors.torch
import torch
from tests.optim.steps import DTYPES, HALVES, copies, make_params, masters, same_bits, set_grads, snapshot
from torch import nn

from floatline import optim
from floatline.errors import OptimizerError

FORMS = [
    {"update": update, "states": states}
    for update in ("exact", "stochastic", "kahan", "nearest")
    for states in ("fp32", "bf16", "int8")
]
KINDS = {
    "adamw": optim.AdamW,
    "adam": optim.Adam,
    "sgd": lambda params, **k: optim.SGD(params, momentum=0.9, dampening=0.1, **k),
    "lion": optim.Lion,
    "muon": optim.Muon,
}


def through_a_file(state_dict):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def run(params, optimizer, steps):
    for step in steps:
        set_grads(params, step=step)
        optimizer.step(clip_norm=1.0)


def make_model(dtype, *, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)).to(dtype)


def trained(dtype, **settings):
    model = make_model(dtype)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, **settings)
    run(list(model.parameters()), optimizer, range(5))
    return model, optimizer


@pytest.mark.filterwarnings("ignore:update=.nearest")
@pytest.mark.parametrize("settings", FORMS, ids=str)
@pytest.mark.parametrize("dtype", HALVES)
def test_resuming_is_not_stopping(settings, dtype):
    params = make_params(dtype)
    whole = optim.AdamW(params, lr=1e-3, **settings)
    run(params, whole, range(4))
    saved = through_a_file(whole.state_dict())
    again = [nn.Parameter(p.detach().clone()) for p in params]
    run(params, whole, range(4, 8))

    resumed = optim.AdamW(again, lr=5.0, **settings)
    resumed.load_state_dict(saved)
    run(again, resumed, range(4, 8))
    assert same_bits(snapshot(whole), snapshot(resumed))


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_optimizer_resumes(kind, dtype, states):
    params = make_params(dtype)
    whole = KINDS[kind](params, lr=1e-3, states=states)
    run(params, whole, range(2))
    saved = copy.deepcopy(whole.state_dict())
    again = [nn.Parameter(p.detach().clone()) for p in params]
    run(params, whole, range(2, 4))
    resumed = KINDS[kind](again, lr=1e-3, states=states)
    resumed.load_state_dict(saved)
    run(again, resumed, range(2, 4))
    assert same_bits(snapshot(whole), snapshot(resumed))


def test_forgetting_the_remainder_would_be_seen():
    params = make_params(torch.bfloat16)
    whole = optim.AdamW(params, lr=1e-3)
    run(params, whole, range(4))
    saved = copy.deepcopy(whole.state_dict())
    for state in saved["state"].values():
        del state["remainder"]
    again = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = optim.AdamW(again, lr=1e-3)
    resumed.load_state_dict(saved)
    assert not same_bits(snapshot(whole), snapshot(resumed))


def test_loading_does_not_tie_the_optimizer_to_the_checkpoint():
    params = make_params(torch.float32)
    first = optim.AdamW(params, lr=1e-3)
    run(params, first, range(2))
    saved = first.state_dict()
    kept = copy.deepcopy(saved)
    again = copies(params)
    second = optim.AdamW(again, lr=1e-3)
    second.load_state_dict(saved)
    run(again, second, range(2, 4))
    assert all(torch.equal(saved["state"][0][name], kept["state"][0][name]) for name in kept["state"][0])


@pytest.mark.parametrize("dtype", HALVES)
def test_states_are_not_cast_to_the_dtype_of_the_weight(dtype):
    params = make_params(dtype)
    optimizer = optim.AdamW(params, lr=1e-3)
    run(params, optimizer, range(3))
    again = optim.AdamW([nn.Parameter(p.detach().clone()) for p in params])
    again.load_state_dict(through_a_file(optimizer.state_dict()))
    for state in again.state.values():
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == state["step"].dtype == torch.float32
        assert state["remainder"].dtype == torch.int16


def test_torch_casts_them_when_it_loads():
    wide = make_params(torch.float32)
    optimizer = torch.optim.AdamW(wide)
    run_torch(wide, optimizer, range(2))
    narrow = [nn.Parameter(p.detach().half()) for p in wide]
    again = torch.optim.AdamW(narrow)
    again.load_state_dict(optimizer.state_dict())
    assert again.state[narrow[0]]["exp_avg_sq"].dtype == torch.float16


def run_torch(params, optimizer, steps):
    for step in steps:
        set_grads(params, step=step)
        optimizer.step()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        (optim.AdamW, torch.optim.AdamW, {}),
        (optim.Adam, torch.optim.Adam, {"weight_decay": 0.1}),
        (optim.SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.2}),
    ],
)
def test_a_torch_checkpoint_goes_on_as_torch_would(ours, theirs, settings, dtype):
    # Weights that 16 bits hold, as in a run that starts from a 16-bit model.
    wide = copies(make_params(dtype))
    torch_optimizer = theirs(wide, lr=1e-4, foreach=True, **settings)
    run_torch(wide, torch_optimizer, range(5))
    with torch.no_grad():
        for param in wide:
            param.copy_(param.to(dtype))
    params = [nn.Parameter(p.detach().to(dtype)) for p in wide]
    optimizer = ours(params, lr=9.0, **settings)
    optimizer.load_state_dict(through_a_file(torch_optimizer.state_dict()))
    assert optimizer.param_groups[0]["lr"] == 1e-4
    assert "foreach" not in optimizer.param_groups[0]
    for step in range(5, 8):
        set_grads(params, wide, step=step)
        optimizer.step()
        torch_optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(masters(optimizer), wide, strict=True))


@pytest.mark.parametrize(("states", "tolerance"), [("bf16", 0.004), ("int8", 0.06)])
def test_a_torch_checkpoint_is_brought_into_smaller_states(states, tolerance):
    wide = make_params(torch.float32)
    torch_optimizer = torch.optim.AdamW(wide)
    run_torch(wide, torch_optimizer, range(3))
    params = [nn.Parameter(p.detach().half()) for p in wide]
    optimizer = optim.AdamW(params, states=states)
    optimizer.load_state_dict(torch_optimizer.state_dict())
    back = optim.AdamW([nn.Parameter(p.detach().clone()) for p in params])
    back.load_state_dict(optimizer.state_dict())
    for a, b in zip(wide, back.param_groups[0]["params"], strict=True):
        if not a.numel():
            continue
        for name in ("exp_avg", "exp_avg_sq"):
            one, two = torch_optimizer.state[a][name], back.state[b][name]
            assert two.dtype == torch.float32
            assert float((one - two).abs().max()) <= tolerance * float(one.abs().max())
    optimizer.step()  # nothing has a gradient; nothing breaks
    set_grads(params)
    optimizer.step()


def test_channels_last_states_keep_their_places():
    wide = nn.Parameter(torch.randn(4, 6, 5, 3))
    optimizer = torch.optim.AdamW([wide])
    run_torch([wide], optimizer, range(2))
    param = nn.Parameter(wide.detach().half().to(memory_format=torch.channels_last))
    for states in ("fp32", "int8"):
        again = optim.AdamW([param], states=states)
        again.load_state_dict(optimizer.state_dict())
        last = optim.AdamW([nn.Parameter(wide.detach().half())])
        last.load_state_dict(again.state_dict())
        one, two = optimizer.state[wide]["exp_avg"], last.state[last.param_groups[0]["params"][0]]["exp_avg"]
        assert torch.allclose(one, two, atol=0.02 * float(one.abs().max()))


def test_hooks_see_loading_as_in_torch():
    params = make_params(torch.float16)
    optimizer = optim.AdamW(params)
    run(params, optimizer, range(1))
    saved = optimizer.state_dict()
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(len(state["state"])))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state[params[0]]["exp_avg"].dtype))
    optimizer.load_state_dict(saved)
    assert seen == [len(params), torch.float32]
    optimizer.load_state_dict(saved)
    assert len(seen) == 4


def refused(optimizer, saved, message):
    before = snapshot(optimizer)
    with pytest.raises(OptimizerError, match=message):
        optimizer.load_state_dict(saved)
    assert same_bits(before, snapshot(optimizer))


def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing():
    params = make_params(torch.float16)
    optimizer = optim.AdamW(params)
    run(params, optimizer, range(1))

    turned = make_params(torch.float16, shapes=[(3,), (33, 17), (5, 1, 7), (0, 4), (), (1000,)])
    other = optim.AdamW(turned)
    run(turned, other, range(1))
    refused(optimizer, other.state_dict(), r"shape \(33, 17\), its weight \(17, 33\)")

    kahan = optim.AdamW([nn.Parameter(p.detach().clone()) for p in params], update="kahan")
    run(kahan.param_groups[0]["params"], kahan, range(1))
    refused(optimizer, kahan.state_dict(), r"written with update='kahan'.*this optimizer has update='exact'")

    wide = copies(params)
    amsgrad = torch.optim.AdamW(wide, amsgrad=True)
    run_torch(wide, amsgrad, range(1))
    refused(optimizer, amsgrad.state_dict(), "amsgrad=True is not supported")

    int8 = optim.AdamW([nn.Parameter(p.detach().clone()) for p in params], states="int8")
    run(int8.param_groups[0]["params"], int8, range(1))
    saved = copy.deepcopy(int8.state_dict())
    saved["state"][1]["exp_avg_scale"] = saved["state"][1]["exp_avg_scale"][:-1]
    refused(optimizer, saved, "2 scales for 561 codes")


@pytest.mark.parametrize("update", ["exact", "stochastic", "kahan"])
@pytest.mark.parametrize("dtype", HALVES)
def test_the_master_file_is_plain_float32_by_name(dtype, update, tmp_path):
    model, optimizer = trained(dtype, update=update)
    optimizer.save_master(model, tmp_path / "master.safetensors")
    read = safetensors.torch.load_file(tmp_path / "master.safetensors")
    master = optimizer.master_state_dict(model)
    assert list(read) and read.keys() == master.keys() == model.state_dict().keys()
    for name, tensor in read.items():
        assert torch.equal(tensor, master[name])
    params = dict(model.named_parameters())
    for (name, param), number in zip(params.items(), masters(optimizer), strict=True):
        assert master[name].dtype == torch.float32
        assert torch.equal(master[name], number)
        assert torch.allclose(param.detach().float(), number, rtol=torch.finfo(dtype).eps / 2, atol=1e-7)
    if update != "stochastic":
        assert any((master[name] != param.float()).any() for name, param in params.items())


def test_the_master_state_loads_into_a_float32_model():
    model, optimizer = trained(torch.bfloat16)
    wide = make_model(torch.float32, seed=3)
    wide.load_state_dict(optimizer.master_state_dict(model))
    assert wide[1].num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize("dtype", HALVES)
def test_loading_float32_weights_fills_weight_and_remainder(dtype, tmp_path):
    wide = make_model(torch.float32, seed=1)
    tensors = {name: tensor.clone() for name, tensor in wide.state_dict().items()}
    # float16 holds 24 bits from 2**-17 up; the weights of this model are far above.
    safetensors.torch.save_file(tensors, tmp_path / "weights.safetensors")
    model = make_model(dtype)
    optimizer = optim.AdamW(model.parameters())
    optimizer.load_master(model, tmp_path / "weights.safetensors")
    found = optimizer.master_state_dict(model)
    for name in dict(model.named_parameters()):
        assert torch.equal(found[name], tensors[name])
    assert optimizer.state[model[0].weight]["remainder"].any()


def test_loading_weights_keeps_the_moments():
    model, optimizer = trained(torch.float16)
    before = snapshot(optimizer)
    master = optimizer.master_state_dict(model)
    with torch.no_grad():
        model[0].weight.zero_()
    optimizer.load_master(model, master)
    assert same_bits(before, snapshot(optimizer))


def test_training_goes_on_after_loading_weights_before_the_first_step():
    wide = make_model(torch.float32, seed=1)
    reference = torch.optim.AdamW(wide.parameters(), lr=1e-4, foreach=True)
    model = make_model(torch.bfloat16)
    optimizer = optim.AdamW(model.parameters(), lr=1e-4)
    optimizer.load_master(model, wide.state_dict())
    for step in range(5):
        set_grads(list(model.parameters()), list(wide.parameters()), step=step)
        optimizer.step()
        reference.step()
    found = optimizer.master_state_dict(model)
    assert all(torch.equal(found[name], param) for name, param in wide.named_parameters())


def test_tied_weights_are_written_under_each_name_and_load_again(tmp_path):
    model = nn.ModuleDict({"in": nn.Embedding(7, 4), "out": nn.Linear(4, 7, bias=False)}).half()
    model["out"].weight = model["in"].weight
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    run(list(model.parameters()), optimizer, range(2))
    optimizer.save_master(model, tmp_path / "tied.safetensors")
    read = safetensors.torch.load_file(tmp_path / "tied.safetensors")
    assert torch.equal(read["in.weight"], read["out.weight"])
    before = snapshot(optimizer)
    optimizer.load_master(model, {"in.weight": read["in.weight"]})
    assert same_bits(before, snapshot(optimizer))


def tied_model():
    model = nn.ModuleDict({"in": nn.Embedding(7, 4), "out": nn.Linear(4, 7, bias=False)}).half()
    model["out"].weight = model["in"].weight
    return model, optim.AdamW(model.parameters(), lr=1e-3)


def test_two_values_for_a_tied_weight_are_refused_before_anything_changes():
    model, optimizer = tied_model()
    before = model["in"].weight.detach().clone()
    other = torch.zeros(7, 4)
    other[0, 0] = 1.0
    with pytest.raises(OptimizerError) as refused:
        optimizer.load_master(model, {"in.weight": torch.zeros(7, 4), "out.weight": other})
    assert str(refused.value) == (
        "'in.weight' and 'out.weight' are one tied weight, and their values differ in 1 of 28 elements. "
        "Give the weight under one of its names, or the same values under both."
    )
    assert torch.equal(model["in"].weight, before)


@pytest.mark.parametrize("fill", [0.5, float("nan")])
def test_one_value_under_both_names_of_a_tied_weight_is_taken(fill):
    model, optimizer = tied_model()
    both = {"in.weight": torch.full((7, 4), fill), "out.weight": torch.full((7, 4), fill)}
    optimizer.load_master(model, both)
    assert torch.equal(model["out"].weight.detach().nan_to_num(3.0), both["in.weight"].half().nan_to_num(3.0))


def stepped(kind, **options):
    params = [nn.Parameter(torch.ones(3))]
    optimizer = kind(params, lr=0.01, **options)
    for _ in range(3):
        params[0].grad = torch.ones(3)
        optimizer.step()
    return optimizer


FOREIGN = {
    "RMSprop": (lambda: stepped(torch.optim.RMSprop), "square_avg"),
    "RMSprop, centered": (lambda: stepped(torch.optim.RMSprop, centered=True), "square_avg and grad_avg"),
    "Adagrad": (lambda: stepped(torch.optim.Adagrad), "sum"),
    "SGD with momentum": (lambda: stepped(torch.optim.SGD, momentum=0.9), "momentum_buffer"),
    "Lion": (lambda: stepped(optim.Lion), "exp_avg"),
    "Lion in 8 bits": (lambda: stepped(optim.Lion, states="int8"), "exp_avg"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_the_moments_of_another_kind_of_optimizer_are_refused(name):
    make, held = FOREIGN[name]
    optimizer = stepped(optim.AdamW)
    before = snapshot(optimizer)
    with pytest.raises(OptimizerError) as refused:
        optimizer.load_state_dict(make().state_dict())
    assert str(refused.value) == (
        f"The checkpoint holds {held} for a weight, and AdamW needs exp_avg and exp_avg_sq. "
        "Load a checkpoint of AdamW, or begin without one."
    )
    assert same_bits(before, snapshot(optimizer))


def test_what_has_all_the_moments_or_none_is_taken():
    optimizer = stepped(optim.AdamW)
    optimizer.load_state_dict(stepped(torch.optim.Adam).state_dict())
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] == 3
    optimizer.load_state_dict(
        stepped(torch.optim.SGD).state_dict()
    )  # it keeps no momentum: AdamW starts without a state
    stepped(optim.SGD, momentum=0.9).load_state_dict(stepped(torch.optim.SGD, momentum=0.9).state_dict())


def test_a_group_of_sgd_without_momentum_leaves_adamw_its_moments():
    optimizer = stepped(optim.AdamW)
    optimizer.load_state_dict(stepped(torch.optim.SGD).state_dict())
    param = optimizer.param_groups[0]["params"][0]
    param.grad = torch.ones(3)
    optimizer.step()
    assert {"exp_avg", "exp_avg_sq"} <= optimizer.state[param].keys()


def test_frozen_and_float32_weights_come_along():
    model = make_model(torch.float16)
    model[2].float()
    optimizer = optim.AdamW([model[0].weight, model[2].weight], lr=1e-3)
    run([model[0].weight, model[2].weight], optimizer, range(1))
    master = optimizer.master_state_dict(model)
    assert torch.equal(master["0.bias"], model[0].bias.float())
    assert torch.equal(master["2.weight"], model[2].weight)
    assert master["2.weight"].data_ptr() != model[2].weight.data_ptr()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("0.bias"), "lack '0.bias'"),
        (lambda t: t.update({"0.wieght": t["0.weight"]}), r"no tensor '0.wieght'\. Did you mean '0.weight'"),
        (lambda t: t.update({"0.bias": torch.zeros(9)}), r"'0.bias' has shape \(9,\) and the model's \(5,\)"),
        (lambda t: t["0.bias"].fill_(1e5), r"'0.bias' holds 100000, and torch.float16 ends at 65504"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change, message):
    model, optimizer = trained(torch.float16)
    tensors = optimizer.master_state_dict(model)
    change(tensors)
    with pytest.raises(OptimizerError, match=message):
        optimizer.load_master(model, tensors)


def test_another_model_is_refused():
    _, optimizer = trained(torch.float16)
    with pytest.raises(OptimizerError, match="parameters that this model does not have"):
        optimizer.master_state_dict(make_model(torch.float16))
