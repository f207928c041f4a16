"""fl.manifest: what live objects hold, and what one real step shows; the step itself stays what it was."""

import contextlib
import math

import pytest
import torch
from tests.manifests import toys
from torch import nn

import floatline as fl
from floatline.errors import ManifestError
from floatline.manifests import Manifest
from floatline.precision.holding import formats_of

BF16 = torch.bfloat16


def test_fp32_is_fp32_as_believed():
    found = toys.measure(toys.make())
    assert found.summary.startswith("FP32 as believed: weights FP32, gradients FP32, states FP32")
    assert found.lines == ()
    found.check("fp32")


def test_bf16_weights_lose_updates_and_fp32_weights_under_autocast_do_not():
    broken, healthy = toys.measure(toys.make(dtype=BF16)), toys.measure(toys.make(), autocast=BF16)
    assert "BF16 weights without a master copy" in toys.text(broken)
    assert "round away" not in toys.text(healthy)
    healthy.check("bf16-mixed")
    with pytest.raises(ManifestError, match="weights: expected fp32, found bf16"):
        broken.check("bf16-mixed")


def test_the_share_of_lost_updates_is_the_share_of_weights_that_stay():
    model = toys.make(dtype=BF16)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = toys.adamw(model)
    found = fl.manifest(model, optimizer, step=toys.step_of(model, optimizer))
    moves = [p.grad != 0 for p in model.parameters()]
    lost = [(p.detach() == old) & move for p, old, move in zip(model.parameters(), before, moves, strict=True)]
    assert sum(row.num_updates for row in found.updates) == sum(int(move.sum()) for move in moves)
    assert sum(row.num_lost for row in found.updates) == sum(int(one.sum()) for one in lost) > 0


@pytest.mark.parametrize("autocast", [None, BF16])
def test_the_step_is_the_one_that_would_have_been_made(autocast):
    measured, plain = toys.make(), toys.make()
    toys.measure(measured, autocast=autocast, passes=2)
    optimizer = toys.adamw(plain)
    toys.step_of(plain, optimizer, autocast=autocast, passes=2)()
    for one, other in zip(measured.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_without_a_step_it_tells_what_is_held():
    model = toys.make(dtype=BF16)
    optimizer = toys.adamw(model)
    toys.step_of(model, optimizer)()
    found = fl.manifest(model, optimizer)
    assert found.step is None
    assert found.summary.endswith("(no step was measured)")
    assert formats_of(found.holdings, "states").keys() == formats_of(found.holdings, "gradients").keys() == {"bf16"}
    assert "updates below |w|/512 round away" in toys.text(found)


def test_flops_are_counted_by_phase_region_and_format():
    found = toys.measure(toys.make(), autocast=BF16)
    assert set(found.flops()) == {"bf16"}
    assert {(row.phase, row.region) for row in found.work} == {("forward", "bf16"), ("backward", "off")}
    # The backward pass of a product is two products.
    assert found.flops("backward")["bf16"] == pytest.approx(2 * found.flops("forward")["bf16"], rel=0.2)


def test_flops_are_those_of_torch():
    from torch.utils.flop_counter import FlopCounterMode

    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(8, 16)

    def step():
        model(batch).sum().backward()
        optimizer.step()

    found = fl.manifest(model, optimizer, step=step)
    with FlopCounterMode(display=False) as counter:
        step()
    assert sum(found.flops().values()) == counter.get_total_flops()


def test_layers_have_groups():
    found = toys.measure(toys.make())
    weights = {row.group: row.example for row in found.holdings if row.kind == "weights"}
    assert weights == {
        "embeddings": "embed.weight",
        "norms": "norm.weight",
        "body": "qkv.weight",
        "head": "lm_head.weight",
    }


def test_the_attention_kernel_is_named():
    found = toys.measure(toys.make(), autocast=BF16)
    assert [row.format for row in found.ran if row.kind == "attention"] == ["bf16"]


@pytest.mark.parametrize("update", ["exact", "kahan"])
def test_what_an_optimizer_keeps_besides_is_a_master_copy(update):
    model = toys.make(dtype=BF16)
    found = toys.measure(model, toys.adamw(model, kind=fl.optim.AdamW, update=update))
    assert formats_of(found.holdings, "master")
    assert sum(row.num_lost for row in found.updates) < 0.02 * sum(row.num_updates for row in found.updates)
    assert "master copy" not in toys.text(found)


def test_masters_by_hand_are_found_by_their_values():
    model = toys.make(dtype=BF16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-4)

    def step():
        batch = toys.words()
        nn.functional.cross_entropy(model(batch).float().flatten(0, 1), batch.flatten()).backward()
        for master, weight in zip(masters, model.parameters(), strict=True):
            master.grad = weight.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, model.parameters(), strict=True):
                weight.copy_(master)

    found = fl.manifest(model, optimizer, step=step)
    assert set(formats_of(found.holdings, "master")) == {"fp32"}
    assert found.lines == ()


def test_a_step_without_a_learning_rate_tells_nothing():
    model = toys.make()
    with pytest.raises(ManifestError, match="learning rate of 0"):
        toys.measure(model, toys.adamw(model, lr=0.0))


def test_a_step_that_a_scaler_leaves_out_is_no_step():
    model = toys.make()
    optimizer, scaler = toys.adamw(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    step = toys.step_of(model, optimizer, scaler=scaler)
    overflow = model.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(ManifestError, match="made no step"):
        fl.manifest(model, optimizer, step=step)
    overflow.remove()
    assert fl.manifest(model, optimizer, step=step).scaled


@pytest.mark.parametrize("second", ["muon-like", None])
def test_every_optimizer_that_steps_after_a_backward_pass_is_measured(second):
    """Matrices are often trained by one optimizer and the rest by another, after one backward pass."""
    model = toys.make(dtype=BF16)
    matrices, rest = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]
    first = torch.optim.SGD(rest, lr=1e-4)
    other = torch.optim.SGD(matrices, lr=1e-4)
    make = toys.step_of(model, first)

    def step():
        make()
        if second:
            other.step()

    found = fl.manifest(model, first, step=step)
    assert found.optimizers == (("SGD", "SGD") if second else ("SGD",))
    num = sum(p.numel() for p in [*rest, *(matrices if second else ())] if p.grad is not None)
    assert 0 < sum(row.num_updates for row in found.updates) <= num
    assert (sum(row.num_updates for row in found.updates) > sum(p.numel() for p in rest)) == bool(second)


@pytest.mark.parametrize("broken", [True, False])
def test_a_loss_that_is_not_finite_is_told_before_anything_else(broken):
    model = toys.make()
    optimizer = toys.adamw(model)

    def step():
        loss = model(toys.words()).square().mean()
        (loss * (math.nan if broken else 1.0)).backward()
        optimizer.step()

    found = fl.manifest(model, optimizer, step=step)
    if not broken:
        assert found.lines == ()
        return
    assert found.lines[0].text.startswith("the loss was not finite at step ")
    assert found.lines[0].as_json()["cause"] is None
    assert "explain" not in str(found.lines[0])


@pytest.mark.parametrize("by_hand", [True, False])
def test_tensors_that_somebody_else_updates_are_noted(by_hand):
    model, bias = toys.make(), torch.zeros(toys.WORDS, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), *([] if by_hand else [bias])], lr=1e-4)

    def step():
        (model(toys.words()) + bias).square().mean().backward()
        optimizer.step()

    found = fl.manifest(model, optimizer, step=step)
    said = "1 tensor with gradients belongs to no module and no optimizer: what becomes of them was not measured"
    assert (said in found.notes) == by_hand


def test_what_a_step_raises_is_raised():
    model = toys.make()

    def step():
        model(toys.words())
        raise ValueError("of the user's")

    with pytest.raises(ValueError, match="of the user's"):
        fl.manifest(model, toys.adamw(model), step=step)
    toys.measure(model)  # and nothing is left behind


def test_a_compiled_model_is_measured_eagerly():
    inner = toys.make()
    model = torch.compile(inner, backend="eager")
    found = toys.measure(model, toys.adamw(inner))
    assert found.step == 1
    assert found.flops()["fp32"] > 0


def test_a_manifest_is_saved_and_read(tmp_path):
    found = toys.measure(toys.make(dtype=BF16), passes=2)
    found.save(tmp_path / "a.json")
    assert Manifest.load(tmp_path / "a.json") == found


@pytest.mark.parametrize("content", ["{}", "[1]", '{"schema": 1, "ranks": [{}]}', "\xff", '{"schema": 1, "ranks": 3}'])
def test_a_file_that_holds_something_else_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ManifestError, match="holds no manifest"):
        Manifest.load(tmp_path / "a.json")


def test_a_file_that_is_missing_is_refused():
    with pytest.raises(ManifestError, match="cannot be read"):
        Manifest.load("no-such-file.json")


@pytest.mark.parametrize(("enabled", "told"), [(True, True), (False, False)])
def test_a_region_for_a_device_that_is_not_there_is_told(enabled, told, monkeypatch):
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: True)
    model = toys.make()
    optimizer = toys.adamw(model)
    words = toys.words()

    def step():
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            torch.nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
        optimizer.step()

    with pytest.warns(UserWarning, match="Disabling autocast") if told else contextlib.nullcontext():
        found = fl.manifest(model, optimizer, step=step)
    line = "autocast for CUDA was asked for, and torch switched it off, as there is no CUDA in this process: 100 % of"
    assert toys.text(found).startswith(line) is told
