"""How the kernels store weights and 8-bit states: the bits of the torch side, and means that are the values."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl
from tests.numerics.test_split import every_exponent, half_ties

from floatline.numerics.split import split_master
from floatline.optim.kernels import triton_backend
from floatline.optim.kernels.triton_storage import load_state, store_state
from floatline.optim.rules import SGD
from floatline.optim.survey import Entry

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = pytest.mark.gpu if ON_GPU else []
PLAIN = {"lr": 1.0, "weight_decay": 0.0, "maximize": False, "momentum": 0.0, "dampening": 0.0, "nesterov": False}


def stored_by_the_kernel(master):
    """A step of plain SGD at a learning rate of 1 takes a weight of 0 to any number."""
    weight, remainder = (torch.zeros(len(master), dtype=d, device=DEVICE) for d in (torch.float16, torch.int16))
    state = {"step": torch.zeros((), device=DEVICE), "remainder": remainder}
    entry = Entry(weight, -master.to(DEVICE), state, PLAIN, 0, 0)
    triton_backend.apply(SGD, [entry], decision=None, update="exact", states="fp32", seed=0)
    return weight.cpu(), remainder.cpu()


def numbers(kind):
    """Masters; the sign of a zero is the compiler's."""
    if kind == "no tie":  # the last bit says so
        x = torch.randn(20_000, generator=torch.Generator().manual_seed(0)).mul_(0.02)
        return (x.view(torch.int32) | 1).view(torch.float32)
    x = every_exponent(10) if kind == "every exponent" else half_ties()
    return x[x != 0]


@pytest.mark.parametrize("kind", ["every exponent", "ties", "no tie"])
def test_a_float16_weight_and_its_remainder_are_those_of_split_master(kind):
    master = numbers(kind)
    weight, remainder = stored_by_the_kernel(master)
    expected, rest = split_master(master, torch.float16)
    assert torch.equal(weight.view(torch.int16), expected.view(torch.int16))
    assert torch.equal(remainder, rest)
    # Ties are where the nearest float16 alone would be another one.
    assert bool((expected != master.half()).any()) == (kind != "no tie")


def test_a_weight_that_is_not_finite_has_no_remainder():
    weight, remainder = stored_by_the_kernel(torch.tensor([torch.inf, -torch.inf, 65520.0, -7e4, torch.nan, 65519.99]))
    assert weight[:4].isinf().all()
    assert weight[4].isnan()
    assert weight[5] == 65504
    assert remainder[:5].tolist() == [0] * 5
    assert remainder[5] > 32000


@triton.jit
def store_and_load(codes, scales, values, loaded, draws, SIGNED: tl.constexpr):
    block = tl.program_id(0)
    lane = tl.arange(0, 256)
    start = block * 256
    index = start + lane
    mask = lane < 256
    chance = tl.load(draws + block) + lane * 0
    x = tl.load(values + lane)
    store_state(codes, scales, start, index, mask, x, chance, "int8", SIGNED, 256, True)
    tl.debug_barrier()
    x = load_state(codes, scales, start, index, mask, "int8", SIGNED, 256, True)
    tl.store(loaded + index, x)


def stored_for(values, draws, dtype):
    """Codes, scale and values of one block of 256, for each of these draws of 16 bits."""
    values, draws = values.to(DEVICE), torch.as_tensor(draws, dtype=torch.int32, device=DEVICE)
    codes = torch.zeros(len(draws), 256, dtype=dtype, device=DEVICE)
    scales = torch.zeros(len(draws), device=DEVICE)
    loaded = torch.zeros(len(draws), 256, device=DEVICE)
    signed = dtype == torch.int8
    addresses = (codes.data_ptr(), scales.data_ptr())
    store_and_load[(len(draws),)](*addresses, values, loaded, draws, SIGNED=signed, num_warps=1)
    return codes.cpu(), scales.cpu(), loaded.cpu()


def block_of(dtype, *, orders=6.0):
    """256 numbers over orders of magnitude; the largest is the third."""
    generator = torch.Generator().manual_seed(1)
    x = 10 ** (-orders * torch.rand(256, generator=generator)) * 0.9
    x[2] = 1.0
    return x * torch.where(torch.rand(256, generator=generator) < 0.5, -0.37, 0.37) if dtype == torch.int8 else x * 0.37


def distances(values, dtype):
    """From the code below to the one above, as values."""
    scale = values.abs().max().double()
    power, top = (2, 127) if dtype == torch.int8 else (4, 255)
    below = (top * (values.abs().double() / scale) ** (1 / power)).floor()
    return ((below + 1) ** power - below**power) * scale / top**power, below


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_the_mean_over_all_draws_is_the_value(dtype):
    values = block_of(dtype)
    distance, below = distances(values, dtype)
    held = slice(None) if dtype == torch.int8 else below >= 1  # smaller squares are held above zero
    middles = range(128, 65536, 256)  # of 256 equal parts of all draws
    _, scales, loaded = stored_for(values, list(middles), dtype)
    assert (scales == values.abs().max()).all()
    off = (loaded.double().mean(0) - values.double()).abs() / distance
    assert float(off[held].max()) < 1.1 / 256
    # The instrument sees a bias where there is one: a single draw is nearest rounding, or nearly so.
    _, _, once = stored_for(values, [32768], dtype)
    biased = (once.double().mean(0) - values.double()).abs() / distance
    assert float((biased[held] > 1.1 / 256).float().mean()) > 0.9


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_the_largest_is_held_and_nothing_changes_its_sign(dtype):
    values = block_of(dtype)
    codes, _, loaded = stored_for(values, [0, 1, 2, 32768, 65000, 65535], dtype)
    assert (codes[:, 2].int().abs() >= (126 if dtype == torch.int8 else 254)).all()
    assert (codes[1:-1, 2].int().abs() == (127 if dtype == torch.int8 else 255)).all()
    assert (loaded * values >= 0).all()
    distance, _ = distances(values, dtype)
    assert ((loaded.double() - values.double()).abs() <= distance * (1 + 1e-3)).all()


def test_a_square_above_zero_is_never_stored_as_zero():
    values = block_of(torch.uint8, orders=14.0)
    values[5] = 0.0
    codes, _, loaded = stored_for(values, [0, 65535], torch.uint8)
    small = distances(values, torch.uint8)[1] == 0
    small[5] = False
    assert small.sum() > 50
    assert (codes[:, small] == 1).all()
    assert (loaded[:, small] > 0).all()
    assert (codes[:, 5] == 0).all()
    # The draw alone would make most of them zero.
    assert float((values[small] / values.max() * 255.0**4).median()) < 0.1


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_blocks_of_zeros_of_subnormals_and_with_a_nan(dtype):
    draws = [0, 40_000, 65535]
    codes, scales, loaded = stored_for(torch.zeros(256), draws, dtype)
    assert not codes.any()
    assert not scales.any()
    assert not loaded.any()
    tiny = torch.full((256,), 3e-39)
    codes, scales, loaded = stored_for(tiny, draws, dtype)
    assert torch.equal(scales, torch.full((3,), torch.finfo(torch.float32).tiny))
    assert ((loaded > 1e-39) & (loaded < 5e-39)).all()
    values = torch.ones(256)
    values[7] = torch.nan
    assert stored_for(values, draws, dtype)[1].isnan().all()
