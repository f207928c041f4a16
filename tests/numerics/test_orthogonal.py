"""Newton–Schulz in three precisions: against the same iteration in float64, and against torch's."""

import pytest
import torch

from floatline.errors import TensorError
from floatline.numerics.orthogonal import COEFFICIENTS, half_scale, newton_schulz

SHAPES = [(48, 48), (64, 24), (24, 64), (5, 3), (1, 7)]
# How far from the float64 iteration, as a share of its norm: seen up to 0.033, 0.005 and 1.6e-6.
BOUNDS = {"bf16": 0.05, "fp16": 0.01, "fp32": 5e-6}
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch's, on a CPU without bfloat16


def random_matrix(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.01


def orthogonalize(matrix, dtype, coefficients=COEFFICIENTS, steps=5):
    turned, scale = newton_schulz(matrix, dtype, coefficients=coefficients, steps=steps, eps=1e-7)
    return turned.float() / scale


def in_float64(matrix, steps=5):
    x = matrix.double()
    x = x.T if x.size(0) > x.size(1) else x
    x = x / x.norm()
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.size(0) > matrix.size(1) else x


def distance(turned, matrix):
    expected = in_float64(matrix)
    return float((turned.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_follows_the_iteration_in_float64(shape, dtype):
    matrix = random_matrix(shape)
    before = matrix.clone()
    assert distance(orthogonalize(matrix, dtype), matrix) < BOUNDS[dtype]
    assert torch.equal(matrix, before)


def test_bfloat16_would_not_pass_as_fp16_nor_fp16_as_float32():
    matrix = random_matrix((64, 64))
    assert distance(orthogonalize(matrix, "bf16"), matrix) > BOUNDS["fp16"]
    assert distance(orthogonalize(matrix, "fp16"), matrix) > BOUNDS["fp32"]


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_torch_bit_for_bit(shape):
    muon = pytest.importorskip("torch.optim._muon", reason="torch.optim.Muon exists from torch 2.9 on")
    matrix = random_matrix(shape)
    turned, scale = newton_schulz(matrix, "bf16", coefficients=COEFFICIENTS, steps=5, eps=1e-7)
    assert scale == 1.0
    assert torch.equal(turned, muon._zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, 1e-7))


@pytest.mark.parametrize("dtype", BOUNDS)
def test_singular_values_end_near_one(dtype):
    left, right = (torch.linalg.qr(torch.randn(64, 64))[0] for _ in range(2))
    matrix = left @ torch.diag(torch.logspace(-2, 0, 64)) @ right
    values = torch.linalg.svdvals(orthogonalize(matrix, dtype))
    assert 0.65 < float(values.min()) < float(values.max()) < 1.23


def test_those_of_the_matrix_itself_do_not():
    assert float(torch.linalg.svdvals(torch.diag(torch.logspace(-2, 0, 64))).min()) < 0.02


def small_elements(dtype, scale):
    """Elements of 1/4096 and less, as a matrix of 4096 columns has them, through FP16 at a scale and back."""
    values = torch.logspace(-9, -4, 1000) * scale
    return ((values.to(dtype).float() - values) / values).abs().max()


def test_the_scale_keeps_small_elements_that_fp16_alone_would_lose():
    assert small_elements(torch.float16, half_scale(COEFFICIENTS, 5)) < 0.01
    assert small_elements(torch.float16, 1.0) == 1.0


def test_the_scale_leaves_room_for_the_largest_element():
    assert half_scale(COEFFICIENTS, 5) == 8192.0
    steep = torch.zeros(8, 8)
    steep[0, 0] = 1.0  # one singular value, in one element, which the polynomial takes to 1.2 and its inside to -2.8
    assert orthogonalize(steep, "fp16").isfinite().all()


def test_coefficients_that_fp16_cannot_follow_are_refused():
    with pytest.raises(TensorError, match=r"take singular values up to .* Use coefficients that keep them"):
        orthogonalize(torch.eye(3), "fp16", coefficients=(9.0, 9.0, 9.0))
    assert orthogonalize(torch.eye(3), "bf16", coefficients=(9.0, 9.0, 9.0), steps=1).isfinite().all()
