"""A plan in force in a script: FP32 for scripts of any precision; modules, functions and lines by name; refusals."""

import copy
import gc
import linecache
import sys
import textwrap
import weakref

import pytest
import torch
from tests.running.by_hand import batches, bits, fp16_plan, small_model
from torch import nn
from torch.nn import functional as F

from floatline.errors import PlanError
from floatline.plans import KeptFunction, KeptModule
from floatline.plans.plan import REWRITE_KINDS, Clip, Rewrite
from floatline.plans.presets import PLANS
from floatline.running import plan_in_force as in_force
from floatline.running.plan_in_force import find_roots, plan_in_force

X, Y = batches()[0]


def bf16_plan(**changes):
    return fp16_plan(compute="bf16", scaling=None, **changes)


def train(make=small_model, *, call=None, narrow=None, cast=None, scaler=False, loss_dtype=torch.float32):
    """A script in FP32, or the same with everything that makes it one of 16 bits."""
    model = make()
    if cast is not None:
        model = cast(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    own = torch.amp.GradScaler("cpu", enabled=scaler)
    for x, y in batches():
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=call == "autocast"):
            out = model(x if narrow is None else x.to(narrow))
        own.scale(F.mse_loss(out.to(loss_dtype), y.to(loss_dtype))).backward()
        own.step(opt)
        own.update()
    return bits(model)


SCRIPTS = {
    "autocast": {"call": "autocast"},
    "autocast with a scaler": {"call": "autocast", "scaler": True},
    "half": {"cast": lambda m: m.half(), "narrow": torch.float16},
    "bfloat16": {"cast": lambda m: m.bfloat16(), "narrow": torch.bfloat16},
    "to": {"cast": lambda m: m.to(torch.bfloat16), "narrow": torch.bfloat16, "loss_dtype": torch.bfloat16},
    "dtype of modules": {"make": lambda: small_model(dtype=torch.bfloat16), "narrow": torch.bfloat16},
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_under_fp32_a_script_of_16_bits_has_the_bits_of_one_in_fp32(script):
    wanted = train()
    with plan_in_force(PLANS["fp32"]):
        found = train(**SCRIPTS[script])
    assert found == wanted
    assert train(**SCRIPTS[script]) != wanted


def test_under_fp32_a_default_of_16_bits_is_fp32():
    wanted = train()
    with plan_in_force(PLANS["fp32"]):
        torch.set_default_dtype(torch.bfloat16)
        try:
            found = train()
        finally:
            torch.set_default_dtype(torch.float32)
    assert found == wanted


def test_under_fp32_steps_are_counted_and_clipped():
    seen, wanted = [], train()
    for clip in (None, Clip(max_value=1e-4)):
        plan = PLANS["fp32"].model_copy(update={"clip": clip})
        with plan_in_force(plan, lambda _, applied: seen.append(applied)) as force:
            assert (train() == wanted) == (clip is None)
        assert force.scale.num_steps == 6
    assert seen == [True] * 12


@pytest.mark.parametrize("name", ["fp32", "fp16-mixed", "bf16-true"])
def test_scalers_are_what_they_were_behind_a_plan(name):
    with plan_in_force(PLANS[name]):
        assert not torch.amp.GradScaler("cpu").is_enabled()
    assert torch.amp.GradScaler("cpu").is_enabled()
    assert "_enabled" not in vars(torch.amp.GradScaler)


def test_under_fp32_a_gradient_that_is_not_finite_is_the_scripts_own_affair():
    with plan_in_force(PLANS["fp32"]):
        model = small_model()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        (model(X).sum() * float("nan")).backward()
        opt.step()
    assert model[0].weight.isnan().all()


@pytest.mark.parametrize("name", ["safe", "ultra-conservative"])
def test_a_plan_that_accumulates_is_refused(name):
    with pytest.raises(PlanError, match="let the script accumulate") as raised, plan_in_force(PLANS[name]):
        pass
    assert "\n" not in str(raised.value)


def settle(model, plan, num=1):
    """Let a script make steps with a model; gives the outputs."""
    outs = []
    with plan_in_force(plan):
        opt = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(num):
            outs.append(model(X))
            outs[-1].sum().backward()
            opt.step()
    return outs


def test_wrong_names_of_modules_are_told_with_the_nearest_ones():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(6, 6), nn.Linear(6, 4)

        def forward(self, x):
            return self.decoder(self.encoder(x))

    for plan in (
        bf16_plan(fp32_modules=(KeptModule(pattern="decodr"),)),
        bf16_plan(rewrites=(Rewrite(kind=REWRITE_KINDS[0], module="decodr"),)),
    ):
        with pytest.raises(PlanError, match="'decoder'") as raised:
            settle(Named(), plan)
        assert "\n" not in str(raised.value)
    settle(Named(), bf16_plan(fp32_modules=(KeptModule(pattern="decoder"),)))


def test_a_wrong_name_is_told_again_where_the_script_goes_on():
    model = small_model()
    with plan_in_force(bf16_plan(fp32_modules=(KeptModule(pattern="none"),))):
        torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with pytest.raises(PlanError):
                model(X)


def test_patterns_are_shared_out_among_models():
    plan = bf16_plan(fp32_modules=(KeptModule(pattern="first"), KeptModule(pattern="last")))

    class One(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.add_module(name, nn.Linear(6, 6))
            self.name = name

        def forward(self, x):
            return getattr(self, self.name)(x)

    with plan_in_force(plan):
        models = [One("first"), One("last"), One("other")]
        torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
        outs = [model(X) for model in models]
    for model, out in zip(models, outs, strict=True):
        assert (bits(out) == bits(model(X))) == (model.name != "other")


def test_nothing_stays_behind_in_models():
    model = small_model()
    settle(model, bf16_plan(fp32_modules=(KeptModule(pattern="0"),)))
    assert "forward" not in vars(model[0])


def test_copies_of_models_with_fp32_modules_compute_alike():
    with plan_in_force(bf16_plan(fp32_modules=(KeptModule(pattern="2"),))):
        model = small_model()
        torch.optim.SGD(model.parameters(), lr=0.1)
        out = model(X)
        average = copy.deepcopy(model).eval()
        assert bits(average(X)) == bits(out)


def load(tmp_path, text, name="own_code"):
    """A module of a user's, from a file."""
    path = tmp_path / f"{name}.py"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    linecache.checkcache()
    namespace = {"__name__": name, "__file__": str(path)}
    module = type(sys)(name)
    module.__dict__.update(namespace)
    sys.modules[name] = module
    exec(compile(path.read_text("utf-8"), str(path), "exec"), module.__dict__)
    return module


@pytest.fixture
def no_module():
    yield
    sys.modules.pop("own_code", None)


CODE = """
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
            self.dtypes = []

        def forward(self, x):
            hidden = self.first(x)
            hidden = combine(hidden)
            self.dtypes.append(hidden.dtype)
            return self.last(hidden)

    def combine(hidden):
        product = hidden @ hidden.T
        return product @ hidden
"""


@pytest.mark.usefixtures("no_module")
@pytest.mark.parametrize(
    ("kept", "dtype"),
    [
        ("own_code.combine", torch.float32),
        ("own_code.py:combine", torch.float32),
        ("own_code.py:19", torch.bfloat16),
        ("own_code.py:20", torch.float32),
        (None, torch.bfloat16),
    ],
)
def test_functions_and_lines_compute_in_fp32_in_every_step(tmp_path, kept, dtype):
    code = load(tmp_path, CODE)
    kept = () if kept is None else (KeptFunction(function=kept),)
    model = code.Model()
    outs = settle(model, bf16_plan(fp32_functions=kept), num=3)
    assert model.dtypes == [dtype] * 3
    assert len({str(bits(out)) for out in outs}) == 1


@pytest.mark.usefixtures("no_module")
def test_wrong_names_of_functions_are_told_with_the_nearest_ones(tmp_path):
    model = load(tmp_path, CODE).Model()
    with pytest.raises(PlanError, match="combine") as raised:
        settle(model, bf16_plan(fp32_functions=(KeptFunction(function="own_code.combin"),)))
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("no_module")
def test_a_line_that_has_moved_is_refused(tmp_path):
    model = load(tmp_path, CODE).Model()
    kept = KeptFunction(function="own_code.py:20", code="product = hidden @ hidden.T")
    with pytest.raises(PlanError, match="line 19 now"):
        settle(model, bf16_plan(fp32_functions=(kept,)))


LINES = """
    import torch
    from floatline.plans import KeptFunction
    out = torch.ones(2, 2).bfloat16()
    at_top = out @ out
    dtypes = [at_top.dtype]
    def loop():
        for _ in range(2):
            product = out @ out
            dtypes.append(product.dtype)
            dtypes.append((out @ out).dtype)
    loop()
"""


@pytest.mark.usefixtures("no_module")
def test_lines_at_module_level_and_in_functions_that_run_compute_in_fp32(tmp_path):
    kept = tuple(KeptFunction(function=f"own_code.py:{line}") for line in (5, 9))
    with plan_in_force(bf16_plan(fp32_functions=kept)):
        found = load(tmp_path, LINES).dtypes
    assert found == [torch.float32] + [torch.float32, torch.bfloat16] * 2
    assert set(load(tmp_path, LINES).dtypes) == {torch.bfloat16}


CHECKPOINTED = """
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last, self.dtypes = nn.Linear(6, 8), nn.Linear(8, 4), []

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=self.reentrant)

        def body(self, x):
            hidden = self.first(x)
            hidden = hidden @ hidden.T @ hidden
            self.dtypes.append(hidden.dtype)
            return self.last(hidden)
"""


@pytest.mark.usefixtures("no_module")
@pytest.mark.parametrize("reentrant", [True, False])
def test_lines_in_a_checkpoint_compute_in_fp32_when_it_runs_again(tmp_path, reentrant):
    model = load(tmp_path, CHECKPOINTED).Model()
    model.reentrant = reentrant
    with plan_in_force(bf16_plan(fp32_functions=(KeptFunction(function="own_code.py:17"),))):
        torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(X.clone().requires_grad_()).sum().backward()
    assert model.dtypes == [torch.float32] * 4


def test_models_that_are_gone_are_let_go():
    with plan_in_force(fp16_plan()):
        alive = []
        for _ in range(3):
            model = small_model()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            model(X).sum().backward()
            opt.step()
            alive.append(weakref.ref(model))
            del model, opt
        gc.collect()
        assert [ref() for ref in alive] == [None] * 3


def test_optimizers_of_inputs_do_not_look_for_models_again(monkeypatch):
    looks = []
    monkeypatch.setattr(in_force, "find_roots", lambda params: looks.append(1) or find_roots(params))
    with plan_in_force(fp16_plan()):
        model = small_model()
        torch.optim.SGD(model.parameters(), lr=0.1)
        for x, _ in batches():
            attack = torch.optim.SGD([x.requires_grad_()], lr=0.1)
            model(x).sum().backward()
            attack.step()
    assert len(looks) == 1


def test_an_optimizer_that_was_copied_is_known_from_its_first_step_on():
    with plan_in_force(fp16_plan()):
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
        model, opt = copy.deepcopy((model, torch.optim.SGD(model.parameters(), lr=0.1)))
        for factor in (1.0, float("inf")):
            opt.zero_grad()
            before = bits(model)
            (model(X).sum() * factor).backward()
            opt.step()
    assert bits(model) == before


def test_a_model_inside_of_a_trainers_module_is_found_once():
    class Trainer(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = small_model()

    trainer = Trainer()
    assert [root is trainer for root in find_roots(trainer.parameters())] == [True]


def test_a_pass_that_is_still_to_come_bears_that_buffers_go_back():
    generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    critic = nn.Linear(8, 1)
    with plan_in_force(fp16_plan()):
        one, other = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic))
        fake = generator(torch.randn(16, 4))
        (critic(fake.detach()).mean() * 1e30).backward()  # its step is left out
        other.step()
        critic(fake).mean().backward()
        one.step()
    assert torch.equal(generator[1].running_mean, torch.zeros(8))
    assert all(p.isfinite().all() for p in (*generator.parameters(), *critic.parameters()))


def test_autocast_is_afterwards_what_it_was():
    before = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
    with plan_in_force(PLANS["fp16-mixed"]), torch.autocast("cpu", dtype=torch.float16):
        pass
    assert (torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")) == before
