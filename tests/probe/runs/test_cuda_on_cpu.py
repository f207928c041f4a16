"""Code that names the device 'cuda', on the CPU: devices, autocast, scalers, torch.cuda, threads, and nothing left."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from floatline.probe.runs.cuda_on_cpu import cuda_on_cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU answers itself")
HALF = torch.float16


@pytest.fixture
def inside():
    with cuda_on_cpu():
        yield


MADE = {
    "ones": lambda: torch.ones(2, device="cuda"),
    "tensor": lambda: torch.tensor([1.0], device="cuda:0"),
    "as_tensor": lambda: torch.as_tensor([1.0], device=torch.device("cuda", 0)),
    "index": lambda: torch.zeros(2, device=0),
    "like": lambda: torch.zeros_like(torch.ones(2), device="cuda"),
    "new": lambda: torch.ones(2).new_zeros(2, device="cuda"),
    "pinned": lambda: torch.empty(2, pin_memory=True),
    "generator": lambda: torch.randn(2, device="cuda", generator=torch.Generator("cuda").manual_seed(0)),
    "cuda": lambda: torch.ones(2).cuda(),
    "cuda 0": lambda: torch.ones(2).cuda(0, non_blocking=True),
    "to": lambda: torch.ones(2).to("cuda"),
    "to 0": lambda: torch.ones(2).to(0),
    "to device": lambda: torch.ones(2).to(device=torch.device("cuda"), dtype=HALF),
    "pin_memory": lambda: torch.ones(2).pin_memory().to("cuda", non_blocking=True),
    "type": lambda: torch.ones(2).type("torch.cuda.HalfTensor"),
    "FloatTensor": lambda: torch.cuda.FloatTensor(2).fill_(1.0),
    "module cuda": lambda: nn.Linear(2, 2).cuda().weight,
    "module to": lambda: nn.BatchNorm1d(2).to("cuda:0").running_mean,
    "module to 0": lambda: nn.Linear(2, 2).to(0).weight,
    "module device": lambda: nn.Linear(2, 2, device="cuda").weight,
    "module to_empty": lambda: nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight,
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_what_is_made_on_or_sent_to_cuda_is_on_the_cpu(inside, make):
    assert make().device.type == "cpu"


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_each_of_them_fails_outside(make):
    with pytest.raises((AssertionError, RuntimeError, TypeError, NotImplementedError)):
        make()


def test_the_default_device_may_be_cuda(inside):
    with torch.device("cuda"):
        assert torch.ones(1).device.type == "cpu"
    torch.set_default_device("cuda")
    try:
        assert nn.Linear(1, 1).weight.device.type == "cpu"
    finally:
        torch.set_default_device(None)


def test_what_is_sent_is_a_copy_as_between_two_devices(inside):
    data, weights = torch.zeros(4), nn.Linear(2, 2)
    data[:2].cuda().add_(1)
    data[:2].to("cuda").add_(1)
    kept = weights.state_dict()["bias"].cpu()
    with torch.no_grad():
        weights.bias.add_(1)
    assert data.sum() == 0
    assert not torch.equal(kept, weights.bias)


def test_a_leaf_that_is_sent_to_cuda_stays_the_leaf_that_is_there(inside):
    leaf = torch.ones(2, requires_grad=True)
    for sent in (leaf.cuda(), leaf.to("cuda")):
        sent.sum().backward()
    assert leaf.grad.tolist() == [2.0, 2.0]


def test_tensors_on_the_same_device_are_not_copied(inside):
    x = torch.ones(2)
    assert x.to(torch.ones(1).device) is x
    assert x.to(torch.float32) is x


def test_checkpoints_are_loaded_to_the_cpu(inside, tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    places = (None, "cuda", "cuda:1", torch.device("cuda"), {"cuda:0": "cuda:1"}, lambda storage, _: storage.cuda())
    for place in places:
        assert torch.load(tmp_path / "a.pt", map_location=place)["w"].device.type == "cpu"
    assert torch.load(tmp_path / "a.pt", "meta")["w"].device.type == "meta"


REGIONS = [
    lambda: torch.autocast("cuda"),
    lambda: torch.amp.autocast(device_type="cuda", dtype=HALF),
    lambda: torch.autocast("cuda:0"),
    lambda: torch.cuda.amp.autocast(),
    lambda: torch.autocast("cpu"),  # what device.type says where the script chose its device
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("region", REGIONS)
def test_autocast_for_cuda_rounds_to_float16_by_cudas_lists(inside, region):
    with region():
        y = nn.Linear(2, 2)(torch.ones(1, 2, device="cuda"))
        assert (y.dtype, y.exp().dtype) == (HALF, torch.float32)
        assert torch.is_autocast_enabled()
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_gpu_dtype() == HALF
    assert not torch.is_autocast_enabled()


def test_outside_autocast_for_cuda_does_nothing_on_the_cpu():
    with pytest.warns(UserWarning, match="CUDA is not available"), torch.autocast("cuda"):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float32


SCALERS = [
    lambda: torch.amp.GradScaler(),
    lambda: torch.amp.GradScaler("cuda"),
    lambda: torch.amp.GradScaler(device="cuda", init_scale=8.0),
    lambda: torch.cuda.amp.GradScaler(),
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("make", SCALERS)
def test_scalers_for_cuda_scale_on_the_cpu(inside, make):
    scaler, weight = make(), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler.scale(weight.sum()).backward()
    assert weight.grad.item() == scaler.get_scale() > 1.0
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == 0.5


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_such_a_scaler_is_off_outside():
    assert not any(make().is_enabled() for make in SCALERS)


def test_functions_of_torch_cuda_answer(inside):
    torch.cuda.set_device(0)
    torch.cuda.manual_seed(0)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() == 0
    assert torch.cuda.get_device_properties(0).total_memory == torch.cuda.mem_get_info()[1]
    assert torch.cuda.get_device_capability() == (7, 5)
    assert torch.cuda.current_device() == 0
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    side = torch.cuda.Stream()
    first.record()
    with torch.cuda.device(0), torch.cuda.stream(side), torch.cuda.nvtx.range("step"):
        torch.ones(2).record_stream(side)
    side.wait_stream(torch.cuda.current_stream())
    side.synchronize()
    last.record()
    last.synchronize()
    assert first.elapsed_time(last) > 0.0


def test_a_script_that_chooses_its_device_still_chooses_the_cpu(inside):
    assert not torch.cuda.is_available()
    assert torch.cuda.device_count() == 0
    assert not torch.cuda.is_bf16_supported()


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_backward_pass_runs_may_name_cuda(inside, reentrant):
    layer, dtypes = nn.Linear(2, 2), []

    def shift(x):
        y = layer(x + torch.ones(2, device="cuda"))
        dtypes.append(y.dtype)
        return y.sin()

    x = torch.ones(1, 2, requires_grad=True)
    with torch.autocast("cuda"):
        y = checkpoint(shift, x, use_reentrant=reentrant)
    y.float().sum().backward()
    assert dtypes == [HALF, HALF]
    assert x.grad.isfinite().all()


def test_functions_of_ones_own_see_the_autocast_that_is_on(inside):
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx, x):
            seen.append((x.dtype, torch.is_autocast_enabled("cuda")))
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, gradient):
            return gradient * torch.full((1,), 2.0, device="cuda")

    x = torch.ones(2, dtype=HALF, requires_grad=True)
    with torch.autocast("cuda"):
        Double.apply(x).sum().backward()
    assert seen == [(torch.float32, False)]
    assert x.grad.tolist() == [2.0, 2.0]


def train_in_a_thread() -> list[object]:
    seen: list[object] = []

    def work():
        try:
            with torch.autocast("cuda"):
                y = nn.Linear(2, 2)(torch.ones(1, 2, device="cuda"))
            y.float().sum().backward()
            seen.append(y.dtype)
        except (AssertionError, RuntimeError) as error:
            seen.append(type(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return seen


def test_threads_that_are_started_inside_are_inside(inside):
    assert train_in_a_thread() == [HALF]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_threads_that_are_started_outside_are_not():
    with cuda_on_cpu():
        pass
    assert train_in_a_thread() in ([AssertionError], [RuntimeError])


class Rows(Dataset):
    """Rows that are computed in FP16, on 'cuda'."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.full((2,), index, dtype=HALF, device="cuda") @ torch.ones(2, dtype=HALF).cuda()


@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_workers_of_a_loader_are_inside(inside):
    loader = DataLoader(Rows(), batch_size=2, num_workers=1, pin_memory=True, multiprocessing_context="fork")
    assert [batch.tolist() for batch in loader] == [[0.0, 2.0], [4.0, 6.0]]


def test_nothing_is_left_behind():
    owners = (torch, torch.cuda, torch.cuda.nvtx, torch.amp, torch.autocast, torch.amp.GradScaler, torch.autograd)
    owners += (torch.Tensor, torch.cuda.device, nn.Module, threading.Thread, torch.utils._device.DeviceContext)
    dtype = torch.get_autocast_dtype("cpu")

    def taken():
        return {(owner, name): value for owner in owners for name, value in vars(owner).items()}

    before = taken()
    with pytest.raises(ValueError, match="of the user"), cuda_on_cpu():
        inner = taken()
        raise ValueError("of the user")
    changed = {
        (owner.__name__, name) for (owner, name), value in inner.items() if value is not before.get((owner, name))
    }
    assert ("torch.cuda", "synchronize") in changed and ("autocast", "__init__") in changed  # the check can fail
    after = taken()
    assert [key for key, value in before.items() if after[key] is not value] == []
    assert torch.get_autocast_dtype("cpu") is dtype
