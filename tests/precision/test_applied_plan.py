"""A plan applied: functions, lines and the loss in FP32, rewrites, all without an edit, and all put back."""

import copy
import gc
import inspect
import math
import re
import weakref

import pytest
import torch
from tests.precision import losses_for_plans as losses
from tests.precision.losses_for_plans import dice, squares
from tests.slow import slow
from torch import nn
from torch.utils.checkpoint import checkpoint

from floatline.errors import GuardError, PlanError
from floatline.guard.guard import Guard
from floatline.plans import KeptFunction, KeptModule, Plan, Rewrite
from floatline.precision.applied_plan import AppliedPlan
from floatline.precision.islands import Islands
from floatline.precision.placements import describe_plan, place_modules

HERE = "losses_for_plans.py"
MIXED = {"weights": "fp32", "compute": "fp16"}


def keeping(*functions, rewrites=(), modules=(), **dtypes):
    return Plan(
        name="mine",
        **(dtypes or MIXED),
        fp32_functions=tuple(KeptFunction(function=name, reason="sums") for name in functions),
        fp32_modules=tuple(KeptModule(pattern=name) for name in modules),
        rewrites=tuple(rewrites),
    )


@pytest.fixture
def apply():
    made = []

    def apply(plan, model=None, **options):
        made.append(AppliedPlan(model or nn.Linear(2, 2), plan, **options))
        return made[-1]

    yield apply
    for applied in made:
        applied.remove()


def autocast(dtype=torch.float16):
    return torch.autocast("cpu", dtype=dtype)


def halves(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


# --- functions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "tests.precision.losses_for_plans.dice",
        "tests.precision.losses_for_plans:dice",
        f"{HERE}:dice",
        f"precision/{HERE}:dice",
    ],
)
def test_a_function_computes_in_fp32_however_it_is_named_and_reached(apply, name):
    x, t = (halves(50000) * 5), torch.ones(50000).half()
    expected = dice(x.float(), t.float())
    assert not torch.equal(dice(x, t).float(), expected)
    apply(keeping(name))
    for function in (dice, losses.dice):  # `from … import dice` holds it as well
        assert torch.equal(function(x, t), expected)
    assert dice(x, t).dtype == torch.float32  # one number does not widen what it meets


def test_gradients_are_those_of_fp32_rounded_once(apply):
    x, t = halves(4096).requires_grad_(), torch.ones(4096).half()
    wide = x.detach().float().requires_grad_()
    dice(wide, t.float()).backward()
    apply(keeping(f"{HERE}:dice"))
    dice(x, t).backward()
    assert torch.equal(x.grad, wide.grad.half())


def test_inputs_are_widened_at_any_place_and_autocast_is_off(apply):
    apply(keeping(f"{HERE}:seen_dtypes"))
    with autocast():
        assert losses.seen_dtypes(halves(2), more=halves(2).bfloat16()) == (torch.float32, torch.float32, False)
        assert torch.is_autocast_enabled("cpu")
    assert losses.seen_dtypes(torch.ones(2, dtype=torch.float64))[0] == torch.float64


def test_tensors_go_back_to_the_inputs_dtype_without_autocast_and_stay_fp32_with_it(apply):
    apply(keeping(f"{HERE}:Head.norm"))
    x = halves(3, 8) * 300
    expected = x.float() / x.float().square().sum(-1, keepdim=True).sqrt()
    assert torch.equal(losses.Head.norm(x), expected.half())
    with autocast():
        assert torch.equal(losses.Head.norm(x), expected)


def test_a_method_of_a_module_has_fp32_weights(apply):
    model = losses.Head().half()
    twin = copy.deepcopy(model).float()
    x = halves(3, 8) * 300
    assert bool(model.scores(x).isinf().any())
    apply(keeping(f"{HERE}:Head.forward"), model)
    assert torch.equal(model(x), twin(x.float()).half())
    assert model.weight.dtype == torch.float16


def test_closures_keep_what_they_captured(apply):
    scaled = losses.make_scaled(300.0)
    apply(keeping(f"{HERE}:scaled"), loss_fn=scaled)
    assert scaled(halves(8) * 300).isfinite()
    assert losses.make_scaled(2.0)(torch.ones(3)) == 6  # another object of the same code is another function


def test_a_line_computes_in_fp32_and_no_other(apply):
    line = next(i for i, text in enumerate(inspect.getsource(losses).splitlines(), 1) if "big * big" in text)
    x = halves(8)
    assert squares(x).isinf()
    apply(keeping(f"{HERE}:{line}"))
    big = (x * 300).float()
    assert torch.equal(squares(x), (big * big).mean() * 1.0)


def test_a_line_whose_code_has_moved_is_refused_and_its_new_place_is_named(apply):
    source = inspect.getsource(losses).splitlines()
    line = next(i for i, text in enumerate(source, 1) if "big * big" in text)
    code = source[line - 1].strip()

    def plan_for(number: int, code: str) -> Plan:
        kept = KeptFunction(function=f"{HERE}:{number}", code=code)
        return keeping().model_copy(update={"fp32_functions": (kept,)})

    with pytest.raises(PlanError, match=rf"'{re.escape(code)}' is not on that line\. It is on line {line} now"):
        AppliedPlan(nn.Linear(2, 2), plan_for(line - 1, code))
    with pytest.raises(PlanError, match=r"is not on that line\. Make the plan again\."):
        AppliedPlan(nn.Linear(2, 2), plan_for(line, "gone = 1"))
    apply(plan_for(line, code))
    assert squares(halves(8)).isfinite()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes_in_fp32(apply, dtype, reentrant):
    apply(keeping(f"{HERE}:dice"))
    t = torch.ones(256)

    def gradient(run):
        x = halves(256).float().requires_grad_()
        with autocast(dtype):
            run(lambda x: dice(x.to(dtype), t), x).backward()
        return x.grad

    plain = gradient(lambda f, x: f(x))
    assert torch.equal(gradient(lambda f, x: checkpoint(f, x, use_reentrant=reentrant)), plain)


@slow
def test_a_compiled_caller_gets_the_fp32_function(apply):
    def step(x, t):
        return dice(x * 2, t) + 1

    x, t = halves(4096), torch.ones(4096).half()
    before = torch.compile(step, backend="aot_eager")(x, t)
    applied = apply(keeping(f"{HERE}:dice"))
    expected = dice((x * 2).float(), t.float()) + 1
    compiled = torch.compile(step, backend="aot_eager")
    assert torch.equal(compiled(x, t), expected)
    assert not torch.equal(before.float(), expected)
    applied.remove()
    assert torch.equal(compiled(x, t), before)


def test_everything_is_put_back(apply):
    signature, code = inspect.signature(dice), dice.__code__
    applied = apply(keeping(f"{HERE}:dice", f"{HERE}:squares"))
    assert inspect.signature(dice) == signature
    assert dice.__code__ is not code
    applied.remove()
    assert dice.__code__ is code
    assert dice.__kwdefaults__ is None
    assert losses.seen_dtypes.__kwdefaults__ == {"more": None}
    assert dice(halves(4), halves(4)).dtype == torch.float16


def test_two_plans_at_once_are_undone_in_any_order(apply):
    code = dice.__code__
    first, second = apply(keeping(f"{HERE}:dice")), apply(keeping(f"{HERE}:dice"))
    first.remove()
    assert dice(halves(4), halves(4)).dtype == torch.float32
    second.remove()
    assert dice.__code__ is code


def test_a_run_that_is_forgotten_changes_nothing_any_more():
    applied = AppliedPlan(nn.Linear(2, 2), keeping(f"{HERE}:dice"))
    gone = weakref.ref(applied)
    assert dice(halves(4), halves(4)).dtype == torch.float32
    del applied
    gc.collect()
    assert gone() is None
    assert dice(halves(4), halves(4)).dtype == torch.float16


def test_paused_is_as_written(apply):
    model = nn.Linear(8, 8).half()
    applied = apply(keeping(f"{HERE}:dice", rewrites=[Rewrite(kind="log-sigmoid", function="loss")]), model,
                    loss_fn=losses.adversary)  # fmt: skip
    applied.islands.add("")
    with applied.paused():
        assert dice(halves(4), halves(4)).dtype == torch.float16
        assert applied.loss_fn(torch.tensor([30.0])).item() == math.inf
        assert model(halves(1, 8)).dtype == torch.float16
    assert dice(halves(4), halves(4)).dtype == torch.float32
    assert applied.loss_fn(torch.tensor([30.0])).item() == 30.0
    assert model(halves(1, 8)).dtype == torch.float32


# --- the loss ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: lambda x, t: ((x * 300).square()).mean(), nn.MSELoss])
def test_the_loss_is_wrapped_whatever_it_is(apply, make):
    loss_fn = make()
    applied = apply(keeping("loss", weights="fp16", compute="fp16"), loss_fn=loss_fn)
    x, t = halves(64) * 200, halves(64, seed=1)
    assert torch.equal(applied.loss_fn(x, t), loss_fn(x.float(), t.float()))


def test_the_loss_is_as_written_when_the_plan_is_removed(apply):
    applied = apply(keeping(rewrites=[Rewrite(kind="log-sigmoid", function="loss")]), loss_fn=losses.adversary)
    x = torch.tensor([30.0]).half()
    assert applied.loss_fn(x).item() == 30.0
    applied.remove()
    assert applied.loss_fn(x).item() == math.inf


def test_weights_of_a_loss_module_are_widened(apply):
    loss_fn = nn.BCEWithLogitsLoss(pos_weight=torch.full((4,), 3.0)).half()
    applied = apply(keeping("loss"), loss_fn=loss_fn)
    x, t = halves(4), torch.ones(4).half()
    assert torch.equal(applied.loss_fn(x, t), copy.deepcopy(loss_fn).float()(x.float(), t.float()))
    assert applied.loss_fn.reduction == "mean"


def test_a_plan_that_names_the_loss_needs_one():
    with pytest.raises(PlanError, match=r"names the loss, and no loss function is given\. Give loss_fn"):
        AppliedPlan(nn.Linear(2, 2), keeping("loss"))


# --- rewrites ----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def forward(self, x, mask):
        return (x @ x.transpose(-1, -2)).masked_fill(mask, -1e9).softmax(-1) @ x


def test_a_modules_mask_constant(apply):
    model = nn.ModuleDict({"attention": Attention()})
    x, mask = halves(2, 5, 8), torch.ones(5, 5).triu(1).bool()
    with pytest.raises(RuntimeError, match="without overflow"):
        model["attention"](x, mask)
    applied = apply(keeping(rewrites=[Rewrite(kind="mask-constant", module="type:Attention")]), model)
    expected = ((x @ x.transpose(-1, -2)).float().masked_fill(mask, -1e9).softmax(-1).half()) @ x
    assert torch.equal(model["attention"](x, mask), expected)
    assert torch.equal(copy.deepcopy(model)["attention"](x, mask), expected)
    applied.islands.add("attention")  # an island around a rewrite, and away again
    assert torch.equal(model["attention"](x.float(), mask), Attention()(x.float(), mask))
    applied.remove()
    assert "forward" not in vars(model["attention"])


def test_a_function_is_rewritten_where_it_is_named_only(apply):
    x = torch.tensor([30.0]).half()
    assert losses.adversary(x).isinf()
    apply(keeping(rewrites=[Rewrite(kind="log-sigmoid", function=f"{HERE}:adversary")]))
    assert losses.adversary(x).item() == 30.0
    assert torch.log(1 - torch.sigmoid(x)).isinf()


def test_a_compiled_model_is_rewritten(apply):
    model = nn.ModuleDict({"attention": Attention()})
    x, mask = halves(2, 5, 8), torch.ones(5, 5).triu(1).bool()
    apply(keeping(rewrites=[Rewrite(kind="mask-constant", module="attention")]), model)
    expected = model["attention"](x, mask)
    compiled = torch.compile(lambda x, m: model["attention"](x, m) * 1, backend="aot_eager")
    assert torch.equal(compiled(x, mask), expected)


# --- what does not fit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            f"{HERE}:dise",
            r"keeps 'losses_for_plans\.py:dise' in FP32, but there is no such function\. Did you mean 'dice'",
        ),
        ("loses_for_plans.py:dice", r"but no such file is loaded\. Did you mean 'losses_for_plans\.py'"),
        ("tests.precision.losses_for_plans.Head.score", r"no such function\. Did you mean 'Head\.scores'"),
        ("nowhere.at.all", r"no module that is loaded has it\. Name it as file\.py:function"),
        (f"{HERE}:1", r"that line is in no function of the file\. Nearest lines with code: \d+, \d+, \d+\."),
        (f"{HERE}:numbers", r"it is a generator or a coroutine\. Name a function"),
        ("os.fsencodes", r"no such function"),
        ("math.sin", r"no such function"),
    ],
)
def test_a_function_that_is_not_there_gets_one_line_with_the_nearest(name, words):
    code = dice.__code__
    with pytest.raises(PlanError, match=words) as caught:
        AppliedPlan(nn.Linear(2, 2), keeping(f"{HERE}:dice", name))
    assert "\n" not in str(caught.value)
    assert dice.__code__ is code  # nothing was done


def test_a_name_does_not_load_anything():
    import sys

    assert "this" not in sys.modules
    with pytest.raises(PlanError):
        AppliedPlan(nn.Linear(2, 2), keeping("this.main"))
    assert "this" not in sys.modules


def test_a_line_of_a_running_function_is_refused():
    line = inspect.currentframe().f_lineno
    with pytest.raises(PlanError, match="is running already. Move it to one of its own"):
        AppliedPlan(
            nn.Linear(2, 2), keeping(f"test_applied_plan.py:{line}"),
            loss_fn=test_a_line_of_a_running_function_is_refused,
        )  # fmt: skip


def test_a_rewrite_of_a_module_that_is_not_there():
    with pytest.raises(
        PlanError, match=r"rewrites in 'type:Atention', but the model has no such type\. Did you mean 'Attention'"
    ):
        AppliedPlan(
            nn.ModuleDict({"a": Attention()}),
            keeping(rewrites=[Rewrite(kind="mask-constant", module="type:Atention")]),
        )  # fmt: skip


def test_a_guard_refuses_the_state_of_a_plan_with_other_functions():
    model = nn.Linear(4, 4)
    guard = Guard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), plan=keeping(f"{HERE}:dice", weights="fp32", compute="fp32")
    )
    tensors, state = guard.state_dict()
    guard.close()
    other = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan="fp32")
    with pytest.raises(GuardError, match="has other fp32_functions than the guard's"):
        other.load_state_dict(tensors, state)


def test_a_guard_refuses_another_update_than_the_plans():
    model = nn.Linear(4, 4).bfloat16()
    plan = Plan(name="p", weights="bf16", compute="bf16", update="kahan")
    with pytest.raises(
        GuardError,
        match=r"asks for update='kahan', and SGD has neither\. Make the guard with floatline\.optim\.convert",
    ):
        Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)  # fmt: skip


# --- types and predicates ----------------------------------------------------------------------------------------


class Norm(nn.LayerNorm):
    pass


def blocks(num=4):
    def block():
        return nn.ModuleDict({"ff": nn.Linear(8, 8), "norm": Norm(8), "act": nn.ReLU()})

    return nn.ModuleDict({"blocks": nn.ModuleList(block() for _ in range(num)), "head": nn.Linear(8, 2)})


@pytest.mark.parametrize(("pattern", "count"), [("type:Norm", 4), ("type:LayerNorm", 4), ("type:Lin*", 5), ("*.ff", 4)])
def test_types_match_classes_and_what_they_are_made_from(pattern, count):
    plan = Plan(**MIXED, fp32_modules=(KeptModule(pattern=pattern),))
    assert len(plan.check_modules(blocks())) == count


def test_a_type_that_is_not_there_names_the_nearest():
    plan = Plan(**MIXED, fp32_modules=(KeptModule(pattern="type:Norms"),))
    with pytest.raises(
        PlanError, match=r"keeps 'type:Norms' in FP32, but the model has no such type\. Did you mean 'Norm'"
    ):
        plan.check_modules(blocks())


def test_a_predicate_chooses_islands():
    islands = Islands(blocks(), select=lambda name, module: isinstance(module, nn.Linear) and "1" in name)
    assert islands.names == ("blocks.1.ff",)


# --- where each module ended up ----------------------------------------------------------------------------------


def test_the_table_groups_equal_siblings_and_shows_exceptions():
    plan = Plan(
        **MIXED,
        fp32_modules=(KeptModule(pattern="blocks.2.ff", reason="reaches 1e5"),),
        fp32_functions=(KeptFunction(function="loss", reason="sums"),),
        rewrites=(Rewrite(kind="mask-constant", module="blocks.*"),),
    )
    assert describe_plan(blocks(), plan).splitlines() == [
        "module                weights  compute    why",
        "blocks.*.ff (3 else)  fp32     fp16       plan: compute",
        "blocks.2.ff           fp32     fp32       kept: blocks.2.ff (reaches 1e5)",
        "blocks.*.norm (4)     fp32     fp32       autocast keeps it in fp32",
        "blocks.*.act (4)      -        as inputs  autocast leaves it",
        "head                  fp32     fp16       plan: compute",
        "loss: in fp32 (sums)",
        "blocks.*: mask-constant rewritten",
    ]


def test_the_table_tells_what_casting_does():
    from floatline.precision.islands import cast_weights

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    model(torch.randn(1, 3, 6, 6))
    plan = Plan(weights="bf16", compute="bf16", fp32_modules=(KeptModule(pattern="4"),))
    told = {row.name: row.weights for row in place_modules(model, plan)}
    cast_weights(model, plan)
    names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    for name, weights in told.items():
        found = {names[p.dtype] for p in model.get_submodule(name).parameters()}
        assert found == ({weights} if weights else set()), name
    assert told["1"] == told["4"] == "fp32"


def test_a_guard_shows_what_it_added_itself():
    model = blocks()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=Plan(**MIXED))
    guard.run.islands.add("blocks.1")
    assert "blocks.1           fp32     fp32       raised during the run" in guard.describe_plan()
    guard.close()


def test_doctor_says_what_a_plan_keeps():
    from floatline.checkup.advice import note_kept

    plan = Plan(
        name="mine",
        **MIXED,
        fp32_modules=(KeptModule(pattern="head", reason="logits reach 1e5"),),
        fp32_functions=(KeptFunction(function="loss"),),
        rewrites=(Rewrite(kind="mask-constant", module="blocks.*"),),
    )
    (note,) = note_kept(blocks(), plan)
    assert note.text == (
        "Plan mine keeps 1 of 13 modules in FP32: head (logits reach 1e5). In FP32 as well: loss. "
        "Rewritten: mask-constant in blocks.*."
    )
    assert note_kept(blocks(), Plan(**MIXED)) == []
