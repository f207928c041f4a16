"""The conditioned transformer: its data, its bounds, how it learns in every precision, and how it broke."""

import copy
import math
from pathlib import Path

import pytest
import torch
from tests.slow import slow
from tests.systems.conditioned_bounds import (
    best_conditioned_loss,
    best_unconditioned_loss,
    count_right,
    generate,
    measure_response,
)
from torch import nn

from floatline.diagnosis.target_diagnosis import diagnose
from floatline.errors import TargetError
from floatline.plans.presets import resolve_plan
from floatline.rescuing.rescue import find_plan
from floatline.systems.conditioned import VARIANTS, Config, build, make_data
from floatline.systems.conditioned.data import IGNORED, Sequences, sample_sequences
from floatline.systems.conditioned.model import AccuracyConditioning, Attention, FeedForward
from floatline.training.trainer import Trainer
from floatline.workload import Workload

SMALL = Config(layers=1, num_batches=120)  # its held-out set is that of the default
TOO_LARGE = r"value cannot be converted to type \S*Half without overflow"
ASKED = (0.3, 0.5, 0.7, 0.9)


def plan_of(name):
    plan = resolve_plan(name)
    return plan if plan.weights == "fp32" else plan.model_copy(update={"update": "exact"})


def train(config, plan, steps, workload=None):
    workload = workload or build(config)
    trainer = Trainer(workload, folder=None, plan=plan_of(plan), steps=steps)
    return workload, trainer.run()


@pytest.fixture(scope="module")
def trained():
    """The model in evaluation mode, its metric after 60 steps, and the one after 120, in FP32."""
    workload = build(SMALL)
    trainer = Trainer(workload, folder=None, plan="fp32", steps=120)
    for _ in range(60):
        trainer.step()
    half = trainer.measure()
    return workload.model.eval(), half, trainer.run().metric


@pytest.fixture(scope="module")
def data():
    return make_data(SMALL)


# What is possible on the data


def test_the_best_unconditioned_loss_is_bayes_rule_by_quadrature():
    config = Config(vocabulary=3, num_categories=2, num_accuracies=2, length=5, held_out=40, num_batches=1)
    rules, _, held_out = make_data(config)
    # Gauss and Chebyshev: exact for polynomials, which the likelihood of five tokens is in each accuracy.
    nodes = torch.sin((2 * torch.arange(1, 9, dtype=torch.float64) - 1) * math.pi / 32) ** 2
    total, count = 0.0, 0
    for row in range(len(held_out)):
        before = torch.ones(2, 8, 8, dtype=torch.float64)  # category, first accuracy, second accuracy
        for t, (token, target) in enumerate(zip(held_out.tokens[row], held_out.targets[row], strict=True)):
            if target == IGNORED:
                continue
            accuracy = nodes[:, None].expand(8, 8) if t % 2 == 0 else nodes.expand(8, 8)
            right = (rules[:, token] == target)[:, None, None]
            after = before * torch.where(right, accuracy, (1 - accuracy) / 2)
            total -= float(torch.log(after.mean() / before.mean()))
            count, before = count + 1, after
    assert best_unconditioned_loss(held_out, rules) == pytest.approx(total / count, rel=1e-12)


def test_the_best_conditioned_loss_is_what_the_true_probabilities_get():
    rules = make_data(SMALL)[0]
    drawn = sample_sequences(4000, 16, rules, num_accuracies=2, generator=torch.Generator().manual_seed(5))
    accuracy = drawn.accuracies.double()[:, torch.arange(16) % 2]
    right = rules[drawn.categories[:, None], drawn.tokens.clamp(max=7)] == drawn.targets
    counted = drawn.targets != IGNORED
    losses = -torch.where(right, accuracy, (1 - accuracy) / 7).log()[counted]
    error = 4 * float(losses.std()) / math.sqrt(len(losses))
    assert abs(float(losses.mean()) - best_conditioned_loss(drawn, 8)) < error
    assert abs(float(losses.mean()) - best_conditioned_loss(drawn, 16)) > error  # so that the line above can fail


def test_conditions_are_worth_a_tenth_of_the_loss(data):
    rules, _, held_out = data
    assert best_conditioned_loss(held_out, 8) < 0.92 * best_unconditioned_loss(held_out, rules)


def test_seeds_share_the_task_and_differ_in_weights_and_order():
    first, second = build(SMALL, seed=0), build(SMALL, seed=1)
    tokens = [torch.cat([inputs[0] for inputs, _ in w.batches]) for w in (first, second)]
    assert not torch.equal(*tokens)
    assert sorted(map(tuple, tokens[0].tolist())) == sorted(map(tuple, tokens[1].tolist()))
    assert not torch.equal(first.model.head.weight, second.model.head.weight)
    again = build(SMALL, seed=0)
    assert torch.equal(first.model.head.weight, again.model.head.weight)


# Learning


@slow
@pytest.mark.parametrize("plan", ["fp16-mixed", "bf16-mixed", "fp16-true"])
def test_it_learns_in_16_bits_what_no_model_without_conditions_can(plan, trained, data):
    rules, _, held_out = data
    _, result = train(SMALL, plan, 60)
    assert result.applied >= 56
    assert result.metric < best_unconditioned_loss(held_out, rules)
    assert result.metric == pytest.approx(trained[1], rel=0.02)


def test_it_learns_in_fp32_what_no_model_without_conditions_can(trained, data):
    rules, _, held_out = data
    assert best_conditioned_loss(held_out, 8) < trained[2] < trained[1] < best_unconditioned_loss(held_out, rules)


def test_asked_for_an_accuracy_it_generates_with_about_that_accuracy(trained, data):
    model, (rules, _, held_out) = copy.deepcopy(trained[0]).cpu(), data
    assert measure_response(model, held_out, rules, ASKED) == pytest.approx(ASKED, abs=0.1)
    generator = torch.Generator().manual_seed(1)
    for asked in ASKED:
        categories = torch.arange(240) % 3
        tokens = generate(model, torch.full((240, 1), asked), categories, generator)
        assert float(count_right(tokens, categories, rules).mean()) == pytest.approx(asked, abs=0.1)


@slow
def test_trained_on_accuracies_of_other_rows_it_neither_responds_nor_beats_the_baseline(data):
    rules, _, held_out = data
    made = build(SMALL)
    batches = [((tokens, accuracies.roll(1, 0), of), targets) for (tokens, accuracies, of), targets in made.batches]
    shuffled = Workload(**{**vars(made), "batches": batches})
    workload, result = train(SMALL, "fp32", 70, shuffled)
    assert result.metric > best_unconditioned_loss(held_out, rules)
    answers = measure_response(workload.model.eval(), held_out, rules, ASKED)
    assert max(answers) - min(answers) < 0.02


# Broken, and how


@pytest.mark.parametrize("variant", ["broken", "folk-fix"])
def test_the_mask_raises_in_fp16_and_in_no_other_format(variant):
    config = Config(**VARIANTS[variant])
    with pytest.raises(RuntimeError, match=TOO_LARGE):
        Trainer(build(config), folder=None, steps=1).run()
    for plan in ("fp32", "bf16-mixed"):
        assert train(config, plan, 1)[1].applied == 1


def assert_the_mask_is_named(diagnosis):
    found = diagnosis.primary
    line = Path(found.file).read_text(encoding="utf-8").splitlines()[found.line - 1]
    assert (found.cause.id, found.module) == ("scalar-out-of-range", "blocks.0.attention")
    assert line.strip() == "scores = scores.masked_fill(hidden, -1e9)"


@slow
def test_diagnose_names_the_constant_that_their_fix_left_and_its_line():
    assert_the_mask_is_named(diagnose("conditioned:folk-fix", steps=4))


def test_the_one_line_fixes_it_with_their_relu_left_alone():
    assert VARIANTS["fixed"] == {**VARIANTS["broken"], "mask": "lowest"}
    config = Config(**VARIANTS["fixed"], layers=1)
    result = Trainer(build(config), folder=None, steps=8).run()
    assert (result.applied, result.skipped["overflow"]) == (8, 0)
    assert result.last_loss < result.first_loss


@slow
def test_rescue_names_the_mask_and_its_plan_trains():
    rescued = find_plan("conditioned:broken", steps=8)
    assert_the_mask_is_named(rescued.diagnosis)
    assert [rewrite.kind for rewrite in rescued.plan.rewrites] == ["mask-constant"]
    result = Trainer(build(Config(**VARIANTS["broken"])), folder=None, plan=rescued.plan, steps=6).run()
    assert result.applied == 6


def test_activations_overflow_without_an_error_and_no_step_is_applied():
    config = Config(**VARIANTS["overflow"], num_batches=4)
    result = Trainer(build(config), folder=None, steps=8).run()
    assert result.applied == 0
    assert result.stopped is None
    assert [(number, account.attempted, account.applied) for number, account in result.epochs] == [(0, 4, 0), (1, 4, 0)]


def test_in_fp32_the_scale_that_overflows_changes_no_bit():
    torch.manual_seed(0)
    x = torch.randn(4, 5, 32)
    plain, large = FeedForward(32, scale=1.0, clamp=False), FeedForward(32, scale=32768.0, clamp=False)
    large.load_state_dict(plain.state_dict())
    assert torch.equal(plain(x), large(x))
    assert not torch.isfinite(large.half()(x.half() * 2)).all()
    assert torch.isfinite(plain.half()(x.half() * 2)).all()


def test_the_clamp_makes_inf_a_finite_lie_without_a_gradient():
    inner = torch.tensor([1.0, 4.0], dtype=torch.float16, requires_grad=True)
    clamped = torch.clamp(inner * 32768.0, -65000, 65000)
    clamped.sum().backward()
    assert clamped.tolist() == [32768.0, 64992.0]
    assert inner.grad.tolist() == [32768.0, 0.0]


@slow
def test_the_plan_of_a_rescue_trains_what_overflowed():
    rescued = find_plan("conditioned:overflow", steps=8)
    primary = rescued.diagnosis.primary
    assert (primary.cause.id, primary.module) == ("product-overflow", "blocks.0.feed_forward")
    result = Trainer(build(Config(**VARIANTS["overflow"])), folder=None, plan=rescued.plan, steps=6).run()
    assert result.applied == 6


# Settings


def test_use_mixed_precision_decides_the_plan_and_the_scaler_is_the_teams():
    assert build(Config(use_mixed_precision=False, num_batches=1)).precision.name == "fp32"
    plan = build(Config(num_batches=1)).precision
    scaling = plan.scaling
    assert (plan.weights, plan.compute) == ("fp32", "fp16")
    assert (scaling.init_scale, scaling.growth_factor) == (2.0**16, 2.0)
    assert (scaling.backoff_factor, scaling.growth_interval) == (0.5, 2000)


def test_heads_that_do_not_divide_the_width_are_refused_in_one_line():
    with pytest.raises(TargetError, match="heads is 3, which does not divide width 32"):
        Config(heads=3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_a_config(variant):
    config = Config(**VARIANTS[variant])
    assert config != Config()


# Extreme values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_conditioning_is_bounded_and_clamps_what_lies_outside(dtype):
    torch.manual_seed(0)
    module = AccuracyConditioning(1, 3, 32, kind="bounded").to(dtype)
    asked = torch.tensor([[-math.inf], [-1.0], [0.0], [1.0], [7.0], [65504.0], [math.inf]], dtype=dtype)
    out = module(asked, torch.zeros(7, dtype=torch.long))
    assert float(out.detach().abs().max()) <= 1
    assert torch.equal(out[:2], out[2:3].expand(2, -1))
    assert torch.equal(out[4:], out[3:4].expand(3, -1))


def test_layer_norm_bounds_their_relu_already():
    torch.manual_seed(0)
    module = AccuracyConditioning(1, 3, 32, kind="relu")
    nn.init.zeros_(module.category_embedding.weight)
    out = module(torch.tensor([[1e15], [-1e15], [1e9]]), torch.zeros(3, dtype=torch.long))
    assert 1 < float(out.detach().abs().max()) <= math.sqrt(31)


def test_gelu_is_not_bounded():
    assert float(nn.functional.gelu(torch.tensor(60000.0))) == 60000.0


def test_clamping_keeps_nan():
    assert torch.clamp(torch.tensor([math.nan, math.inf]).half(), -65000, 65000).isnan().tolist() == [True, False]


def test_a_nan_accuracy_skips_the_step_and_leaves_the_weights():
    made = build(Config(layers=1, num_batches=2))
    (tokens, accuracies, of), targets = made.batches[1]
    spoilt = accuracies.clone()
    spoilt[3] = math.nan
    workload = Workload(**{**vars(made), "batches": [made.batches[0], ((tokens, spoilt, of), targets)]})
    trainer = Trainer(workload, folder=None, steps=2)
    with trainer.arithmetic():
        trainer.step()
        before = {name: value.clone() for name, value in workload.model.state_dict().items()}
        outcome = trainer.step()
    assert not outcome.applied
    assert all(torch.equal(before[name], value) for name, value in workload.model.state_dict().items())
    trainer.guard.close()


@pytest.mark.parametrize("categories", [[0, 3], [0, -1]])
def test_a_category_that_does_not_exist_is_refused_in_one_line(trained, categories):
    said = rf"^Category {categories[1]} of row 1 does not exist. Give a number from 0 to 2.$"
    with pytest.raises(TargetError, match=said):
        trained[0](torch.zeros(2, 4, dtype=torch.long), torch.full((2, 1), 0.5), torch.tensor(categories))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_row_that_sees_nothing_is_finite(dtype):
    torch.manual_seed(0)
    attention = Attention(32, 2, mask="lowest").to(dtype)
    hidden = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    out = attention(torch.randn(1, 4, 32).to(dtype), hidden)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(param.grad.isfinite().all() for param in attention.parameters())


def test_a_sequence_of_padding_alone_is_finite_and_changes_no_other(trained):
    model = trained[0].cpu()
    tokens = torch.tensor([[0, 1, 2, 3], [8, 8, 8, 8]])
    accuracies, of = torch.tensor([[0.9], [0.9]]), torch.tensor([1, 1])
    both = model(tokens, accuracies, of)
    assert both.isfinite().all()
    torch.testing.assert_close(both[:1], model(tokens[:1], accuracies[:1], of[:1]))


def test_padding_that_is_cut_off_changes_nothing_before_it(trained, data):
    model, held_out = trained[0].cpu(), data[2].rows(slice(0, 8))
    cut = Sequences(held_out.tokens[:, :8], held_out.accuracies, held_out.categories, held_out.targets[:, :8])
    torch.testing.assert_close(model(*held_out.inputs)[:, :8], model(*cut.inputs), rtol=1e-4, atol=1e-4)
