"""The dbnet workload: it learns in every plan, loses its sums silently, and the true causes are named."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.slow import slow

from floatline.diagnosis.target_diagnosis import diagnose
from floatline.errors import TargetError
from floatline.plans import Plan
from floatline.plans.presets import resolve_plan
from floatline.rescuing.rescue import find_plan
from floatline.systems import dbnet
from floatline.systems.dbnet.boxes import find_words, match_words
from floatline.systems.dbnet.losses import compute_loss, compute_loss_as_it_comes
from floatline.systems.dbnet.model import Binarization, Predicted
from floatline.systems.dbnet.scenes import IGNORED, Scene
from floatline.systems.dbnet.targets import make_maps, offset, shrink_distance
from floatline.training.trainer import Trainer
from floatline.workload import load_target

TINY = {"image_size": 64, "words": 3, "text_height": (12, 18), "num_images": 16, "held_out": 8, "batch_size": 4}
TINY |= {"widths": (8, 8, 8), "depth": (1, 1, 1), "neck": 8, "head": 8, "learning_rate": 0.02, "total_steps": 12}
EXACT = resolve_plan("fp16-true").model_copy(update={"update": "exact"})
WORD = np.array([[10, 20], [50, 20], [50, 36], [10, 36]], np.float32)


@pytest.mark.parametrize("plan", ["fp32", "fp16-mixed", "bf16-mixed", EXACT], ids=["fp32", "fp16", "bf16", "fp16-true"])
def test_the_loss_falls_in_every_plan(plan: Plan | str) -> None:
    result = Trainer(dbnet.build(dbnet.Config(**TINY)), plan=plan, folder=None, steps=12).run(evaluate=False)
    assert result.applied >= 10
    assert result.first_loss is not None and result.last_loss is not None
    assert result.last_loss < 0.85 * result.first_loss


@pytest.mark.parametrize(("limit", "told"), [(1e-6, True), (1e9, False)])
def test_a_norm_above_the_limit_is_told_and_trained_on(
    limit: float, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = dbnet.build(dbnet.Config(**TINY, warn_norm_above=limit))
    result = Trainer(workload, plan="fp32", folder=None, steps=1).run(evaluate=False)
    assert result.applied == 1
    assert ("large gradient norm in step 1" in capsys.readouterr().err) is told


def test_maps_of_the_words_themselves_are_found_and_beat_brightness() -> None:
    _, held_out = dbnet.find_scenes(dbnet.Config(num_images=1, held_out=12))
    found = [match_words(find_words(make_maps(scene).text), scene.polygons, scene.ignored) for scene in held_out]
    assert sum(found[1:], found[0]).hmean > 0.97
    assert 0.2 < dbnet.measure_baseline(held_out) < 0.8


def test_an_untrained_model_is_below_brightness() -> None:
    config = dbnet.Config(**TINY)
    workload = dbnet.build(config)
    assert workload.evaluate is not None
    with torch.no_grad():
        assert workload.evaluate(workload.model.eval()) < dbnet.measure_baseline(dbnet.find_scenes(config)[1])


def test_a_seed_changes_weights_and_order_but_not_the_task() -> None:
    config = dbnet.Config(**TINY)
    first, second = dbnet.build(config, seed=0), dbnet.build(config, seed=1)
    assert not torch.equal(first.model.backbone.stem.weight, second.model.backbone.stem.weight)
    images = [torch.cat([inputs[0] for inputs, _ in each.batches]) for each in (first, second)]
    assert not torch.equal(*images)
    assert torch.equal(*(each.sum((1, 2, 3)).sort().values for each in images))
    assert torch.equal(dbnet.build(config, seed=1).batches[2][0][0], second.batches[2][0][0])


def test_a_scene_stays_the_same_when_there_are_more_of_them() -> None:
    few, many = (dbnet.find_scenes(dbnet.Config(**{**TINY, "num_images": num}))[0] for num in (2, 3))
    assert np.array_equal(few[1].image, many[1].image) and few[1].texts == many[1].texts


def test_words_are_shrunk_by_the_papers_distance() -> None:
    assert shrink_distance(WORD) == pytest.approx(40 * 16 * (1 - 0.4**2) / 112)
    maps = make_maps(Scene(np.zeros((64, 64), np.float32), [WORD], ["word"]))
    rows, columns = np.nonzero(maps.text)
    assert (columns.min(), columns.max(), rows.min(), rows.max()) == (15, 45, 25, 31)
    assert maps.threshold.max() == pytest.approx(0.7) and maps.threshold.min() == pytest.approx(0.3)
    assert maps.threshold[20, 30] == pytest.approx(0.7) and maps.threshold[28, 30] == pytest.approx(0.3)
    assert maps.text_mask.all()


def test_an_ignored_word_is_masked_and_not_learnt() -> None:
    maps = make_maps(Scene(np.zeros((64, 64), np.float32), [WORD], [IGNORED]))
    assert not maps.text.any() and not maps.threshold_mask.any()
    assert maps.text_mask[28, 30] == 0 and maps.text_mask[5, 5] == 1


def test_matches_are_counted_as_in_the_icdar_protocol() -> None:
    far, near = WORD + 100, WORD + 2
    found = match_words([near, near, far], [WORD], [False])
    assert (found.matched, found.words, found.boxes) == (1, 1, 3)
    assert found.hmean == pytest.approx(2 * (1 / 3) / (1 + 1 / 3))
    ignored = match_words([near, far], [WORD], [True])
    assert (ignored.matched, ignored.words, ignored.boxes) == (0, 0, 1)
    assert match_words([WORD + 30], [WORD], [False]).matched == 0
    assert match_words([], [], []).hmean == 0


def test_growing_undoes_shrinking() -> None:
    (shrunk,) = offset(WORD, -4.0)
    (grown,) = offset(shrunk, 4.0)
    assert match_words([grown], [WORD], [False]).matched == 1
    assert offset(WORD, -9.0) == []


def predict(logits: torch.Tensor, dtype: torch.dtype, *, step: str = "sigmoid", arithmetic: str) -> Predicted:
    return Binarization(step, arithmetic)(logits.to(dtype), torch.zeros_like(logits, dtype=dtype))


def test_both_steps_and_both_losses_are_the_same_in_fp32() -> None:
    batch = dbnet.build(dbnet.Config(**TINY)).batches[0][1]
    logits = torch.randn(batch[0].shape, generator=torch.Generator().manual_seed(0))
    sigmoid = predict(logits, torch.float32, arithmetic="fp32")
    written = predict(logits, torch.float32, step="exponential", arithmetic="as-it-comes")
    torch.testing.assert_close(sigmoid.binary, written.binary)
    torch.testing.assert_close(compute_loss(sigmoid, *batch), compute_loss_as_it_comes(written, *batch))


@pytest.mark.parametrize(("arithmetic", "finite"), [("as-it-comes", False), ("fp32", True)])
def test_the_papers_formula_has_no_gradient_in_fp16_where_it_is_steep(arithmetic: str, finite: bool) -> None:
    logits = torch.tensor([-2.0, 0.0]).requires_grad_()
    step = predict(logits, torch.float16, step="exponential", arithmetic=arithmetic).binary
    assert float(step[0].detach()) < 1e-6
    step.float().sum().backward()
    assert bool(logits.grad.isfinite().all()) is finite


def dense(num_pixels: int) -> tuple[torch.Tensor, ...]:
    """Targets with so many pixels, an eighth of them text."""
    text = (torch.arange(num_pixels) % 8 == 0).float().reshape(1, 1, -1)
    return text, torch.ones_like(text), torch.full_like(text, 0.3), torch.zeros_like(text)


@pytest.mark.parametrize(("num_pixels", "lost"), [(100_000, False), (200_000, True)])
def test_a_count_above_65504_silences_a_batch_in_fp16(num_pixels: int, lost: bool) -> None:
    targets = dense(num_pixels)
    logits = torch.full_like(targets[0], -2.0).requires_grad_()
    loss = compute_loss_as_it_comes(predict(logits, torch.float16, arithmetic="as-it-comes"), *targets)
    loss.backward()
    assert bool(loss.isfinite()) and bool(logits.grad.isfinite().all())
    assert (float(loss.detach()) == 1.0) is lost
    right = compute_loss(predict(logits, torch.float16, arithmetic="fp32"), *targets)
    assert float(right.detach()) > 4


def test_the_papers_formula_skips_steps_in_fp16_while_the_loss_is_finite() -> None:
    workload = dbnet.build(dbnet.Config(**{**TINY, **dbnet.VARIANTS["steep"]}))
    result = Trainer(workload, folder=None, steps=6).run(evaluate=False)
    assert result.applied == 0 and result.skipped["overflow"] == 6 and result.last_loss is not None


# A batch full of text, and a small model.
FULL = """
from floatline.systems import dbnet

SMALL = {"num_images": 12, "batch_size": 12, "learning_rate": 0.01, "held_out": 2, "words": 14}
SMALL |= {"widths": (4, 4), "depth": (1, 1), "neck": 4, "head": 4}


def build(seed=0, arithmetic="as-it-comes"):
    config = {**dbnet.VARIANTS["broken"], **SMALL, "total_steps": 16, "data_seed": 3, "arithmetic": arithmetic}
    return dbnet.build(dbnet.Config(**config), seed=seed)


def build_right(seed=0):
    return build(seed, "fp32")
"""


def write_target(folder: Path) -> Path:
    target = folder / "full.py"
    target.write_text(FULL, encoding="utf-8")
    return target


def train(target: str, plan: str) -> tuple[list[float], int, float]:
    """Train; the losses that were seen, the steps that were applied, and the loss in FP32 at the end."""
    losses: list[float] = []
    workload = load_target(target).build(seed=0)
    trainer = Trainer(workload, plan=plan, folder=None, steps=16, on_step=lambda done: losses.append(float(done.loss)))
    result = trainer.run(evaluate=False)
    inputs, targets = workload.batches[0]
    with torch.no_grad():
        left = compute_loss(workload.model.cpu()(*inputs), *targets)
    return losses, result.applied, float(left)


@slow
def test_the_lost_sums_cost_learning_without_a_sound(tmp_path: Path) -> None:
    target = str(write_target(tmp_path))
    wide, half, right = (
        train(name, plan)
        for name, plan in ((target, "fp32"), (target, "fp16-mixed"), (f"{target}:build_right", "fp16-mixed"))
    )
    for losses, applied, _ in (wide, half, right):
        assert np.isfinite(losses).all() and applied >= 7
    # The loss of the broken run is the lower one: it lacks terms.
    assert half[0][-1] < 0.5 * wide[0][-1]
    assert half[2] > 1.1 * wide[2]
    assert right[2] < 1.05 * wide[2]


@slow
@pytest.mark.parametrize(("name", "cause"), [("build", "reduction-overflow"), ("build_right", None)])
def test_lost_sums_are_named_though_all_steps_went_into_the_search_for_a_scale(
    tmp_path: Path, name: str, cause: str | None
) -> None:
    found = diagnose(f"{write_target(tmp_path)}:{name}", steps=1)
    assert (found.primary.cause.id if found.primary else None) == cause


@slow
def test_a_plan_that_trains_is_found_for_the_lost_sums(tmp_path: Path) -> None:
    rescued = find_plan(str(write_target(tmp_path)), steps=3)
    primary = rescued.diagnosis.primary
    assert primary is not None and primary.cause.id == "reduction-overflow"
    assert Path(primary.file).name == "losses.py"
    assert rescued.plan is not None and rescued.plan.compute == "fp16"
    assert rescued.plan.fp32_modules or rescued.plan.fp32_functions


def test_the_learning_rate_rises_and_falls_to_0_by_the_end() -> None:
    shares = [dbnet.share_of_rate(step, 40) for step in range(42)]
    assert max(shares) == shares[3] == 1 and shares[0] == 0.25
    assert shares[39] == pytest.approx(1 / 37) and shares[40:] == [0, 0]
    config = dbnet.Config(**{**TINY, "total_steps": 3})
    trainer = Trainer(dbnet.build(config), plan="fp32", folder=None, steps=4)
    trainer.run(evaluate=False)
    assert trainer.guard.run.optimizer.param_groups[0]["lr"] == 0


@pytest.mark.parametrize(
    "setting", ["learning_rat=0.1", "image_size=100", "arithmetic=fp8", "text_height=[20,10]", "depth=[1]"]
)
def test_a_wrong_setting_is_one_line(setting: str) -> None:
    with pytest.raises(TargetError) as error:
        load_target("dbnet", pairs=[setting])
    assert "\n" not in str(error.value) and setting.partition("=")[0] in str(error.value)


def test_the_safe_preset_is_the_teams() -> None:
    plan = dbnet.make_plan(dbnet.Config(**dbnet.VARIANTS["fp16_safe"]))
    assert plan.compute == "fp16" and plan.accumulate == 2
    assert plan.clip is not None and plan.clip.max_norm == 5.0
