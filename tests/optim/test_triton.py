"""The kernels against the torch backend: in Triton's interpreter on a CPU, for real on a GPU."""

import pytest
import torch
from tests.slow import mostly_slow

pytest.importorskip("triton", reason="triton is not installed")

from floatline.optim import storage
from floatline.optim.kernels import torch_backend, triton_backend
from floatline.optim.roster import Entries
from floatline.optim.rules import ADAM, ADAMW, LION, SGD
from floatline.optim.survey import Decision, Entry

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = pytest.mark.gpu if ON_GPU else []
RULES = {rule.name: rule for rule in (ADAM, ADAMW, LION, SGD)}
SIZES = (3, 256, 600)  # below a block, one block, ragged


def settings(rule, **changes):
    common = {"lr": 1e-2, "weight_decay": 0.1, "maximize": False}
    own = {"momentum": 0.9, "dampening": 0.1, "nesterov": False} if rule is SGD else {"betas": (0.9, 0.99), "eps": 1e-8}
    return {**common, **own, **changes}


def make_entries(rule, dtype, *, update="exact", states="fp32", group=None, sizes=SIZES, shift=7):
    generator = torch.Generator().manual_seed(0)
    group = group or settings(rule)
    entries = []
    for i, size in enumerate(sizes):
        weight = torch.randn(size, generator=generator).to(dtype).to(DEVICE)
        state = {"step": torch.zeros((), device=DEVICE)}
        for name in rule.states_for(group):
            state |= storage.new_state(weight, name, states)
        state |= storage.new_extra(weight, update)
        entries.append(Entry(weight, torch.zeros_like(weight), state, group, i, shift * i))
    return entries


def set_grads(entries, step, dtype=None):
    generator = torch.Generator().manual_seed(100 + step)
    for entry in entries:
        grad = torch.randn(entry.weight.shape, generator=generator) * 0.1
        entry.grad = grad.to(dtype or entry.weight.dtype).to(DEVICE)


def parts(entries):
    return [{"weight": e.weight, **e.state} for e in entries]


def master(entry):
    extra = entry.state.get("remainder", entry.state.get("compensation"))
    return storage.load_weight(entry.weight, extra)


def snapshot(entries):
    return [{name: tensor.clone() for name, tensor in part.items()} for part in parts(entries)]


def same(before, entries):
    return all(torch.equal(old[n], new[n]) for old, new in zip(before, parts(entries), strict=True) for n in old)


def run_both(rule, dtype, *, steps=3, grad_dtype=None, decision=None, shift=7, **settings):
    ours, theirs = (make_entries(rule, dtype, shift=shift, **settings) for _ in range(2))
    update, states = settings.get("update", "exact"), settings.get("states", "fp32")
    for step in range(steps):
        for entries, backend in ((ours, triton_backend), (theirs, torch_backend)):
            set_grads(entries, step, grad_dtype)
            backend.apply(rule, entries, decision=decision, update=update, states=states, seed=5)
    return ours, theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_masters_agree_within_a_few_units_in_the_last_place(rule, dtype):
    for ours, theirs in zip(*run_both(rule, dtype), strict=True):
        torch.testing.assert_close(master(ours), master(theirs), rtol=4e-7, atol=1e-7)
        assert ours.state["step"].item() == 3


@pytest.mark.parametrize(
    "group", [{"nesterov": True, "dampening": 0.0}, {"momentum": 0.0}, {"maximize": True}], ids=str
)
def test_the_forms_of_sgd_agree(group):
    for ours, theirs in zip(*run_both(SGD, torch.float16, group=settings(SGD, **group)), strict=True):
        torch.testing.assert_close(master(ours), master(theirs), rtol=4e-7, atol=1e-7)


@pytest.mark.parametrize("update", mostly_slow(["nearest", "kahan", "stochastic"], every=3))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shift", [7, 512], ids=["shards that begin anywhere", "shards that begin with a counter"])
def test_other_updates_agree_but_for_a_rare_neighbour(dtype, update, shift):
    for ours, theirs in zip(*run_both(ADAMW, dtype, update=update, shift=shift), strict=True):
        differ = ours.weight != theirs.weight
        # The float32 results may differ in their last bit; where a rounding decision sits on that bit, so does it.
        assert differ.float().mean() < 0.01
        spacing = torch.finfo(dtype).eps
        assert ((ours.weight - theirs.weight).float().abs() <= 2.01 * spacing * theirs.weight.float().abs()).all()


@pytest.mark.parametrize("states", mostly_slow(["bf16", "int8"], every=2))
@pytest.mark.parametrize(
    ("rule", "shift"),
    [(ADAMW, 7), (ADAMW, 512), (LION, 7), (SGD, 512)],
    ids=["adamw 7", "adamw 512", "lion 7", "sgd 512"],
)
def test_narrow_states_agree_but_for_a_rare_neighbour(rule, states, shift):
    for ours, theirs in zip(*run_both(rule, torch.float16, states=states, steps=2, shift=shift), strict=True):
        for name in rule.state_names:
            a, b = ours.state[name], theirs.state[name]
            if states == "int8":
                torch.testing.assert_close(
                    ours.state[f"{name}_scale"], theirs.state[f"{name}_scale"], rtol=1e-2, atol=0
                )
                assert ((a.int() - b.int()).abs() <= 2).all()
            assert (a != b).float().mean() < 0.02
        if states == "bf16":
            torch.testing.assert_close(master(ours), master(theirs), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_another_dtype_are_taken(grad_dtype):
    for ours, theirs in zip(*run_both(ADAMW, torch.bfloat16, grad_dtype=grad_dtype), strict=True):
        torch.testing.assert_close(master(ours), master(theirs), rtol=4e-7, atol=1e-7)


def test_a_survey_gives_sums_and_counts():
    entries = make_entries(ADAMW, torch.float16, sizes=(3, 5000, 9000))
    set_grads(entries, 0)
    entries[1].grad[17] = float("inf")
    entries[1].grad[4999] = float("nan")
    found = triton_backend.survey(entries)
    assert found.nonfinite.tolist() == [0, 2, 0]
    for i in (0, 2):
        expected = entries[i].grad.double().square().sum().item()
        assert found.sums[i].item() == pytest.approx(expected, rel=1e-5)
    assert not found.sums[1].isfinite()


def scalar(value, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype, device=DEVICE)


def guarded(entries, rule=ADAMW, *, scale=1024.0, clip=None, skip=None):
    clip = None if clip is None else scalar(clip)
    skip = None if skip is None else scalar(skip, torch.bool)
    return triton_backend.survey_and_apply(
        rule, entries, scale=scalar(scale), clip_norm=clip, skip=skip, update="exact", states="fp32", seed=0
    )


@pytest.mark.parametrize("clip", [None, 0.05, 1e9])
def test_one_call_does_what_survey_decide_and_apply_do(clip):
    from floatline.optim.survey import decide

    ours, theirs = make_entries(ADAMW, torch.float16), make_entries(ADAMW, torch.float16)
    for step in range(2):
        set_grads(ours, step)
        set_grads(theirs, step)
        decided = guarded(ours, clip=clip)
        expected = decide(torch_backend.survey(theirs), scale=1024.0, clip_norm=clip)
        torch_backend.apply(ADAMW, theirs, decision=expected, update="exact", states="fp32", seed=0)
        assert bool(decided.applied)
        assert decided.norm.item() == pytest.approx(expected.norm.item(), rel=1e-5)
        assert decided.factor.item() == pytest.approx(expected.factor.item(), rel=1e-5)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(master(a), master(b), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_step_with_a_non_finite_gradient_changes_no_bit(poison):
    entries = make_entries(ADAMW, torch.float16)
    set_grads(entries, 0)
    guarded(entries)
    before = snapshot(entries)
    set_grads(entries, 1)
    entries[2].grad[599] = poison
    assert not bool(guarded(entries).applied)
    assert same(before, entries)


def test_a_step_that_is_to_be_skipped_changes_no_bit():
    entries = make_entries(ADAMW, torch.bfloat16)
    set_grads(entries, 0)
    before = snapshot(entries)
    assert not bool(guarded(entries, skip=True).applied)
    assert same(before, entries)
    assert bool(guarded(entries, skip=False).applied)
    assert not same(before, entries)


def test_a_given_decision_is_followed():
    entries = make_entries(LION, torch.float16)
    set_grads(entries, 0)
    before = snapshot(entries)
    refused = Decision(scalar(False, torch.bool), scalar(1.0), None)
    triton_backend.apply(LION, entries, decision=refused, update="exact", states="fp32", seed=0)
    assert same(before, entries)


def test_groups_dtypes_and_a_learning_rate_on_the_device_share_one_table():
    def build():
        first = make_entries(ADAMW, torch.float16, group=settings(ADAMW, lr=1e-3))
        second = make_entries(ADAMW, torch.float32, group=settings(ADAMW, lr=scalar(0.5), weight_decay=0.0))
        return first + second

    ours, theirs = build(), build()
    for entries, backend in ((ours, triton_backend), (theirs, torch_backend)):
        set_grads(entries, 0)
        backend.apply(ADAMW, entries, decision=None, update="exact", states="fp32", seed=0)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(master(a), master(b), rtol=4e-7, atol=5e-7)


def test_weights_in_channels_last_and_weights_with_gaps_are_taken():
    for make in (
        lambda: torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last),
        lambda: torch.randn(6, 8)[:, ::2],
    ):
        results = []
        for backend in (triton_backend, torch_backend):
            torch.manual_seed(0)
            weight = make().half().to(DEVICE)
            state = {"step": torch.zeros((), device=DEVICE)} | storage.new_extra(weight, "exact")
            for name in ADAMW.state_names:
                state |= storage.new_state(weight, name, "fp32")
            grad = torch.randn(weight.shape).half().to(DEVICE)  # contiguous, whatever the weight is
            entry = Entry(weight, grad, state, settings(ADAMW), 0, 0)
            backend.apply(ADAMW, [entry], decision=None, update="exact", states="fp32", seed=0)
            results.append(weight.clone())
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_a_gradient_that_is_suddenly_laid_out_another_way_is_read_right():
    results = []
    for backend in (triton_backend, torch_backend):
        entries = Entries(make_entries(ADAMW, torch.float16, sizes=((8, 8),)))
        for turned in (False, True):
            grad = torch.arange(64.0).view(8, 8).half().to(DEVICE)
            grad = grad.t() if turned else grad
            entries.take([grad], [grad.data_ptr()])
            backend.apply(ADAMW, entries, decision=None, update="exact", states="fp32", seed=0)
        results.append(entries[0].weight)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_sizes_and_counts_of_a_survey_follow_the_tensors_not_the_dtypes():
    entries = make_entries(ADAMW, torch.float32, sizes=(40_000, 0, 5, 20_000))
    set_grads(entries, 0)
    for i in (0, 3):
        entries[i].grad = entries[i].grad.half()
    entries[3].grad[-3:] = float("inf")
    found = triton_backend.survey(entries)
    assert found.nonfinite.tolist() == [0, 0, 0, 3]
    for i in (0, 1, 2):
        expected = entries[i].grad.double().square().sum().item()
        assert found.sums[i].item() == pytest.approx(expected, rel=1e-5)


def test_finite_gradients_whose_squares_overflow_are_not_counted_but_skipped():
    entries = make_entries(ADAMW, torch.float32)
    set_grads(entries, 0)
    entries[2].grad[5] = 1e30
    found = triton_backend.survey(entries)
    assert found.nonfinite.tolist() == [0, 0, 0]
    assert found.sums[2].item() == float("inf")
    assert not bool(guarded(entries).applied)


@pytest.mark.skipif(not ON_GPU, reason="no NVIDIA GPU here")
def test_a_guarded_step_never_waits_for_the_gpu_and_can_be_captured():
    entries = make_entries(ADAMW, torch.float16)
    set_grads(entries, 0)
    scale, clip = scalar(8.0), scalar(1.0)

    kept = Entries(entries)

    def step():
        return triton_backend.survey_and_apply(
            ADAMW, kept, scale=scale, clip_norm=clip, skip=None, update="exact", states="fp32", seed=0
        )

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    count = entries[0].state["step"].item()
    graph.replay()
    graph.replay()
    assert entries[0].state["step"].item() == count + 2
