"""Snapshots: bit for bit, in place, within the budget, and never a broken one."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
import torch.distributed as dist
from tests.slow import slow
from torch import Tensor

import floatline as fl
from floatline.errors import GuardError
from floatline.guard.policy import Policy
from floatline.guard.recovery import host_copies
from floatline.guard.recovery.snapshots import SnapshotRing, count_nonfinite

ROOMY = Policy(snapshot_gib=1.0, snapshots=3, snapshot_every=20)
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int16,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


def state(seed: int = 0, device: str = "cpu") -> dict[str, Tensor]:
    """Tensors of every kind, in every memory format, with odd sizes between them."""
    make = torch.Generator().manual_seed(seed)
    plain = {
        str(dtype): (torch.randn(5, 7, generator=make) * 9).to(torch.complex64 if dtype.is_complex else dtype).to(dtype)
        for dtype in DTYPES
    }
    image = torch.randn(2, 3, 4, 5, generator=make)
    others = {
        "channels-last": image.to(memory_format=torch.channels_last),
        "transposed": torch.randn(3, 8, generator=make).t(),
        "strided": torch.randn(6, 10, generator=make)[:, ::3],
        "scalar": torch.randn((), generator=make),
        "empty": torch.empty(0, 4),
        "none-left": torch.empty(0),
    }
    return {name: tensor.to(device) for name, tensor in {**plain, **others}.items()}


def bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {
        name: tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if tensor.numel()
        else b""
        for name, tensor in tensors.items()
    }


def spoil(tensors: dict[str, Tensor]) -> None:
    for tensor in tensors.values():
        tensor.zero_()


def scalar(value: float, **options) -> dict[str, Tensor]:
    return {"w": torch.full((4,), value, **options)}


@pytest.fixture(params=[host_copies._BLOCK, 64, 16])
def block(request, monkeypatch):
    """Blocks that hold everything, and blocks that cut most tensors into pieces."""
    monkeypatch.setattr(host_copies, "_BLOCK", request.param)
    return request.param


def test_restoring_gives_every_bit_back_in_place(block):
    ring, live = SnapshotRing(policy=ROOMY), state()
    before, places = bits(live), {name: tensor.data_ptr() for name, tensor in live.items()}
    ring.take(1, live, {}, None)
    spoil(live)
    assert bits(live) != before
    ring.restore(ring.newest(), live)
    assert bits(live) == before
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == places


def test_host_copies_have_shape_dtype_and_bits(block):
    ring, live = SnapshotRing(policy=ROOMY), state()
    ring.take(1, live, {}, None)
    before = bits(live)
    spoil(live)
    copies = ring.newest().tensors
    assert bits(copies) == before
    assert {name: (copy.shape, copy.dtype) for name, copy in copies.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in live.items()
    }


def test_a_tensor_whose_memory_format_changed_is_restored_too(block):
    ring, live = SnapshotRing(policy=ROOMY), {"x": torch.randn(2, 3, 4, 5)}
    ring.take(1, live, {}, None)
    other = {"x": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)}
    ring.restore(ring.newest(), other)
    assert torch.equal(other["x"], live["x"])


def test_a_trained_parameter_can_be_restored():
    weight = torch.nn.Parameter(torch.ones(3))
    ring = SnapshotRing(policy=ROOMY)
    ring.take(1, {"w": weight}, {}, None)
    torch.optim.SGD([weight], lr=1.0).zero_grad()
    weight.sum().backward()
    with torch.no_grad():
        weight.sub_(5.0)
    ring.restore(ring.newest(), {"w": weight})
    assert weight.tolist() == [1.0] * 3
    assert weight.requires_grad


def test_extra_is_kept_as_it_was():
    ring, extra = SnapshotRing(policy=ROOMY), {"lr": [0.1]}
    ring.take(1, scalar(1.0), extra, None)
    extra["lr"][0] = 9.0
    assert ring.newest().extra == {"lr": [0.1]}


# Which one


def test_the_newest_before_an_attempt_is_found():
    ring = SnapshotRing(policy=ROOMY)
    assert (ring.newest(), ring.newest_before(10)) == (None, None)
    for attempt in (20, 40, 60):
        ring.take(attempt, scalar(attempt), {}, torch.tensor(attempt / 10))
    found = {attempt: ring.newest_before(attempt).attempt for attempt in (60, 59, 40, 20, 19, 0)}
    assert found == {60: 60, 59: 40, 40: 40, 20: 20, 19: 20, 0: 20}
    assert ring.newest().attempt == 60
    assert ring.newest_before(45).canary == 4.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_a_broken_snapshot_is_never_given_or_restored(bad, dtype):
    ring, live = SnapshotRing(policy=ROOMY), scalar(1.0, dtype=dtype)
    ring.take(20, live, {}, None)
    sound = ring.newest()
    live["w"][2] = bad
    ring.take(40, live, {}, None)
    assert ring.newest() is sound
    assert ring.newest_before(99) is sound
    broken = ring._snapshots[-1]
    with pytest.raises(GuardError, match="not finite"):
        ring.restore(broken, live)
    assert not torch.isfinite(live["w"][2])


@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.float16, 65504.0), (torch.bfloat16, 3.3e38), (torch.float32, 3e38)]
)
def test_large_numbers_are_finite(dtype, largest):
    ring = SnapshotRing(policy=ROOMY)
    ring.take(1, {"w": torch.full((4096,), largest, dtype=dtype)}, {}, None)
    assert ring.newest().finite


def test_integers_and_unchecked_names_are_not_looked_at():
    ring = SnapshotRing(policy=ROOMY)
    mask = torch.tensor([0.0, -math.inf])
    low = torch.tensor([math.nan]).to(torch.float16).view(torch.int16)
    ring.take(1, {"mask": mask, "low": low, **scalar(1.0)}, {}, None, unchecked=["mask"])
    assert ring.newest() is not None
    ring.take(2, {"mask": mask, "low": low, **scalar(1.0)}, {}, None)
    assert ring.newest().attempt == 1


def test_tensors_with_bad_numbers_are_counted():
    nan = torch.tensor([1.0, math.nan])
    parts = [nan, nan.half(), nan.to(torch.float8_e5m2), nan.to(torch.complex64), torch.ones(3), torch.empty(0)]
    assert float(count_nonfinite(parts, home=torch.device("cpu"))) == 4


def test_broken_snapshots_give_way_first():
    ring, live = SnapshotRing(policy=ROOMY), scalar(1.0)
    ring.take(20, live, {}, None)
    for attempt in (40, 60, 80, 100):
        live["w"].fill_(math.nan)
        ring.take(attempt, live, {}, None)
    assert ring.newest().attempt == 20
    live["w"].fill_(2.0)
    for attempt in (120, 140, 160):
        ring.take(attempt, live, {}, None)
    assert ring.newest_before(0).attempt == 120


def test_snapshots_of_what_was_undone_are_dropped():
    ring = SnapshotRing(policy=ROOMY)
    for attempt in (20, 40, 60):
        ring.take(attempt, scalar(attempt), {}, None)
    late = ring.newest()
    ring.discard_after(40)
    assert ring.newest().attempt == 40
    with pytest.raises(GuardError, match="no longer kept"):
        ring.restore(late, scalar(0.0))


# Memory


def test_the_oldest_gives_way_and_its_memory_is_used_again():
    ring, places = SnapshotRing(policy=ROOMY), []
    for attempt in range(7):
        ring.take(attempt, scalar(attempt), {}, None)
        places.append(ring.newest().tensors["w"].data_ptr())
    assert len(set(places)) == 3
    assert ring.state_dict()["attempts"] == [4, 5, 6]
    assert [ring.newest_before(at).tensors["w"][0].item() for at in (4, 5, 6)] == [4.0, 5.0, 6.0]


@pytest.mark.parametrize(
    ("gib", "slots"), [(1024 / 2**30, 2), (1023 / 2**30, 1), (511 / 2**30, 0), (1.0, 3), (math.inf, 3)]
)
def test_the_number_of_snapshots_follows_the_budget(gib, slots):
    ring = SnapshotRing(policy=Policy(snapshot_gib=gib, snapshots=3))
    ring.take(1, {"w": torch.zeros(128)}, {}, None)
    assert ring.num_slots == slots
    assert (ring.newest() is None) == (slots == 0)


def test_a_budget_that_is_too_small_says_so():
    ring = SnapshotRing(policy=Policy(snapshot_gib=0.001))
    assert ring.due(1)
    ring.take(1, {"w": torch.zeros(2**20)}, {}, None)
    assert ring.reason == "one snapshot needs 0.00391 GiB, snapshot_gib is 0.001"
    assert not any(ring.due(attempt) for attempt in (2, 100, 10_000))


def test_no_budget_keeps_nothing():
    ring = SnapshotRing(policy=Policy(snapshot_gib=0.0))
    assert not ring.due(1)
    ring.take(1, scalar(1.0), {}, None)
    assert ring.newest() is None
    assert ring.reason


def test_the_size_of_a_snapshot_is_that_of_its_tensors():
    ring = SnapshotRing(policy=ROOMY)
    ring.take(1, {"a": torch.zeros(16), "b": torch.zeros(8, dtype=torch.float16)}, {}, None)
    assert ring.newest().nbytes == 80


# When


def test_the_interval_grows_with_the_square_root_of_the_run():
    ring = SnapshotRing(policy=ROOMY)
    found = {attempt: ring.interval(attempt) for attempt in (0, 400, 1_599, 1_600, 10_000, 1_000_000)}
    assert found == {0: 20, 400: 20, 1_599: 20, 1_600: 40, 10_000: 100, 1_000_000: 1_000}


def test_a_snapshot_is_due_at_once_and_then_at_intervals():
    ring, taken = SnapshotRing(policy=ROOMY), []
    for attempt in range(1, 100):
        if ring.due(attempt):
            ring.take(attempt, scalar(1.0), {}, None)
            taken.append(attempt)
    assert taken == [1, 21, 41, 61, 81]


def test_the_state_is_plain_json():
    ring = SnapshotRing(policy=ROOMY)
    ring.take(20, scalar(1.0), {}, None)
    assert json.loads(json.dumps(ring.state_dict())) == {"attempts": [20], "interval": 20, "reason": ""}


# What does not fit


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda live: live.pop("b"), "'b' is in the snapshot, but not live"),
        (lambda live: live.update(c=torch.ones(1)), "'c' is not in the snapshot"),
        (lambda live: live.update(b=torch.ones(3)), "'b' is torch.float32"),
        (lambda live: live.update(b=torch.ones(2).half()), "'b' is torch.float16"),
    ],
)
def test_other_tensors_are_refused_by_name_and_nothing_is_changed(change, name):
    ring, live = SnapshotRing(policy=ROOMY), {"a": torch.ones(2), "b": torch.ones(2)}
    ring.take(1, live, {}, None)
    live["a"].fill_(7.0)
    change(live)
    with pytest.raises(GuardError, match=name):
        ring.restore(ring.newest(), live)
    assert live["a"].tolist() == [7.0, 7.0]


def test_tensors_that_changed_begin_a_new_ring():
    ring = SnapshotRing(policy=ROOMY)
    ring.take(1, scalar(1.0), {}, None)
    ring.take(2, {**scalar(2.0), "more": torch.ones(1)}, {}, None)
    assert ring.state_dict()["attempts"] == [2]


# Several processes


def ring_of_rank(rank: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    ring = SnapshotRing(policy=Policy(snapshot_gib=1024 / 2**30, snapshots=8))
    live = {"w": torch.ones(128 if rank else 64)}
    ring.take(1, live, {}, torch.tensor(2.0 + rank))
    assert ring.num_slots == 2  # rank 0 alone could keep 4
    assert ring.newest().canary == 2.5
    live["w"][0] = math.nan if rank else 1.0
    ring.take(2, live, {}, torch.tensor(1.0))
    assert ring.newest().attempt == 1  # rank 0 sees no NaN of its own
    dist.destroy_process_group()


@slow
@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_processes_agree_on_length_canary_and_finiteness(tmp_path):
    torch.multiprocessing.spawn(ring_of_rank, (str(tmp_path / "meet"),), nprocs=2)


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_taking_waits_for_nothing_and_keeps_the_bits_while_training_goes_on(block):
    ring, live = SnapshotRing(policy=ROOMY), state(device="cuda")
    live["large"] = torch.randn(1 << 22 if block > 1024 else 64, device="cuda")
    live["step"] = torch.tensor(3.0)  # some optimizers keep it on the host
    for attempt in range(3):
        ring.take(attempt, live, {}, live["large"].sum())  # memory is allocated here
    before, loss = bits(live), float(live["large"].sum())
    busy = torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            busy = busy @ busy * 1e-3
        ring.take(3, live, {}, live["large"].sum())
        spoil(live)
        ring.take(4, live, {}, live["large"].sum())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    kept = ring.newest_before(3)
    assert (kept.attempt, kept.finite, kept.canary) == (3, True, loss)
    assert bits(kept.tensors) == before
    ring.restore(kept, live)
    assert bits(live) == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_reading_a_number_is_a_wait():
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones((), device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("place", [0, 1, 70_000, (1 << 20) - 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_on_a_gpu_one_bad_number_anywhere_breaks_a_snapshot(bad, dtype, place):
    ring = SnapshotRing(policy=ROOMY)
    live = {"a": torch.full((1 << 20,), 60000.0, device="cuda", dtype=dtype), "b": torch.ones(3, device="cuda")}
    ring.take(1, live, {}, None)
    live["a"][place] = bad
    ring.take(2, live, {}, None)
    assert ring.newest().attempt == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_copies_are_pinned():
    ring = SnapshotRing(policy=ROOMY)
    ring.take(1, scalar(1.0, device="cuda"), {}, None)
    assert ring.newest().tensors["w"].is_pinned()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_guard_goes_back_with_an_optimizer_that_keeps_no_state_as_well(momentum):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    guard = fl.Guard(model, optimizer, plan="fp32", policy=fl.Policy(snapshot_gib=1.0))
    for number in range(50):
        if number == 45:
            with torch.no_grad():
                model.weight.fill_(math.nan)
        guard.step(lambda x: model(x).square().mean(), torch.randn(8, 4))
    assert "rollback after step 46" in guard.summary()
    assert model.weight.isfinite().all()


class Memory(torch.nn.Linear):
    """Keeps the mean of every batch that it has seen in training."""

    def __init__(self):
        super().__init__(4, 1)
        self.register_buffer("seen", torch.zeros(0, 4))

    def forward(self, x):
        if self.training:
            self.seen = torch.cat([self.seen, x.detach().mean(0, keepdim=True)])
        return super().forward(x)


def test_a_buffer_that_grows_goes_back_to_the_size_it_had():
    torch.manual_seed(0)
    model = Memory()
    policy = fl.Policy(snapshot_gib=1.0, skip_outliers=False)
    guard = fl.Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), plan="fp32", policy=policy)
    sizes, batches = [], []
    for number in range(50):
        if number == 45:
            with torch.no_grad():
                model.weight.fill_(math.nan)
        batches.append(torch.randn(8, 4))
        guard.step(lambda x: model(x).square().mean(), batches[-1])
        sizes.append(len(model.seen))
    assert "rollback after step 46" in guard.summary()
    back = next(after for before, after in itertools.pairwise(sizes) if after < before)
    assert torch.equal(model.seen[:back], torch.stack([batch.mean(0) for batch in batches[:back]]))
