"""FP32 islands: same numbers as FP32, in every way a module is called; and where inf and NaN begin."""

import copy
import dataclasses
import math
from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.distributed as dist
from tests.marks import needs_fsdp2
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from floatline.errors import GuardError, PlanError
from floatline.numerics.half_on_cpu import HalfOnCPU
from floatline.plans import KeptModule, Plan
from floatline.precision.islands import Islands, cast_weights
from floatline.precision.nested import find_tensors, map_tensors
from floatline.precision.nonfinite import first_nonfinite

NARROW = [torch.float16, torch.bfloat16]
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def autocast(dtype=torch.float16):
    return torch.autocast("cpu", dtype=dtype)


def three(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(OrderedDict(a=nn.Linear(8, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 8)))


def plan(dtype, *patterns):
    name = NAMES[dtype]
    return Plan(weights=name, compute=name, fp32_modules=tuple(KeptModule(pattern=p) for p in patterns))


class Seen(nn.Module):
    """Keeps the dtypes of what it computes with."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.seen = []

    def forward(self, x):
        self.seen.append((x.dtype, self.weight.dtype, torch.is_autocast_enabled("cpu")))
        return x @ self.weight


# --- weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NARROW)
def test_weights_get_the_plans_dtype_and_kept_modules_stay_fp32(dtype):
    model = nn.Sequential(OrderedDict(a=three(), b=three()))
    same = model.a.a.weight
    cast_weights(model, plan(dtype, "b"))
    assert {p.dtype for p in model.a.parameters()} == {dtype}
    assert {p.dtype for p in model.b.parameters()} == {torch.float32}
    assert model.a.a.weight is same  # the model's own parameters, so that what holds them still does


def test_kept_modules_become_fp32():
    model = three().half()
    cast_weights(model, plan(torch.float16, "b"))
    assert model.b.weight.dtype == torch.float32
    assert model.a.weight.dtype == torch.float16


def test_a_mixed_plan_leaves_frozen_weights_as_they_were_loaded():
    model = three().bfloat16()
    model.a.requires_grad_(False)
    cast_weights(model, Plan(weights="fp32", compute="bf16"))
    assert model.a.weight.dtype == torch.bfloat16
    assert model.b.weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_stays_fp32_and_takes_16_bits(dtype, training):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)).train(training)
    cast_weights(model, plan(dtype))
    assert {t.dtype for t in (*model[1].parameters(), model[1].running_mean)} == {torch.float32}
    out = model(torch.randn(2, 3, 8, 8, dtype=dtype))
    assert out.dtype == dtype
    out.float().sum().backward()
    assert model[0].weight.grad.dtype == dtype


def test_a_running_mean_of_16_bits_would_stand_still():
    wide, narrow = nn.BatchNorm1d(4), nn.BatchNorm1d(4).bfloat16()
    x = torch.randn(64, 4) * 0.1 + 100
    for _ in range(60):
        wide(x)
        narrow(x.bfloat16())
    assert (wide.running_mean - 100).abs().max() < 0.3
    assert (narrow.running_mean.float() - 100).abs().max() > 1


def test_a_weight_shared_with_a_module_outside_follows_it_and_still_works():
    model = nn.Sequential(
        OrderedDict(embed=nn.Embedding(16, 8), body=nn.Linear(8, 8), head=nn.Linear(8, 16, bias=False))
    )
    model.head.weight = model.embed.weight
    cast_weights(model, plan(torch.float16, "head"))
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.dtype == torch.float16
    Islands(model, ["head"])
    model(torch.arange(4)).float().sum().backward()
    assert model.embed.weight.grad.dtype == torch.float16


def test_a_weight_that_fp16_cannot_hold_is_refused_and_nothing_changed():
    model = three()
    with torch.no_grad():
        model.b.weight[0, :2] = 70000.0
    with pytest.raises(PlanError, match=r"^2 weights of 'b.weight' are beyond fp16's 65504\. Keep 'b' in fp32_modules"):
        cast_weights(model, plan(torch.float16))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    cast_weights(model, plan(torch.float16, "b"))
    assert model.b.weight.max() == 70000
    cast_weights(model, plan(torch.bfloat16))


# --- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NARROW)
def test_an_island_of_16_bit_weights_computes_as_the_module_in_fp32(dtype):
    model = three().to(dtype)
    twin = copy.deepcopy(model.b).float()
    x = torch.randn(4, 8, dtype=dtype)
    islands = Islands(model)
    islands.add("b", outputs="fp32")
    out = model.b(x)
    expected = twin(x.float())
    assert out.dtype == torch.float32
    assert torch.equal(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert model.b.weight.dtype == dtype
    assert torch.equal(model.b.weight.grad, twin.weight.grad.to(dtype))


@pytest.mark.parametrize("dtype", NARROW)
def test_outputs_of_16_bit_runs_return_to_the_dtype_of_the_inputs(dtype):
    model = three().to(dtype)
    twin = copy.deepcopy(model.b).float()
    x = torch.randn(4, 8, dtype=dtype)
    Islands(model, ["b"])
    assert torch.equal(model.b(x), twin(x.float()).to(dtype))
    assert model(x).dtype == dtype


@pytest.mark.parametrize("dtype", NARROW)
def test_under_autocast_the_island_is_fp32_and_its_outputs_stay_so(dtype):
    model = nn.Sequential(nn.Linear(8, 8), Seen(), nn.Linear(8, 8))
    with autocast(dtype):
        model(torch.randn(2, 8))
        Islands(model, ["1"])
        out = model(torch.randn(2, 8))
        assert torch.is_autocast_enabled("cpu")
    assert model[1].seen == [
        (dtype, torch.float32, True),
        (torch.float32, torch.float32, False),
    ]
    assert out.dtype == dtype


def test_a_product_that_overflows_in_fp16_is_finite_on_an_island():
    model = nn.Sequential(OrderedDict(a=nn.Linear(8, 8), head=nn.Linear(8, 4)))
    with torch.no_grad():
        model.head.weight.fill_(3e4)
    x = torch.ones(2, 8)
    with HalfOnCPU(), autocast():
        assert not model(x * 100).isfinite().all()
        Islands(model, ["head"])
        out = model(x * 100)
    assert out.isfinite().all() and out.abs().max() > 65504


def test_an_embedding_takes_no_floats_and_still_returns_what_the_next_module_expects():
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8))
    cast_weights(model, plan(torch.bfloat16, "0"))
    Islands(model, ["0"])
    assert model(torch.arange(3)).dtype == torch.bfloat16


def test_the_whole_model_may_be_an_island_and_then_returns_fp32():
    model = three().half()
    islands = Islands(model, [""])
    assert model(torch.randn(2, 8).half()).dtype == torch.float32
    islands.remove()
    assert model(torch.randn(2, 8).half()).dtype == torch.float16


# --- ways to be called -------------------------------------------------------------------------------------------


def test_an_exception_inside_leaves_autocast_on_and_weights_in_place():
    class Raises(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2).half())

        def forward(self, x):
            assert self.weight.dtype == torch.float32
            raise RuntimeError("here")

    model = nn.Sequential(Raises())
    weight = model[0].weight
    Islands(model, ["0"])
    with autocast():
        with pytest.raises(RuntimeError, match="here"):
            model(torch.ones(2))
        assert torch.is_autocast_enabled("cpu")
    assert model[0].weight is weight


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_gradient_checkpointing_around_and_inside_gives_the_same_gradients(reentrant, inner):
    class Inner(nn.Module):
        def __init__(self, layers, checkpointed):
            super().__init__()
            self.layers, self.checkpointed = layers, checkpointed

        def forward(self, x):
            return checkpoint(self.layers, x, use_reentrant=reentrant) if self.checkpointed else self.layers(x)

    grads = []
    for checkpointed in (False, True):
        model = nn.Sequential(OrderedDict(a=Inner(three(), checkpointed and inner))).half()
        Islands(model, ["a"])
        x = torch.linspace(-1, 1, 32).reshape(4, 8).half().requires_grad_()
        out = checkpoint(model, x, use_reentrant=reentrant) if checkpointed and not inner else model(x)
        out.float().square().sum().backward()
        grads.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))


def test_checkpointing_under_autocast_recomputes_the_island_in_fp32():
    model = nn.Sequential(nn.Linear(8, 8), Seen())
    Islands(model, ["1"])
    with autocast():
        out = checkpoint(model, torch.randn(2, 8), use_reentrant=False)
    out.float().sum().backward()
    assert model[1].seen == [(torch.float32, torch.float32, False)] * 2


def test_nested_islands_and_modules_called_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Seen()

        def forward(self, x):
            return self.layer(self.layer(x))

    model = nn.Sequential(OrderedDict(a=nn.Sequential(Twice()), b=nn.Linear(8, 8))).half()
    islands = Islands(model, ["a.0.layer", "a"])
    islands.add("a.0")
    assert islands.names == ("a.0.layer", "a", "a.0")
    assert model(torch.randn(2, 8).half()).dtype == torch.float16
    inside = model.a[0].layer
    assert inside.seen == [(torch.float32, torch.float32, False)] * 2  # no rounding in between
    islands.remove()
    inside.seen.clear()
    model(torch.randn(2, 8).half())
    assert inside.seen[0][0] == torch.float16


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
def test_recurrent_layers(make):
    torch.manual_seed(0)
    model = nn.ModuleDict({"rnn": make(4, 4, batch_first=True)}).half()
    twin = copy.deepcopy(model["rnn"]).float()
    x = torch.randn(2, 3, 4).half()
    Islands(model).add("rnn", outputs="fp32")
    packed = nn.utils.rnn.pack_padded_sequence(x, [3, 2], batch_first=True)
    assert torch.equal(model["rnn"](packed)[0].data, twin(packed._replace(data=packed.data.float()))[0].data)
    out = model["rnn"](x)[0]
    assert torch.equal(out, twin(x.float())[0])
    out.sum().backward()
    assert model["rnn"].weight_ih_l0.grad.dtype == torch.float16


def test_attention_reads_the_weights_of_a_child_it_does_not_call():
    torch.manual_seed(0)
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2, batch_first=True)}).half()
    twin = copy.deepcopy(model["attention"]).float()
    x = torch.randn(2, 5, 8).half()
    Islands(model).add("attention", outputs="fp32")
    mask = torch.full((5, 5), -math.inf).triu(1).half()
    out = model["attention"](x, x, x, attn_mask=mask, need_weights=False)[0]
    torch.testing.assert_close(
        out, twin(x.float(), x.float(), x.float(), attn_mask=mask.float(), need_weights=False)[0], rtol=0, atol=0
    )


def test_running_statistics_of_16_bits_move_on_an_island():
    model = nn.Sequential(nn.BatchNorm1d(4)).half()
    mean = model[0].running_mean
    Islands(model, ["0"])
    model(torch.ones(8, 4).half())
    assert model[0].running_mean is mean
    assert mean.dtype == torch.float16
    assert torch.allclose(mean.float(), torch.full((4,), 0.1), atol=1e-3)
    assert model[0].num_batches_tracked == 1


def test_a_copied_model_has_islands_of_its_own():
    model = three().half()
    Islands(model, ["b"])
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.b.weight.zero_()
        twin.b.bias.zero_()
    x = torch.randn(2, 8).half()
    assert model.b(x).abs().max() > 0
    assert twin.b(x).abs().max() == 0


def test_removing_puts_back_the_forward_of_another_library():
    model = three()
    model.b.forward = lambda x: x * 2
    Islands(model, ["b"]).remove()
    assert torch.equal(model.b(torch.ones(1)), torch.tensor([2.0]))
    assert "forward" not in vars(model.a)


def test_state_dict_and_optimizer_see_the_same_parameters():
    model = three().half()
    before = dict(model.named_parameters())
    Islands(model, ["b"])
    model(torch.randn(2, 8).half())
    assert all(param is before[name] for name, param in model.named_parameters())
    assert set(model.state_dict()) == set(before)


def test_a_model_that_is_compiled_already_gets_an_island():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    with torch.no_grad():
        model[1].weight.fill_(3e4)
    compiled = torch.compile(model, backend="eager")
    x = torch.full((2, 8), 50.0)
    with HalfOnCPU(), autocast():
        before = compiled(x)
        islands = Islands(model, ["1"])
        during = compiled(x)
        islands.remove()
        after = compiled(x)
    assert (before.dtype, during.dtype, after.dtype) == (torch.float16, torch.float32, torch.float16)
    assert during.isfinite().all()
    during.sum().backward()


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp(one_process):
    model = nn.parallel.DistributedDataParallel(three().half())
    Islands(model, ["module.b"])
    model(torch.randn(4, 8).half()).float().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@needs_fsdp2
@pytest.mark.parametrize("name", ["b", "b.a", ""])
def test_fsdp2_with_units_inside(one_process, name):
    model = nn.Sequential(OrderedDict(a=three(), b=three(1))).bfloat16()
    twin = copy.deepcopy(model)
    for unit in (model.a, model.b, model):
        fully_shard(unit, mesh=init_device_mesh("cpu", (1,)))
    x, outputs = torch.randn(4, 8).bfloat16(), []
    for each in (model, twin):
        Islands(each, [name])
        outputs.append(each(x))
        outputs[-1].float().square().sum().backward()
    assert torch.equal(*outputs)
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(param.grad.to_local(), other.grad)


def test_a_name_that_is_not_there_is_refused():
    with pytest.raises(GuardError, match=r"^The model has no module 'bb' to keep in FP32\. Did you mean 'b'\?$"):
        Islands(nn.Sequential(OrderedDict(b=nn.Linear(2, 2))), ["bb"])


# --- nested values -----------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Result:
    logits: torch.Tensor
    extra: object = None


def test_tensors_are_found_and_changed_at_any_depth():
    x = torch.ones(1).half()
    tree = {"a": [x, (x, 3)], "b": Pair(x, None), "c": Result(x, OrderedDict(d=x)), "e": "text"}
    changed = map_tensors(lambda tensor: tensor.float(), tree)
    assert len(find_tensors(tree)) == 5
    assert {tensor.dtype for tensor in find_tensors(changed)} == {torch.float32}
    assert {tensor.dtype for tensor in find_tensors(tree)} == {torch.float16}
    assert isinstance(changed["b"], Pair) and isinstance(changed["c"].extra, OrderedDict)
    assert map_tensors(lambda tensor: tensor, tree) is tree


def test_an_island_takes_and_returns_structures():
    class Deep(nn.Module):
        def forward(self, batch, *, scale):
            assert batch["x"].dtype == scale.left.dtype == torch.float32
            return Result(batch["x"] * scale.left, [batch["x"]])

    model = nn.Sequential(Deep())
    Islands(model, ["0"])
    out = model[0]({"x": torch.ones(1).half()}, scale=Pair(torch.ones(1).half(), 1))
    assert out.logits.dtype == out.extra[0].dtype == torch.float16


# --- where inf and NaN begin -------------------------------------------------------------------------------------


class Exp(nn.Module):
    def forward(self, x):
        return x.exp_() if x.requires_grad is False else x.exp()


class Log(nn.Module):
    def forward(self, x):
        return x.log()


def losses(model, x):
    return lambda: model(x).float().sum()


def test_the_deepest_module_is_named_with_its_numbers():
    model = nn.Sequential(OrderedDict(a=nn.Identity(), b=nn.Sequential(nn.Identity(), Exp()), c=nn.Identity()))
    x = torch.tensor([1.0, 12.0, -3.0]).half()
    place = first_nonfinite(model, losses(model, x))
    assert (place.origin, place.module, place.kind, place.dtype) == ("module", "b.1", "Exp", "float16")
    assert (place.largest_input, place.num_inf, place.num_nan) == (12.0, 1, 0)
    assert str(place) == "b.1 (Exp, float16): 1 inf and 0 NaN; inputs up to 12"
    assert place.is_output  # c passes it on
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_what_happens_between_modules_is_the_parents():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Identity()

        def forward(self, x):
            return self.layer(x.exp()) * 0

    model = nn.Sequential(nn.Identity(), Parent())
    place = first_nonfinite(model, losses(model, torch.tensor([12.0]).half()))
    assert (place.module, place.kind, place.num_nan) == ("1", "Parent", 1)


def test_a_finite_pass_has_no_place():
    model = three()
    assert first_nonfinite(model, losses(model, torch.randn(2, 8))) is None


def test_the_loss_function_is_named_where_all_modules_are_finite():
    model = three()
    place = first_nonfinite(model, lambda: model(torch.randn(2, 8)).sum() / 0)
    assert (place.origin, place.module, place.kind) == ("loss", "", "the loss function")
    assert str(place) == "the loss function (float32): 1 inf and 0 NaN"


def test_weights_and_batches_that_are_not_finite_are_told_apart():
    model = three()
    place = first_nonfinite(model, losses(model, torch.full((2, 8), math.nan)))
    assert (place.origin, place.module) == ("inputs", "a")
    with torch.no_grad():
        model.b.weight[0, 0] = math.nan
    place = first_nonfinite(model, losses(model, torch.randn(2, 8)))
    assert (place.origin, place.module) == ("weights", "b")


class Masked(nn.Module):
    """Scores with -inf on purpose, and a softmax behind them."""

    def __init__(self, *, whole=False):
        super().__init__()
        self.fill, self.softmax, self.whole = Fill(), nn.Softmax(-1), whole

    def forward(self, x):
        return self.softmax(self.fill(x, torch.ones_like(x, dtype=torch.bool).triu(0 if self.whole else 1)))


class Fill(nn.Module):
    def forward(self, x, mask):
        return x.masked_fill(mask, -math.inf)


def test_a_mask_is_no_fault():
    model = nn.Sequential(Masked(), nn.Linear(4, 4))
    assert first_nonfinite(model, losses(model, torch.randn(4, 4))) is None


def test_a_mask_does_not_hide_the_fault_behind_it():
    model = nn.Sequential(Masked(), Exp(), Exp(), Exp(), Exp(), Exp())
    place = first_nonfinite(model, losses(model, torch.randn(4, 4)))
    assert (place.kind, place.module) == ("Exp", "4")


def test_a_row_that_is_masked_altogether_is_the_masks_fault():
    model = nn.Sequential(Masked(whole=True))
    assert first_nonfinite(model, losses(model, torch.randn(4, 4))).module == "0.fill"


def test_an_attention_mask_among_the_inputs_is_no_fault_and_hides_none():
    torch.manual_seed(0)
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2, batch_first=True)})
    mask = torch.full((4, 4), -math.inf).triu(1)

    def run(x):
        return lambda: model["attention"](x, x, x, attn_mask=mask)[0].sum()

    x = torch.randn(2, 4, 8)
    assert first_nonfinite(model, run(x)) is None
    place = first_nonfinite(model, run(x * 1e30))
    assert (place.origin, place.module) == ("module", "attention")


def test_the_log_of_a_zero_is_found_though_it_looks_like_a_mask():
    model = nn.Sequential(OrderedDict(softmax=nn.Softmax(-1), log=Log()))
    x = torch.tensor([0.0, -30.0]).half()
    place = first_nonfinite(model, losses(model, x))
    assert (place.module, place.num_inf, place.is_output) == ("log", 1, True)


def test_hooks_are_removed_when_the_pass_raises():
    model = three()
    with pytest.raises(RuntimeError):
        first_nonfinite(model, losses(model, torch.randn(2, 3)))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_compiled_models_are_seen_through():
    model = nn.Sequential(nn.Identity(), Exp())
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(2).half())
    assert first_nonfinite(model, losses(compiled, torch.tensor([12.0, 1.0]).half())).module == "1"
    assert first_nonfinite(compiled, losses(compiled, torch.tensor([12.0, 1.0]).half())).module == "_orig_mod.1"


def test_an_island_at_the_place_fixes_it():
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(a=nn.Linear(8, 8), head=nn.Linear(8, 4))).half()
    with torch.no_grad():
        model.head.weight.fill_(3e4)
        model.a.bias.fill_(9)
    islands, x = Islands(model), torch.randn(2, 8).half()
    place = first_nonfinite(model, losses(model, x))
    assert (place.module, place.is_output) == ("head", True)
    islands.add(place.module)
    assert first_nonfinite(model, losses(model, x)).module == "head"  # back to FP16, where it is inf again
    islands.add(place.module, outputs="fp32")
    assert first_nonfinite(model, losses(model, x)) is None
