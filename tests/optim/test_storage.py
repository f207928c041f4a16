"""How weights and states are stored: what is lost, how much, and what a worse way would lose."""

import pytest
import torch
from tests.optim.steps import HALVES

from floatline.numerics.rounding import random_words, round_stochastic
from floatline.optim import storage
from floatline.optim.kernels.waves import Slice, Wave, WavePart, half_of
from floatline.optim.survey import Entry


def spread(count, *, seed=0, low=-10.0, high=0.0):
    """Numbers of both signs over many orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** (torch.rand(count, generator=generator) * (high - low) + low)
    return size * torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0)


def quantized(values, dtype, words=None):
    stored, scale = storage.store_state(values, dtype, words)
    return storage.load_state(stored, scale)


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_by_words_is_round_stochastic(dtype):
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65503.9, 65504.0, 65519.0, 65520.0, 7e4, 3.39e38, 2**-25]
    x = torch.cat(
        [spread(20_000), spread(5_000, low=-40, high=-36), spread(5_000, low=3, high=6), torch.tensor(special)]
    )
    words = random_words(x.numel(), seed=5, step=3, stream=2)
    expected = round_stochastic(x, str(dtype).removeprefix("torch."), seed=5, step=3, stream=2)
    found = storage.round_by_words(x, dtype, words)
    assert torch.equal(found.float().nan_to_num(7), expected.nan_to_num(7))
    numbers = ~x.isnan()  # a CPU may give NaN another sign
    assert torch.equal(found.signbit()[numbers], expected.signbit()[numbers])


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 16), (torch.float16, 22)])
def test_kahan_holds_twice_the_bits_of_the_weight(dtype, bits):
    x = spread(20_000, low=-1, high=1)
    weight, rest = storage.store_weight(x, dtype, "kahan")
    finest = 2.0**-25 if dtype == torch.float16 else 0.0
    assert rest.dtype == dtype
    assert ((storage.load_weight(weight, rest) - x).abs() <= (x.abs() * 2.0**-bits).clamp(min=finest)).all()
    assert float(((weight.float() - x).abs() / x.abs()).max()) > 2.0 ** -(bits // 2 + 2)


def test_8_bit_signed_states_are_off_by_less_than_one_code():
    x = spread(256 * 40)
    scale = x.view(-1, 256).abs().amax(1, keepdim=True).expand(-1, 256).reshape(-1)
    bound = 2 * (x.abs() * scale).sqrt() / 127 + scale / 127**2
    for words in (None, random_words(x.numel(), seed=0)):
        error = (quantized(x, torch.int8, words) - x).abs()
        assert (error <= bound * (1 + 1e-5)).all()
        assert float((error / scale).max()) <= 0.0158
    assert ((quantized(x, torch.int8) - x).abs() <= bound * 0.51 + 1e-12).all()


def test_8_bit_squares_are_off_by_less_than_one_code():
    x = spread(256 * 40, low=-12).abs()
    scale = x.view(-1, 256).amax(1, keepdim=True).expand(-1, 256).reshape(-1)
    place = 255 * (x / scale) ** 0.25
    gap = scale * ((place + 1) ** 4 - place**4).div(255.0**4)
    for words in (None, random_words(x.numel(), seed=0)):
        found = quantized(x, torch.uint8, words)
        error = (found - x).abs()
        assert (error <= gap * (1 + 1e-3)).all()
        share = x / scale
        assert float((error / x)[share > 1 / 40].max()) <= 0.041
        assert float((error / x)[share > 0.9].max()) <= 0.0165
        # Zero would divide by eps alone.
        assert (found > 0).all()


def test_a_uniform_8_bit_code_would_lose_most_small_moments():
    x = spread(256 * 40, low=-4)
    scale = x.view(-1, 256).abs().amax(1, keepdim=True).expand(-1, 256).reshape(-1)
    uniform = torch.round(x / scale * 127) * scale / 127
    lost = float((uniform == 0).float().mean())
    kept = float((quantized(x, torch.int8) == 0).float().mean())
    assert lost > 0.3
    assert kept == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.uint8])
def test_stochastic_rounding_of_states_is_unbiased(dtype):
    x = spread(256, low=-3)
    x = x.abs() if dtype == torch.uint8 else x
    count = 4000
    many = x.repeat(count)
    mean = quantized(many, dtype, half_of(random_words(many.numel(), seed=1), 1)).view(count, 256).double().mean(0)
    down = quantized(x, dtype, torch.full((256,), 2**32 - 1))
    up = quantized(x, dtype, torch.zeros(256, dtype=torch.int64))
    # One rounding picks one of two numbers: the mean of n is off by half their distance / sqrt(n). Five of these.
    bound = 2.5 * (up - down).abs() / count**0.5 + 1e-6 * x.abs()
    assert ((mean - x).abs() <= bound).all()
    # The instrument sees a bias where there is one.
    assert float(((quantized(x, dtype) - x).abs() > bound).float().mean()) > 0.5


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_second_moments_follow_a_falling_gradient(form):
    """v decays by 0.1 % a step: 700 steps halve it, if nothing freezes."""
    dtype = torch.bfloat16 if form == "bf16" else torch.uint8
    v = torch.ones(256) if form == "bf16" else torch.linspace(0.5, 1, 256)
    start = v.clone()
    stored, scale = storage.store_state(v, dtype, None)
    for step in range(700):
        v = storage.load_state(stored, scale) * 0.999
        stored, scale = storage.store_state(v, dtype, random_words(256, seed=2, step=step))
    mean = float((storage.load_state(stored, scale) / start).mean())
    assert mean == pytest.approx(0.999**700, rel=0.03)


def test_nearest_rounding_of_second_moments_would_freeze():
    v = torch.ones(256)
    for _ in range(700):
        v = (v * 0.999).to(torch.bfloat16).float()
    assert torch.equal(v, torch.ones(256))


def test_a_block_of_zeros_stays_zero():
    for dtype in (torch.int8, torch.uint8):
        stored, scale = storage.store_state(torch.zeros(256), dtype, random_words(256, seed=0))
        assert not stored.any()
        assert not storage.load_state(stored, scale).any()


def test_a_nan_in_a_block_is_not_hidden():
    x = torch.ones(512)
    x[3] = torch.nan
    found = quantized(x, torch.int8)
    assert found[:256].isnan().all()
    assert torch.equal(found[256:], x[256:])


def test_one_word_serves_two_states_with_different_bits():
    words = random_words(4000, seed=3)
    upper, lower = half_of(words, 0), half_of(words, 1)
    assert torch.equal(upper >> 16, words >> 16)
    assert torch.equal(lower >> 16, words & 0xFFFF)
    for half in (upper, lower):
        assert torch.equal(half & 0xFFFF, torch.full_like(words, 0x8000))
    together = torch.corrcoef(torch.stack([upper, lower]).double())[0, 1]
    assert abs(float(together)) < 5 / 4000**0.5
    assert float(torch.corrcoef(torch.stack([upper, upper]).double())[0, 1]) > 0.99


def state_words_of(start, size, *, width=None):
    """The words of a shard of one parameter, in step 3."""
    weight = torch.zeros(size)
    part = WavePart(Entry(weight, weight, {}, {}, 0, start), 3.0, {})
    return Wave([Slice(part, 0, size, 0)], [width or size]).state_words(5, [9])[:size]


def test_neighbours_share_a_word_with_its_halves_exchanged():
    words = state_words_of(0, 600)
    drawn = random_words(300, seed=5, step=3, stream=9)
    assert torch.equal(words[::2], drawn)
    assert torch.equal(half_of(words[1::2], 0) >> 16, drawn & 0xFFFF)
    assert torch.equal(half_of(words[1::2], 1) >> 16, drawn >> 16)
    # No two elements have the same bits for the same state, but for chance: 600 of 65536.
    for index in (0, 1):
        assert half_of(words, index).unique().numel() > 580
        assert half_of(drawn.repeat_interleave(2), index).unique().numel() <= 300


@pytest.mark.parametrize(("start", "size", "width"), [(8, 500, None), (7, 249, 256), (3, 253, 256), (5, 1, None)])
def test_a_shard_has_the_words_of_its_place(start, size, width):
    whole = state_words_of(0, 600)
    assert torch.equal(state_words_of(start, size, width=width), whole[start : start + size])
    assert not torch.equal(state_words_of(start, size, width=width), whole[:size])
