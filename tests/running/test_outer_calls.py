"""Modules compute in the plan's format: around their outermost calls, or where the script's own autocast says."""

import copy
import io
import pickle

import pytest
import torch
from tests.running.by_hand import batches, bits, fp16_plan, small_model
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from floatline.plans import KeptFunction, KeptModule
from floatline.plans.plan import Rewrite
from floatline.running.plan_in_force import plan_in_force

X = batches()[0][0]


def bf16_plan(**changes):
    return fp16_plan(compute="bf16", scaling=None, **changes)


class Seen(nn.Module):
    """Notes the format in which its parts compute."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.dtypes = nn.Linear(6, 8), nn.Linear(8, 4), []

    def forward(self, x):
        self.dtypes.append(self.first(x).dtype)
        return self.last(self.first(x).relu())


@pytest.mark.parametrize("compute", ["fp16", "bf16"])
def test_outermost_calls_have_the_bits_of_autocast_and_their_outputs_are_wide(compute):
    model, dtype = small_model(), {"fp16": torch.float16, "bf16": torch.bfloat16}[compute]
    with torch.autocast("cpu", dtype):
        wanted = model(X)
    assert wanted.dtype == dtype
    with plan_in_force(fp16_plan(compute=compute)):
        found = model(X)
        assert not torch.is_autocast_enabled("cpu")
    assert bits(found) == bits(wanted.float())
    assert bits(found) != bits(model(X))


def test_a_loss_with_no_weights_is_computed_in_fp32():
    with plan_in_force(bf16_plan()):
        assert nn.MSELoss()(X.requires_grad_(), X * 2).dtype == torch.float32


def test_outputs_of_any_structure_are_wide():
    class Many(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return {"a": out, "b": [out, (out, 3)]}, torch.ones(2, dtype=torch.int32)

    with plan_in_force(bf16_plan()):
        mapping, number = Many(6, 2)(X)
    assert [t.dtype for t in (mapping["a"], mapping["b"][0], mapping["b"][1][0])] == [torch.float32] * 3
    assert number.dtype == torch.int32


def own_autocast(model, x, dtype=torch.bfloat16):
    with torch.autocast("cpu", dtype):
        out = model(x)
        return out, F.mse_loss(out, out.detach() * 2)


def test_a_script_with_its_own_autocast_keeps_its_regions():
    model = small_model()
    wanted = own_autocast(model, X)
    with plan_in_force(bf16_plan()):
        found = own_autocast(model, X)
        outside = model(X)
    assert bits(list(found)) == bits(list(wanted))
    assert bits(outside) == bits(model(X))


def test_its_regions_get_the_format_of_the_plan():
    model = small_model()
    wanted = own_autocast(model, X, torch.float16)
    with plan_in_force(fp16_plan(scaling=None)):
        found = own_autocast(model, X, torch.bfloat16)
    assert bits(list(found)) == bits(list(wanted))
    assert bits(list(found)) != bits(list(own_autocast(model, X, torch.bfloat16)))


class PartlyWide(nn.Module):
    """A model with a region that its author keeps in FP32, as those of many libraries have."""

    def __init__(self):
        super().__init__()
        self.body, self.dtypes = small_model(), []

    def forward(self, x):
        x = self.body[1](self.body[0](x))
        with torch.autocast("cpu", enabled=False):
            x = x.float() * 1.001
            self.dtypes.append((x @ x.T).dtype)
        self.dtypes.append((x @ x.T).dtype)
        return self.body[2](x)


def test_a_script_that_only_turns_autocast_off_is_put_under_autocast_in_every_step():
    model = PartlyWide()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(X).float()
    model.dtypes.clear()
    with plan_in_force(bf16_plan()):
        found = [model(X) for _ in range(3)]
    assert [bits(one) for one in found] == [bits(wanted)] * 3
    assert model.dtypes == [torch.float32, torch.bfloat16] * 3


def test_regions_without_autocast_stay_fp32_in_a_script_with_autocast():
    model = PartlyWide()
    wanted = own_autocast(model, X)
    with plan_in_force(bf16_plan()):
        assert [bits(list(own_autocast(model, X))) for _ in range(2)] == [bits(list(wanted))] * 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_that_runs_again_is_not_the_scripts_own_autocast(reentrant):
    class Checkpointed(Seen):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    model, x = Checkpointed(), X.clone().requires_grad_()
    with plan_in_force(bf16_plan()):
        for _ in range(3):
            model(x).sum().backward()
    assert set(model.dtypes) == {torch.bfloat16}
    assert len(model.dtypes) == 6


def test_autocast_in_an_evaluation_only_does_not_end_that_of_the_training():
    model = Seen()
    with plan_in_force(bf16_plan()):
        for _ in range(2):
            model(X)
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                model.eval()(X)
            model.train()
    assert model.dtypes == [torch.bfloat16] * 4


def test_the_switch_of_torch_is_the_scripts_own_autocast_too():
    model = Seen()
    with plan_in_force(bf16_plan()):
        torch.set_autocast_enabled("cpu", True)
        model(X)
        torch.set_autocast_enabled("cpu", False)
        model(X)
    assert model.dtypes == [torch.bfloat16, torch.float32]


def test_fp32_modules_leave_autocast_on_for_the_next_steps():
    plan = bf16_plan(fp32_modules=(KeptModule(pattern="last"),))
    with plan_in_force(plan):
        model = Seen()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        outs = []
        for _ in range(3):
            outs.append(model(X))
            outs[-1].sum().backward()
            opt.zero_grad()
    assert model.dtypes == [torch.bfloat16] * 3
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.first(X).relu()
    assert bits(outs) == [bits(model.last(hidden.float()))] * 3


def test_a_loss_in_fp32_behind_the_scripts_own_autocast():
    plan = bf16_plan(fp32_functions=(KeptFunction(function="loss"),))
    model, second = Seen(), Seen()
    with plan_in_force(plan):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                out = model(X)
                assert out.dtype == torch.float32
                assert (out @ out.T).dtype == torch.float32
                with torch.autocast("cpu", enabled=False):
                    pass
                assert (out @ out.T).dtype == torch.float32
                second(X)
            assert not torch.is_autocast_enabled("cpu")
    assert model.dtypes == second.dtypes == [torch.bfloat16] * 2
    with plan_in_force(bf16_plan()), torch.autocast("cpu", torch.bfloat16):
        assert (model(X) @ model(X).T).dtype == torch.bfloat16


def test_casts_of_modules_to_16_bits_leave_fp32_weights_under_a_mixed_plan():
    casts = [
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.to(torch.float16),
        lambda m: m.to("cpu", torch.bfloat16),
        lambda m: m.to(device="cpu", dtype=torch.float16, non_blocking=True),
        lambda m: m.to(torch.zeros(1, dtype=torch.float16)),
    ]
    with plan_in_force(fp16_plan()):
        for cast in casts:
            model = small_model()
            before = bits(model)
            assert cast(model) is model
            assert bits(model) == before
        assert small_model().double()[0].weight.dtype == torch.float64
        torch.set_default_dtype(torch.float16)
        try:
            assert nn.Linear(2, 2).weight.dtype == torch.float32
        finally:
            torch.set_default_dtype(torch.float32)


def test_a_script_with_16_bit_inputs_and_weights_runs_under_a_mixed_plan():
    with plan_in_force(fp16_plan()):
        model = small_model().half()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in batches():
            opt.zero_grad()
            F.mse_loss(model(x.half()), y.half()).backward()
            opt.step()
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())


def test_copies_and_files_of_models_hold_nothing_of_the_plan():
    with plan_in_force(fp16_plan()):
        model = small_model()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        model(X).sum().backward()
        opt.step()
        average = copy.deepcopy(model)
        with torch.no_grad():
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
        average.eval()(X)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        whole = pickle.dumps(model)
    file.seek(0)
    assert bits(list(torch.load(file).values())) == bits(model)
    assert b"floatline" not in whole
    again = pickle.loads(whole)
    assert bits(again) == bits(model)
    assert bits(again(X)) == bits(model(X))


def test_files_of_models_with_fp32_modules_are_read_without_floatline():
    rewrite = Rewrite(kind="log-softmax", module="0")
    with plan_in_force(bf16_plan(fp32_modules=(KeptModule(pattern="2"),), rewrites=(rewrite,))):
        model = small_model()
        torch.optim.SGD(model.parameters(), lr=0.1)
        out = model(X)
        assert "forward" in vars(model[0])
        assert "forward" in vars(model[2])
        whole = pickle.dumps(model)
        assert bits(copy.deepcopy(model)(X)) == bits(out)
    assert b"floatline" not in whole
    assert bits(pickle.loads(whole)(X)) == bits(model(X))


def test_a_model_that_moves_to_another_device_is_still_put_under_autocast():
    with torch.device("meta"):
        model = nn.Linear(6, 3)
    with plan_in_force(bf16_plan()):
        model(X.to("meta"))
        model = model.to_empty(device="cpu")
        nn.init.normal_(model.weight), nn.init.zeros_(model.bias)
        out = model(X)
    assert bits(out) == bits(out.bfloat16().float())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_compute_in_the_format_of_the_plan(backend):
    model = small_model()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(X).float()
    torch.compiler.reset()
    with plan_in_force(bf16_plan()):
        compiled = torch.compile(model, backend=backend)
        opt = torch.optim.SGD(compiled.parameters(), lr=0.0)
        for _ in range(3):
            found = compiled(X)
            found.sum().backward()
            opt.step()
    assert bits(found) == bits(wanted)
    torch.compiler.reset()


def test_models_that_a_compiled_function_calls_compute_in_the_format_of_the_plan():
    model = small_model()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(X).float().square().mean()
    torch.compiler.reset()
    with plan_in_force(bf16_plan()):

        @torch.compile(backend="eager", fullgraph=True)
        def compute_loss(x):
            return model(x).square().mean()

        found = [compute_loss(X) for _ in range(3)]
    assert [bits(one) for one in found] == [bits(wanted)] * 3
    torch.compiler.reset()


def test_a_module_that_raises_leaves_nothing_behind():
    class Broken(nn.Linear):
        def forward(self, x):
            raise KeyError("broken")

    model = Seen()
    with plan_in_force(bf16_plan()):
        with pytest.raises(KeyError):
            Broken(2, 2)(X)
        assert not torch.is_autocast_enabled("cpu")
        model(X)
    assert model.dtypes == [torch.bfloat16]


def test_everything_is_put_back():
    def patched():
        return [nn.Module.__call__, nn.Module.to, nn.Module.half, torch.autocast.__enter__, torch.autocast.__exit__]

    before = patched()
    with plan_in_force(bf16_plan()):
        assert not any(now is old for now, old in zip(patched(), before, strict=True))
    assert patched() == before
