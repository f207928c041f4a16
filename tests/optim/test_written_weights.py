"""Weights that others write to: the next step goes on from the written value, and never makes a NaN of it."""

import copy
import warnings

import pytest
import torch
from tests.optim.steps import HALVES, masters, same_bits, snapshot
from tests.slow import mostly_slow
from torch import nn

from floatline import optim
from floatline.numerics.split import join_many, join_master, split_many
from floatline.optim import roster, storage
from floatline.optim.kernels import torch_backend
from floatline.optim.rules import SGD as PLAIN_SGD
from floatline.optim.survey import Entry

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = [pytest.mark.gpu] if ON_GPU else []
KINDS = {"AdamW": optim.AdamW, "SGD": optim.SGD, "Lion": optim.Lion, "Muon": optim.Muon}
UPDATES = ["exact", "kahan", "stochastic", "nearest"]
EXTRAS = {"exact": "remainder", "kahan": "compensation"}


def some(param, seed=5):
    """Other weights of the same shape and dtype."""
    values = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
    return values.to(param.dtype).to(param.device)


def mask_of(param):
    """Zeros and ones in turn."""
    return (torch.arange(param.numel(), device=param.device).view(param.shape) % 2).to(param.dtype)


def load_others(model):
    model.load_state_dict({name: some(value) for name, value in model.state_dict().items()})


def each(write):
    """The same write for every parameter, as most programs do it."""

    @torch.no_grad()
    def write_all(model):
        for param in model.parameters():
            write(param)

    return write_all


def set_data(param):
    param.data = some(param)


def set_elements(param):
    param.data[...] = some(param)


# torch counts these writes in the tensor's version, ...
COUNTED = {
    "zero_": each(lambda p: p.zero_()),
    "a mask": each(lambda p: p.mul_(mask_of(p))),
    "clamp_": each(lambda p: p.clamp_(min=0)),
    "nn.init.zeros_": each(nn.init.zeros_),
    "load_state_dict": load_others,
    "copy_": each(lambda p: p.copy_(some(p))),
    "neg_": each(lambda p: p.neg_()),
}
# ... and these it does not.
UNCOUNTED = {
    "data.zero_": each(lambda p: p.data.zero_()),
    "data.copy_": each(lambda p: p.data.copy_(some(p))),
    "data[...] =": each(set_elements),
    "data =": each(set_data),
    "data.mul_ with a mask": each(lambda p: p.data.mul_(mask_of(p))),
}
everything = pytest.mark.parametrize("kind", KINDS)
all_updates = pytest.mark.parametrize("update", UPDATES)
both_dtypes = pytest.mark.parametrize("dtype", HALVES, ids=str)


def make(kind="AdamW", update="exact", dtype=torch.bfloat16, *, lr=1e-3, **settings):
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(dtype).to(DEVICE)
    if kind == "SGD":
        settings = {"momentum": 0.9, **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # update="nearest" warns
        return model, KINDS[kind](model.parameters(), lr=lr, update=update, **settings)


def take_steps(model, optimizer, count, *, first=0, before=None):
    """Steps with gradients that depend on the step alone."""
    for step in range(first, first + count):
        if before is not None:
            before(model)
        for i, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * step + i)
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype).to(param.device)
        optimizer.step()


def forget(optimizer):
    """Put zeros beside every weight, as beside a weight that is new."""
    for state in optimizer.state.values():
        for name in EXTRAS.values():
            if name in state:
                state[name].zero_()


def trained(kind, update, dtype, write):
    """An optimizer whose weights were written after 3 steps, and one that knows only what was written."""
    model, optimizer = make(kind, update, dtype)
    take_steps(model, optimizer, 3)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    write(model)
    write(twin)
    forget(twin_optimizer)
    return (model, optimizer), (twin, twin_optimizer)


def spacing(weight):
    """The distance to the neighbour away from zero, in float64."""
    magnitude = weight.detach().abs()
    above = (magnitude.view(torch.int16) + 1).view(weight.dtype)
    return above.double() - magnitude.double()


def finite(model):
    return all(bool(param.isfinite().all()) for param in model.parameters())


@pytest.mark.parametrize("way", COUNTED)
@all_updates
@both_dtypes
@everything
def test_a_counted_write_continues_bit_for_bit_from_the_written_weight(kind, dtype, update, way):
    ours, twin = trained(kind, update, dtype, COUNTED[way])
    for model, optimizer in (ours, twin):
        take_steps(model, optimizer, 5, first=3)
    assert finite(ours[0])
    assert same_bits(snapshot(ours[1]), snapshot(twin[1]))


@pytest.mark.parametrize("update", EXTRAS)
def test_that_comparison_of_bits_can_fail(update):
    ours, twin = trained("AdamW", update, torch.bfloat16, UNCOUNTED["data.copy_"])
    for model, optimizer in (ours, twin):
        take_steps(model, optimizer, 5, first=3)
    assert not same_bits(snapshot(ours[1]), snapshot(twin[1]))


@pytest.mark.parametrize("way", UNCOUNTED)
@all_updates
@both_dtypes
@everything
def test_an_uncounted_write_is_off_by_half_a_spacing_at_most(kind, dtype, update, way):
    ours, twin = trained(kind, update, dtype, UNCOUNTED[way])
    gaps = [spacing(param) for param in ours[0].parameters()]
    for model, optimizer in (ours, twin):
        take_steps(model, optimizer, 1, first=3)
    for mine, theirs, gap in zip(masters(ours[1]), masters(twin[1]), gaps, strict=True):
        assert mine.isfinite().all()
        # The last bits of both sums are rounded to float32, or to what kahan keeps.
        rounding = 2 * theirs.double().abs() * (2.0**-23 if update != "kahan" else 2.0**-15)
        assert ((mine.double() - theirs.double()).abs() <= gap / 2 + rounding + 1e-40).all()
    if update not in EXTRAS:
        assert same_bits(snapshot(ours[1]), snapshot(twin[1]))
    take_steps(*ours, 5, first=4, before=UNCOUNTED[way])
    assert finite(ours[0])


@pytest.mark.parametrize("way", COUNTED | UNCOUNTED)
@all_updates
@both_dtypes
@everything
def test_a_write_before_every_step_never_makes_a_nan(kind, dtype, update, way):
    model, optimizer = make(kind, update, dtype)
    take_steps(model, optimizer, 2)
    take_steps(model, optimizer, 5, first=2, before=(COUNTED | UNCOUNTED)[way])
    assert finite(model)
    assert all(master.isfinite().all() for master in masters(optimizer))


def test_the_bits_of_zero_and_a_negative_remainder_would_be_a_nan():
    weight, remainder = torch.zeros(1, dtype=torch.bfloat16), torch.tensor([-1], dtype=torch.int16)
    assert plain_join(weight, remainder).isnan().all()
    assert not is_bounded(plain_join(weight, remainder), weight).any()


@pytest.mark.parametrize("value", [0.0, -0.0])
@pytest.mark.parametrize("update", UPDATES)
@both_dtypes
def test_zeros_of_both_signs_are_continued_from(dtype, update, value):
    ours, twin = trained("SGD", update, dtype, each(lambda p: p.fill_(value)))
    for model, optimizer in (ours, twin):
        take_steps(model, optimizer, 2, first=3)
    assert same_bits(snapshot(ours[1]), snapshot(twin[1]))


def test_a_write_in_inference_mode_counts():
    def write(model):
        with torch.inference_mode():
            for param in model.parameters():
                param.zero_()

    ours, twin = trained("AdamW", "exact", torch.bfloat16, write)
    for model, optimizer in (ours, twin):
        take_steps(model, optimizer, 2, first=3)
    assert same_bits(snapshot(ours[1]), snapshot(twin[1]))


def test_weights_of_inference_mode_have_no_version_and_are_stepped_all_the_same():
    with torch.inference_mode():
        model, optimizer = make()
        take_steps(model, optimizer, 2)
        with pytest.raises(RuntimeError, match="version"):
            _ = model.weight._version
    expected, reference = make()
    take_steps(expected, reference, 2)
    assert torch.equal(model.weight, expected.weight)


# Writes of a few elements before every step: pruning.


@pytest.mark.parametrize("update", EXTRAS)
@both_dtypes
@everything
def test_under_a_mask_the_other_weights_keep_every_bit(kind, dtype, update):
    model, optimizer = make(kind, update, dtype)
    twin, reference = make(kind, update, dtype)
    mask = COUNTED["a mask"]
    take_steps(model, optimizer, 3, before=mask)  # the third step finds them written twice in a row
    twin.load_state_dict(model.state_dict())
    reference.load_state_dict(optimizer.state_dict())
    take_steps(model, optimizer, 20, first=3, before=mask)
    take_steps(twin, reference, 20, first=3)
    for mine, theirs in zip(masters(optimizer), masters(reference), strict=True):
        kept = mask_of(mine) == 1
        assert torch.equal(mine[kept], theirs[kept])
        assert not torch.equal(mine[~kept], theirs[~kept])


def small_updates(update, before):
    """A weight of 1 after 1,000 updates of 0.00001, of which each is far below bfloat16's spacing."""
    model, optimizer = make("SGD", update, lr=1e-5, momentum=0.0)
    with torch.no_grad():
        model.weight.fill_(1.0)
    for _ in range(1000):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        before(model)
    return masters(optimizer)[0] if update != "nearest" else model.weight.detach().float()


def test_under_a_mask_small_updates_add_up():
    left = small_updates("exact", lambda model: COUNTED["a mask"](nn.ModuleList([model])))
    kept = mask_of(left) == 1
    assert ((left[kept] - 0.99).abs() < 0.004).all()  # the first two steps may round


def test_with_nearest_rounding_they_are_lost():
    left = small_updates("nearest", COUNTED["a mask"])
    assert (left[mask_of(left) == 1] == 1.0).all()


def test_the_copies_of_masked_weights_are_counted_and_let_go():
    model, optimizer = make()
    take_steps(model, optimizer, 2)
    before = optimizer.memory().total
    take_steps(model, optimizer, 2, first=2, before=COUNTED["a mask"])
    parts = optimizer.memory().parts
    assert parts["copies"] == parts["weights"]
    take_steps(model, optimizer, 1, first=4)
    assert optimizer.memory().total == before


def test_a_single_write_takes_no_copies():
    model, optimizer = make()
    take_steps(model, optimizer, 2)
    COUNTED["copy_"](model)
    take_steps(model, optimizer, 1, first=2)
    assert "copies" not in optimizer.memory().parts


# Weights that were idle, and rosters that are made again.


def test_a_write_to_a_weight_without_a_gradient_counts_when_it_has_one_again():
    model, optimizer = make()
    take_steps(model, optimizer, 2)
    with torch.no_grad():
        model.bias.fill_(1.0)
    for _ in range(2):
        model.weight.grad, model.bias.grad = torch.ones_like(model.weight), None
        optimizer.step()
    twin, reference = copy.deepcopy((model, optimizer))
    reference.state[twin.bias]["remainder"].zero_()
    take_steps(model, optimizer, 1, first=2)
    take_steps(twin, reference, 1, first=2)
    assert same_bits(snapshot(optimizer), snapshot(reference))


def test_a_write_counts_beside_a_new_parameter_group():
    ours, twin = trained("AdamW", "exact", torch.bfloat16, COUNTED["copy_"])
    for model, optimizer in (ours, twin):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.bfloat16, device=DEVICE))]})
        take_steps(model, optimizer, 2, first=3)
    assert same_bits(snapshot(ours[1])[:2], snapshot(twin[1])[:2])


def test_steps_alone_change_no_remainder():
    model, optimizer = make()
    twin, reference = make()
    take_steps(model, optimizer, 10)
    for step in range(10):
        take_steps(twin, reference, 1, first=step)
        twin, reference = copy.deepcopy((twin, reference))  # remembers nothing
    assert same_bits(snapshot(optimizer), snapshot(reference))


def test_a_skipped_step_after_a_write_changes_no_weight():
    model, optimizer = make()
    take_steps(model, optimizer, 2)
    COUNTED["copy_"](model)
    optimizer.step(skip=True)
    assert torch.equal(model.weight, some(model.weight))
    assert not optimizer.state[model.weight]["remainder"].any()


def test_nothing_becomes_zero_while_a_cuda_graph_is_captured(monkeypatch):
    """Zeros would be written in every replay; the step is that of an uncounted write."""
    model, optimizer = make()
    take_steps(model, optimizer, 3)
    twin, reference = copy.deepcopy((model, optimizer))
    COUNTED["copy_"](model)
    UNCOUNTED["data.copy_"](twin)
    monkeypatch.setattr(roster, "_is_capturing", lambda tensors: True)
    take_steps(model, optimizer, 2, first=3)
    take_steps(twin, reference, 2, first=3)
    assert same_bits(snapshot(optimizer), snapshot(reference))


# Checkpoints and rollbacks: weights and remainders that are written together stay together.


def load_weights_first(model, optimizer, weights, states):
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)


def load_states_first(model, optimizer, weights, states):
    optimizer.load_state_dict(states)
    model.load_state_dict(weights)


@torch.no_grad()
def write_in_place(model, optimizer, weights, states):
    """As a guard rolls back: every tensor is copied into."""
    for i, (name, param) in enumerate(model.named_parameters()):
        param.detach().copy_(weights[name])
        for key, value in states["state"][i].items():
            optimizer.state[param][key].detach().copy_(value)


@torch.no_grad()
def write_states_in_place_first(model, optimizer, weights, states):
    for i, param in enumerate(model.parameters()):
        for key, value in states["state"][i].items():
            optimizer.state[param][key].copy_(value)
    optimizer.state_dict()  # reading in between changes nothing
    model.load_state_dict(weights)


LOADS = [load_weights_first, load_states_first, write_in_place, write_states_in_place_first]


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("update", EXTRAS)
@both_dtypes
def test_a_checkpoint_of_both_is_resumed_bit_for_bit_in_any_order(dtype, update, load):
    model, optimizer = make("AdamW", update, dtype)
    take_steps(model, optimizer, 3)
    weights, states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    take_steps(model, optimizer, 4, first=3)
    expected = snapshot(optimizer)
    load(model, optimizer, weights, states)
    take_steps(model, optimizer, 4, first=3)
    assert same_bits(snapshot(optimizer), expected)


def test_the_weights_of_a_checkpoint_alone_are_not_the_same_run():
    model, optimizer = make()
    take_steps(model, optimizer, 3)
    weights = copy.deepcopy(model.state_dict())
    before = copy.deepcopy((model, optimizer))
    model.load_state_dict(weights)
    take_steps(model, optimizer, 1, first=3)
    take_steps(*before, 1, first=3)
    assert not same_bits(snapshot(optimizer), snapshot(before[1]))


@pytest.mark.parametrize("load", [load_weights_first, load_states_first])
def test_a_new_process_resumes_bit_for_bit_in_any_order(load):
    model, optimizer = make()
    take_steps(model, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, resumed = make()
    load(other, resumed, *saved)
    for one, own in ((model, optimizer), (other, resumed)):
        take_steps(one, own, 3, first=3)
    assert same_bits(snapshot(optimizer), snapshot(resumed))


def test_load_master_is_no_write_from_outside():
    model, optimizer = make()
    take_steps(model, optimizer, 3)
    given = {name: torch.randn(value.shape) for name, value in model.state_dict().items()}
    optimizer.load_master(model, given)
    for name, value in optimizer.master_state_dict(model).items():
        assert torch.equal(value.cpu(), given[name])
    twin, reference = copy.deepcopy((model, optimizer))
    take_steps(model, optimizer, 2, first=3)
    take_steps(twin, reference, 2, first=3)
    assert same_bits(snapshot(optimizer), snapshot(reference))


@pytest.mark.parametrize("update", EXTRAS)
def test_what_is_saved_after_a_write_is_what_was_written(update):
    model, optimizer = make("AdamW", update)
    take_steps(model, optimizer, 3)
    COUNTED["copy_"](model)
    for name, value in optimizer.master_state_dict(model).items():
        assert torch.equal(value, model.state_dict()[name].float())
    assert not any(state[EXTRAS[update]].any() for state in optimizer.state_dict()["state"].values())


# Joining: what belongs to no master stays within half a spacing.


def plain_join(weight, remainder):
    """The formula alone."""
    if weight.dtype == torch.float16:
        field = (weight.view(torch.int16) >> 10 & 0x1F).to(torch.int32).clamp_(min=1)
        return remainder.float() * torch.exp2((field - 41).double()).float() + weight.float()
    high = weight.view(torch.int16).to(torch.int32) << 16
    return (high + remainder.to(torch.int32)).view(torch.float32)


def is_bounded(joined, weight):
    """Whether a joined number is within half a spacing of its weight, and on its side of zero."""
    near = (joined.double() - weight.double()).abs() <= spacing(weight) / 2
    return near & (joined.signbit() == weight.signbit())


def finite_weights(dtype):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    weights = patterns.view(dtype)
    return weights[weights.isfinite()]


def check_pairs(weights, remainders):
    """All pairs of these: bounded, the same by both functions, and unchanged by another split."""
    weight = weights.repeat_interleave(len(remainders))
    remainder = remainders.repeat(len(weights))
    joined = join_master(weight, remainder)
    assert is_bounded(joined, weight).all()
    assert torch.equal(join_many(weight, remainder).view(torch.int32), joined.view(torch.int32))
    exact = joined
    if weights.dtype == torch.float16:  # the split is exact in this range
        exact = joined[(joined.abs() >= 2.0**-17) & (joined.abs() < 65520.0)]
    again = join_many(*split_many(exact, weights.dtype))
    assert torch.equal(again.view(torch.int32), exact.view(torch.int32))
    if weights.dtype == torch.bfloat16:
        plain = plain_join(weight, remainder)
        impossible = (weight == 0) & (remainder < 0)
        assert plain[impossible].isnan().all()
        assert torch.equal(joined[~impossible].view(torch.int32), plain[~impossible].view(torch.int32))
        assert torch.equal(joined[impossible].view(torch.int32), weight[impossible].float().view(torch.int32))


@both_dtypes
def test_every_weight_with_an_outer_remainder_is_within_half_a_spacing(dtype):
    remainders = torch.tensor([-32768, -32767, -1, 0, 1, 32766, 32767, 12345, -12345], dtype=torch.int16)
    for weights in finite_weights(dtype).split(8192):
        check_pairs(weights, remainders)


@pytest.mark.parametrize("part", mostly_slow(range(4), every=100, rare=4))
@both_dtypes
def test_every_weight_with_every_remainder_is_within_half_a_spacing(dtype, part):
    """4.3 billion pairs in four parts: bounded, and what the formula says where the pair can come from a split."""
    remainders = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    weights = finite_weights(dtype)
    check_pairs(weights[weights == 0], remainders)
    remainders = remainders.expand(16, -1).contiguous()
    for column in weights[weights != 0][part::4].unsqueeze(1).split(16):
        rest = remainders[: len(column)]
        joined = join_many(column.expand_as(rest).contiguous(), rest)
        assert torch.equal(joined, plain_join(column, rest))
        # float32 holds the differences: they have 16 bits at most.
        off = joined.sub_(column).abs_().amax(dim=1, keepdim=True)
        assert (off.double() <= spacing(column) / 2).all()


def test_the_largest_float16_with_a_stale_remainder_may_reach_what_float16_has_not():
    largest = torch.tensor([65504.0], dtype=torch.float16)
    for remainder, value in ((32763, 65519.99609375), (32764, 65520.0)):
        assert join_master(largest, torch.tensor([remainder], dtype=torch.int16)).item() == value


@both_dtypes
def test_infinity_and_nan_come_back_with_any_remainder_above_zero(dtype):
    weight = torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=dtype)
    for value in (1, 32767):
        joined = join_master(weight, torch.full((3,), value, dtype=torch.int16))
        assert torch.equal(joined[:2], weight[:2].float())
        assert joined[2].isnan()


@both_dtypes
def test_every_weight_with_a_stale_compensation_is_within_half_a_spacing(dtype):
    weight = finite_weights(dtype)
    stale = [torch.inf, -torch.inf, torch.nan, 1e4, -1e4, 1.0, 1e-3, -1e-3, 1e-6, 0.0]
    for value in stale:
        joined = storage.load_weight(weight, torch.full_like(weight, value))
        assert ((joined.double() - weight.double()).abs() <= spacing(weight) / 2).all()


@both_dtypes
def test_every_compensation_that_kahan_stores_is_kept(dtype):
    weight = finite_weights(dtype).float()
    for part in (-0.5, -0.4999, -0.25, 0.0, 0.001, 0.25, 0.4999, 0.5):
        master = (weight.double() + part * spacing(finite_weights(dtype))).float()
        low, rest = storage.store_weight(master, dtype, "kahan")
        fits = low.isfinite()
        assert torch.equal(storage.load_weight(low, rest)[fits], (low.float() + rest.float())[fits])


def test_a_stale_compensation_would_be_off_by_far_more():
    weight, rest = torch.zeros(1, dtype=torch.bfloat16), torch.full((1,), 0.25, dtype=torch.bfloat16)
    assert (weight.float() + rest.float()).item() == 0.25
    assert storage.load_weight(weight, rest).item() == 0.0


# The kernels read stale pairs as the torch backend does.


def stale_entries(dtype, update):
    """Weights with remainders of others, and a step that changes nothing."""
    ones = [0.0, -0.0, 1.0, -1.0, 2.0**-14, -(2.0**-24), 6e4, 1e-30, 300.0]
    weight = torch.tensor(ones, dtype=torch.float64).to(dtype).repeat_interleave(6).to(DEVICE)
    if update == "exact":
        extra = torch.tensor([-32768, -1, 0, 1, 32767, -77], dtype=torch.int16)
    else:
        extra = torch.tensor([torch.inf, torch.nan, 0.25, -1e-3, 0.0, -(2.0**-12)], dtype=dtype)
    state = {"step": torch.zeros((), device=DEVICE), EXTRAS[update]: extra.repeat(len(ones)).to(DEVICE)}
    group = {"lr": 0.0, "weight_decay": 0.0, "maximize": False, "momentum": 0.0, "dampening": 0.0, "nesterov": False}
    return [Entry(weight, torch.ones_like(weight), state, group, 0, 0)]


@pytest.mark.parametrize("update", EXTRAS)
@both_dtypes
def test_the_kernels_read_stale_pairs_as_the_torch_backend_does(dtype, update):
    pytest.importorskip("triton", reason="triton is not installed")
    from floatline.optim.kernels import triton_backend

    found = []
    for backend in (triton_backend, torch_backend):
        entries = stale_entries(dtype, update)
        before = entries[0].weight.clone()
        backend.apply(PLAIN_SGD, entries, decision=None, update=update, states="fp32", seed=0)
        master = storage.load_weight(entries[0].weight, entries[0].state[EXTRAS[update]])
        assert ((master.double() - before.double()).abs() <= spacing(before) / 2).all()
        found.append(snapshot_of(entries[0]))
    for name in found[0]:  # the sign of a zero that is moved by 0 is the compiler's
        assert torch.equal(found[0][name], found[1][name])


def snapshot_of(entry):
    return {"weight": entry.weight.clone(), **{name: tensor.clone() for name, tensor in entry.state.items()}}
