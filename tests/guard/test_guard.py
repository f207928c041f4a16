"""Guard: what a step does to the weights, what it says about it, and what it refuses."""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.slow import slow

import floatline as fl
from floatline.errors import GuardError, PlanError
from floatline.findings import GuardStop

KINDS = ["floatline", "fused", "plain"]


def make_model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 2))


def make_optimizer(model, kind, lr=1e-2):
    if kind == "floatline":
        return fl.optim.AdamW(model.parameters(), lr=lr)
    return torch.optim.AdamW(
        model.parameters(), lr=lr, fused=kind == "fused", foreach=False if kind == "plain" else None
    )


def make_guard(kind="floatline", *, plan="fp32", **options):
    model = make_model()
    return fl.Guard(model, make_optimizer(model, kind), plan=plan, **options)


def batches(num, items=8):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(items, 8, generator=generator), torch.randn(items, 2, generator=generator)) for _ in range(num)
    ]


def loss_with(guard):
    model = guard.model
    return lambda batch: F.mse_loss(model(batch[0]).float(), batch[1])


def weights(guard):
    return [param.detach().clone() for param in guard.model.parameters()]


def everything(guard):
    tensors, _ = guard.state_dict()
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(one, two):
    assert one.keys() == two.keys()
    return [name for name in one if not torch.equal(one[name].nan_to_num(7.0), two[name].nan_to_num(7.0))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [math.inf, 0.1])
def test_a_guarded_run_is_the_bare_loop(kind, clip):
    guard = make_guard(kind, clip_norm=clip)
    compute_loss = loss_with(guard)
    torch.manual_seed(5)
    for batch in batches(12):
        assert guard.step(compute_loss, batch).applied
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=kind == "fused")
    torch.manual_seed(5)
    for x, y in batches(12):
        F.mse_loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(weights(guard), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_the_manual_form_is_the_step(kind):
    one, two = make_guard(kind, plan="bf16-mixed"), make_guard(kind, plan="bf16-mixed")
    compute_loss, other_loss = loss_with(one), loss_with(two)
    torch.manual_seed(5)
    for batch in batches(6):
        one.step(compute_loss, batch)
    torch.manual_seed(5)
    for batch in batches(6):
        with two.autocast():
            loss = other_loss(batch)
        two.backward(loss)
        outcome = two.update()
    assert outcome.attempt == 6
    assert same(everything(one), everything(two)) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_poisoned_step_changes_no_bit(kind, value, where):
    guard = make_guard(kind, plan="fp16-mixed")
    compute_loss = loss_with(guard)
    with fl.HalfOnCPU():
        for batch in batches(3):
            guard.step(compute_loss, batch)
        before = everything(guard)
        handle = None
        poisoned = batches(4)[3]
        if where == "loss":
            poisoned = (poisoned[0] * value, poisoned[1])
        else:
            handle = guard.model[3].weight.register_hook(lambda grad: grad * value)
        outcome = guard.step(compute_loss, poisoned)
    if handle is not None:
        handle.remove()
    assert outcome.reason == ("forward-nonfinite" if where == "loss" else "overflow")
    changed = [name for name in same(before, everything(guard)) if not name.startswith("rng.")]
    assert changed == ([] if where == "loss" else ["judge.scale", "judge.good_steps", "judge.overflows"])


def test_the_loop_without_a_guard_is_poisoned():
    model = make_model()
    optimizer = make_optimizer(model, "fused")
    (model(torch.full((2, 8), math.nan))).sum().backward()
    optimizer.step()
    assert not all(param.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_are_averaged_over_items(kind):
    guard, whole = (make_guard(kind, clip_norm=math.inf) for _ in range(2))
    for g in (guard, whole):
        g.model[2].p = 0.0
    compute_loss = loss_with(guard)
    (x, y), *_ = batches(1, items=12)
    parts = [(x[:2], y[:2]), (x[2:5], y[2:5]), (x[5:], y[5:])]
    outcome = guard.step(lambda part: (compute_loss(part), len(part[0])), *parts)
    expected = whole.step(loss_with(whole), (x, y))
    assert outcome.loss == pytest.approx(expected.loss, rel=1e-6)
    assert outcome.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert outcome.micro_batches == 3


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_clipped_by_value_after_unscaling(kind):
    model = torch.nn.Linear(3, 1, bias=False)
    optimizer = {
        "floatline": lambda: fl.optim.SGD(model.parameters(), lr=1.0),
        "fused": lambda: torch.optim.SGD(model.parameters(), lr=1.0, fused=True),
        "plain": lambda: torch.optim.SGD(model.parameters(), lr=1.0),
    }[kind]()
    guard = fl.Guard(model, optimizer, plan="fp16-mixed", clip_value=0.5)
    before = model.weight.detach().clone()
    with fl.HalfOnCPU():
        guard.step(lambda x: (model.weight * x).sum(), torch.tensor([[0.25, -3.0, 40.0]]))
    torch.testing.assert_close(before - model.weight.detach(), torch.tensor([[0.25, -0.5, 0.5]]))


@pytest.mark.parametrize("norm_type", [1.0, 3.0, math.inf])
def test_gradients_are_clipped_by_any_norm(norm_type):
    model = torch.nn.Linear(4, 1, bias=False)
    guard = fl.Guard(
        model, torch.optim.SGD(model.parameters(), lr=1.0), plan="fp32", clip_norm=0.5, norm_type=norm_type
    )
    gradient = torch.tensor([[0.25, -3.0, 4.0, 1.0]])
    before = model.weight.detach().clone()
    outcome = guard.step(lambda x: (model.weight * x).sum(), gradient)
    norm = torch.linalg.vector_norm(gradient, norm_type)
    torch.testing.assert_close(before - model.weight.detach(), gradient * 0.5 / (norm + 1e-6))
    assert outcome.grad_norm == pytest.approx(float(norm))


def test_without_a_word_on_clipping_nothing_is_clipped():
    assert make_guard().clip_norm == math.inf
    assert make_guard(clip_norm=1.0).clip_norm == 1.0
    assert make_guard(plan="safe").clip_norm == 5.0


def test_a_schedule_advances_on_applied_steps_only():
    guard = make_guard()
    scheduler = guard.scheduler(torch.optim.lr_scheduler.LinearLR(guard.optimizer, total_iters=50))
    compute_loss = loss_with(guard)
    for i, batch in enumerate(batches(10)):
        guard.step(compute_loss, (batch[0] * (math.nan if i in (3, 4) else 1), batch[1]))
    assert scheduler.last_epoch == 8


def test_an_overflowed_batch_is_run_again_at_the_lower_scale():
    guard = make_guard(plan="fp16-mixed", policy=fl.Policy(retry_overflow=20))
    compute_loss = loss_with(guard)
    guard.set_scale(2.0**24)
    with fl.HalfOnCPU():
        outcome = guard.step(compute_loss, *batches(1))
    assert outcome.applied
    assert outcome.retries == guard.attempts - 1 > 0
    run = guard.accounts.run
    assert (run.attempted, run.applied) == (guard.attempts, 1)


def test_a_replay_leaves_no_trace():
    guard = make_guard(plan="bf16-mixed")
    guard.model.append(torch.nn.BatchNorm1d(2))
    compute_loss = loss_with(guard)
    batch, other = batches(2)
    guard.step(compute_loss, batch)
    before = everything(guard)
    first = guard.replay(compute_loss, other)
    again = guard.replay(compute_loss, other)
    assert torch.equal(first, again)
    assert guard.replay(compute_loss, other, precision="fp32") != first
    assert same(before, everything(guard)) == []
    assert guard.model.training
    assert all(param.grad is None for param in guard.optimizer.param_groups[0]["params"])


def test_the_average_moves_with_applied_steps_only():
    guard = make_guard()
    average = guard.averaged(0.9)
    compute_loss = loss_with(guard)
    expected = {name: p.detach().double() for name, p in guard.model.named_parameters()}
    for i, batch in enumerate(batches(6)):
        guard.step(compute_loss, (batch[0] * (math.nan if i == 3 else 1), batch[1]))
        if i != 3:
            for name, param in guard.model.named_parameters():
                expected[name] = 0.9 * expected[name] + 0.1 * param.detach().double()
    for name, tensor in average.tensors.items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-6, atol=1e-7)


def test_the_average_of_16_bit_weights_is_that_of_their_masters():
    model = make_model().half()
    guard = fl.Guard(model, fl.optim.AdamW(model.parameters(), lr=1e-5), plan="fp16-true")
    average = guard.averaged(0.0)
    with fl.HalfOnCPU():
        for x, y in batches(3):
            guard.step(lambda b: F.mse_loss(model(b[0].half()).float(), b[1]), (x, y))
    master = guard.optimizer.master_state_dict(model)
    for name, tensor in average.tensors.items():
        assert torch.equal(tensor, master[name])
        assert tensor.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_saving_and_resuming_is_not_stopping(kind, tmp_path):
    def build():
        guard = make_guard(kind, plan="fp16-mixed", policy=fl.Policy(snapshot_gib=0.01))
        guard.scheduler(torch.optim.lr_scheduler.StepLR(guard.optimizer, 5))
        guard.averaged(0.9)
        return guard

    data = batches(24)
    data[9] = (data[9][0] * math.nan, data[9][1])
    data[15] = (data[15][0] * math.inf, data[15][1])
    torch.manual_seed(3)
    with fl.HalfOnCPU():
        straight = build()
        for batch in data:
            straight.step(loss_with(straight), batch)
        torch.manual_seed(3)
        first = build()
        for batch in data[:12]:
            first.step(loss_with(first), batch)
        path = first.save(tmp_path, extra={"next": 12})
        torch.manual_seed(99)
        second = build()
        start = second.load(tmp_path)["next"]
        for batch in data[start:]:
            second.step(loss_with(second), batch)
    assert path.parent == tmp_path
    assert same(everything(straight), everything(second)) == []
    assert straight.summary() == second.summary()
    assert second.optimizer.param_groups[0]["lr"] == straight.optimizer.param_groups[0]["lr"]


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path):
    guard = make_guard()
    guard.step(loss_with(guard), *batches(1))
    guard.save(tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.GELU(), torch.nn.Identity(), torch.nn.Linear(4, 2))
    other = fl.Guard(model, fl.optim.AdamW(model.parameters()), plan="fp32")
    before = weights(other)
    with pytest.raises(GuardError, match=r"'model\.0\.weight' is torch.float32 \(16, 8\)"):
        other.load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(other), strict=True))


def test_the_scale_of_torchs_scaler_can_be_taken_over():
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    scaler.scale(torch.ones(()))
    guard = make_guard(plan="fp16-mixed")
    guard.load_scaler(scaler.state_dict())
    assert guard.scale == 512.0
    with pytest.raises(GuardError, match="does not scale"):
        make_guard(plan="fp32").load_scaler(scaler.state_dict())


def test_nan_in_a_weight_goes_back_to_a_snapshot():
    guard = make_guard(policy=fl.Policy(snapshot_gib=0.01, snapshot_every=2, rollback_reach=2))
    compute_loss = loss_with(guard)
    data = batches(20)
    for batch in data[:10]:
        guard.step(compute_loss, batch)
    with torch.no_grad():
        guard.model[0].weight[0, 0] = math.nan
    assert guard.step(compute_loss, data[10]).reason == "forward-nonfinite"
    assert all(param.isfinite().all() for param in guard.model.parameters())
    assert guard.step(compute_loss, data[11]).applied
    assert "rollback" in guard.summary()


def test_nan_in_a_weight_without_snapshots_stops_and_says_where(tmp_path):
    guard = make_guard(folder=tmp_path / "run")
    compute_loss = loss_with(guard)
    guard.begin_epoch(3)
    data = batches(4)
    for batch in data[:3]:
        guard.step(compute_loss, batch)
    with torch.no_grad():
        guard.model[0].weight[0, 0] = math.nan
    with pytest.raises(GuardStop, match=r"step 4 \(epoch 3, batch 3\)"):
        guard.step(compute_loss, data[3])
    history = fl.Ledger.read(tmp_path / "run")
    assert history.applied == [True, True, True, False]
    assert history.events[-1].event == "stop"
    guard.close()


def test_the_ledger_tells_what_happened(tmp_path):
    with make_guard(folder=tmp_path / "run", record_layers_every=2) as guard:
        compute_loss = loss_with(guard)
        guard.begin_epoch(0)
        for i, batch in enumerate(batches(6)):
            guard.step(compute_loss, (batch[0] * (math.nan if i == 2 else 1), batch[1]))
    history = fl.Ledger.read(tmp_path / "run")
    assert history.reason == [None, None, "forward-nonfinite", None, None, None]
    assert math.isnan(history.loss[2])
    assert history.batch == [0, 1, 2, 3, 4, 5]
    assert [norms is not None for norms in history.layer_norms] == [False, True, False, True, False, True]
    assert set(history.layer_norms[1]) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    total = math.sqrt(sum(norm**2 for norm in history.layer_norms[1].values()))
    assert total == pytest.approx(history.grad_norm[1], rel=1e-5)
    assert history.ended


def test_a_step_that_raises_leaves_no_gradient_behind():
    guard = make_guard()
    compute_loss = loss_with(guard)
    good, bad = batches(2)

    def breaks(batch):
        if batch is bad:
            raise RuntimeError("worker died")
        return compute_loss(batch)

    with pytest.raises(RuntimeError, match="worker died"):
        guard.step(breaks, good, bad)
    assert all(param.grad is None for param in guard.model.parameters())
    assert guard.attempts == 0


def test_outcomes_speak():
    guard = make_guard(plan="fp16-mixed", due_every=2)
    compute_loss = loss_with(guard)
    with fl.HalfOnCPU():
        outcomes = [guard.step(compute_loss, batch) for batch in batches(2)]
    assert [outcome.due for outcome in outcomes] == [False, True]
    assert str(outcomes[0]).endswith(f"applied  scale 65536  norm {outcomes[0].grad_norm:.4g}")


def test_what_cannot_be_guarded_is_refused_in_one_line():
    model = make_model()
    optimizer = make_optimizer(model, "plain")
    stranger = make_optimizer(make_model(), "plain")
    half = make_model().half()
    lost = make_optimizer(model, "plain")
    lost.param_groups[0]["lr"] = math.nan
    cases = [
        (lambda: fl.Guard(model, optimizer, plan="fp17"), PlanError, "fp17"),
        (lambda: fl.Guard(model, optimizer, plan="fp32", clip_norm=0), GuardError, "clip_norm is 0"),
        (lambda: fl.Guard(model, optimizer, plan="fp32", clip_value=-1.0), GuardError, "clip_value is -1.0"),
        (lambda: fl.Guard(model, optimizer, plan="fp32", norm_type=math.nan), GuardError, "norm_type is nan"),
        (lambda: fl.Guard(model, optimizer, plan="fp32", clip_norm=1, clip_value=1), GuardError, "both given"),
        (lambda: fl.Guard(model, stranger, plan="fp32"), GuardError, "the model has not"),
        (lambda: fl.Guard(model, lost, plan="fp32"), GuardError, "learning rate of group 0 is nan"),
        (lambda: fl.Guard(half, make_optimizer(half, "plain"), plan="fp16-true"), GuardError, "floatline.optim"),
        (lambda: fl.Guard(model, optimizer, plan="fp16-true"), GuardError, "trains fp16 weights"),
        (lambda: fl.Guard(model, optimizer, plan="fp32", policy="bold"), GuardError, "bold"),
        (lambda: fl.Guard(model, optimizer, plan="fp32").step(lambda _: None), GuardError, "no batch"),
        (lambda: fl.Guard(model, optimizer, plan="fp32").update(), GuardError, "before backward"),
        (lambda: fl.Guard(model, torch.optim.LBFGS(model.parameters()), plan="fp32"), GuardError, "LBFGS.step.. needs"),
        (lambda: fl.Policy(skip_outliers=1), GuardError, "skip_outliers is 1. Give True or False."),
        (lambda: fl.Policy(probe_after=0), GuardError, "probe_after is 0"),
        (lambda: fl.Policy(outlier_score="6"), GuardError, "outlier_score is '6'"),
    ]
    for call, kind, words in cases:
        with pytest.raises(kind, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_rate_that_turns_nan_is_refused_before_the_step():
    guard = make_guard()
    compute_loss = loss_with(guard)
    one, two = batches(2)
    guard.step(compute_loss, one)
    before = weights(guard)
    guard.optimizer.param_groups[0]["lr"] = math.nan
    with pytest.raises(GuardError, match="learning rate of group 0 is nan"):
        guard.step(compute_loss, two)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(guard), strict=True))


def test_a_run_folder_in_use_is_refused(tmp_path):
    with make_guard(folder=tmp_path / "run"), pytest.raises(fl.FloatlineError, match="run"):
        make_guard(folder=tmp_path / "run")


@slow
def test_after_150_nonfinite_steps_a_healthy_one_leaves_finite_weights():
    guard = make_guard(plan="fp16-mixed", policy=fl.Policy(collapse_after=1000))
    compute_loss = loss_with(guard)
    good, bad = batches(2)
    handle = guard.model[3].weight.register_hook(lambda grad: grad * math.inf)
    with fl.HalfOnCPU():
        for _ in range(150):
            guard.step(compute_loss, bad)
        handle.remove()
        assert guard.step(compute_loss, good).applied
    assert guard.scale == 1.0
    assert all(weight.isfinite().all() for weight in weights(guard))


def test_after_150_nonfinite_steps_torchs_scaler_writes_inf():
    model = make_model()
    optimizer = make_optimizer(model, "plain")
    scaler = torch.amp.GradScaler("cpu")
    (x, y), *_ = batches(1)
    for i in range(151):
        scaler.scale(F.mse_loss(model(x), y)).backward()
        if i < 150:
            model[3].weight.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert not all(param.isfinite().all() for param in model.parameters())


def test_no_scale_can_work_is_said_after_20_overflows_at_the_floor():
    guard = make_guard(plan="fp16-mixed")
    compute_loss = loss_with(guard)
    guard.model[3].weight.register_hook(lambda grad: grad * math.inf)
    with fl.HalfOnCPU(), pytest.raises(GuardStop, match="scale"):
        for batch in batches(60):
            guard.step(compute_loss, batch)
    assert guard.attempts == 16 + 20


def test_a_compiled_model_is_guarded():
    guard = make_guard()
    compiled = torch.compile(guard.model, backend="eager")
    outcome = guard.step(lambda b: F.mse_loss(compiled(b[0]), b[1]), *batches(1))
    assert outcome.applied


def test_checkpointed_segments_are_guarded():
    guard = make_guard(plan="bf16-mixed")
    first, rest = guard.model[:2], guard.model[2:]

    def compute_loss(batch):
        hidden = torch.utils.checkpoint.checkpoint(first, batch[0], use_reentrant=False)
        return F.mse_loss(rest(hidden).float(), batch[1])

    assert guard.step(compute_loss, *batches(1)).applied


def gpu(test):
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    return pytest.mark.gpu(skip(test))


@gpu
@pytest.mark.parametrize("kind", ["floatline", "fused"])
def test_a_guarded_step_on_a_gpu_waits_for_nothing(kind):
    model = make_model().cuda()
    guard = fl.Guard(model, make_optimizer(model, kind), plan="fp16-mixed", record_layers_every=3)
    compute_loss = loss_with(guard)
    data = [(x.cuda(), y.cuda()) for x, y in batches(20)]
    for batch in data[:10]:
        guard.step(compute_loss, batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in data[10:]:
            guard.step(compute_loss, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert guard.summary().startswith("20 attempted")


@gpu
def test_the_check_above_sees_a_host_read():
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
@pytest.mark.parametrize("kind", ["floatline", "fused", "plain"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_poisoned_step_on_a_gpu_changes_no_bit(kind, value):
    model = make_model().cuda()
    guard = fl.Guard(model, make_optimizer(model, kind), plan="fp16-mixed")
    compute_loss = loss_with(guard)
    data = [(x.cuda(), y.cuda()) for x, y in batches(6)]
    for batch in data[:5]:
        guard.step(compute_loss, batch)
    before = everything(guard)
    handle = model[3].weight.register_hook(lambda grad: grad * value)
    assert guard.step(compute_loss, data[5]).reason == "overflow"
    handle.remove()
    changed = [name for name in same(before, everything(guard)) if not name.startswith("rng.")]
    assert changed == ["judge.scale", "judge.good_steps", "judge.overflows"]


@gpu
@pytest.mark.parametrize("kind", ["floatline", "fused"])
def test_saving_and_resuming_on_a_gpu_is_not_stopping(kind, tmp_path):
    def build():
        model = make_model().cuda()
        guard = fl.Guard(model, make_optimizer(model, kind), plan="fp16-mixed", policy=fl.Policy(snapshot_gib=0.01))
        guard.scheduler(torch.optim.lr_scheduler.StepLR(guard.optimizer, 5))
        return guard

    data = [(x.cuda(), y.cuda()) for x, y in batches(24)]
    data[9] = (data[9][0] * math.nan, data[9][1])
    torch.manual_seed(3)
    straight = build()
    for i, batch in enumerate(data):
        straight.step(loss_with(straight), batch)
        if i == 11:
            straight.drain()  # a save reads what is outstanding
    torch.manual_seed(3)
    first = build()
    for batch in data[:12]:
        first.step(loss_with(first), batch)
    first.save(tmp_path)
    torch.manual_seed(99)
    second = build()
    second.load(tmp_path)
    for batch in data[12:]:
        second.step(loss_with(second), batch)
    assert same(everything(straight), everything(second)) == []
    assert straight.summary() == second.summary()


def lost_run(scale: float, used: bool = True):
    """A run whose second layer's gradients FP16 loses as a whole at a scale of 1."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 2))
    policy = fl.Policy(underflow_every=2)
    guard = fl.Guard(model, fl.optim.AdamW(model.parameters(), lr=1e-3), plan="fp16-mixed", policy=policy)
    guard.set_scale(scale)
    small = 1e-9 if used else 0.0
    with fl.HalfOnCPU():
        for x, y in batches(6):
            guard.step(lambda b: F.mse_loss((model(b[0]).float() * small), b[1] * small), (x, y))
    return guard


def test_gradients_that_are_lost_as_a_whole_raise_a_low_scale():
    guard = lost_run(1.0)
    assert guard.scale == 16.0**3
    assert "lost to zero" in guard.summary()


def test_gradients_that_are_zero_at_the_usual_scale_raise_nothing():
    guard = lost_run(2.0**16, used=False)
    assert guard.scale == 2.0**16
    assert guard.summary().endswith("no events")


def test_a_stop_that_the_canary_asks_for_names_epoch_and_batch():
    guard = make_guard(plan="bf16-mixed", canary=lambda: guard.model(torch.ones(1, 8)).sum() * math.nan)
    guard.begin_epoch(2)
    good, bad = batches(2)
    guard.step(loss_with(guard), good)
    with pytest.raises(GuardStop, match=r"step 2 \(epoch 2, batch 1\): .* in FP32 as well"):
        guard.step(loss_with(guard), (bad[0] * math.nan, bad[1]))
