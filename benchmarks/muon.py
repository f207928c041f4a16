"""Muon: how far Newton–Schulz is off in each precision, and a step's time against torch.optim.Muon, in one run."""

from __future__ import annotations

import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import floatline as fl
from floatline.numerics.orthogonal import COEFFICIENTS, NS_DTYPES, NewtonSchulzName, newton_schulz

LR = 0.02


def in_float64(matrix: Tensor) -> Tensor:
    """The same iteration in float64: what rounding alone takes away is the distance to it."""
    x = matrix.double()
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / x.norm()
    a, b, c = COEFFICIENTS
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def orthogonalize(matrix: Tensor, dtype: NewtonSchulzName) -> Tensor:
    """Newton–Schulz as an optimizer's step takes it, in float32."""
    turned, scale = newton_schulz(matrix, dtype, coefficients=COEFFICIENTS, steps=5, eps=1e-7)
    return turned.float() / scale


def off_orthogonal(matrix: Tensor) -> float:
    """‖X·Xᵀ - I‖ / sqrt(n), over the shorter side."""
    x = matrix.double()
    x = x.T if x.size(0) > x.size(1) else x
    return float((x @ x.T - torch.eye(x.size(0), dtype=x.dtype, device=x.device)).norm() / x.size(0) ** 0.5)


def spread(rows: int, columns: int, *, decades: float, device: str) -> Tensor:
    """A matrix whose singular values fall over so many powers of ten, as those of a momentum do."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    left, _, right = torch.linalg.svd(values, full_matrices=False)
    fall = torch.logspace(0, -decades, left.size(1), dtype=torch.float64)
    return ((left * fall) @ right).float().to(device)


def print_errors(device: str, sizes: list[tuple[int, int]]) -> None:
    """Distance to float64 and to an orthogonal matrix, for each precision."""
    print(f"\n{'matrix':<34}{'':>6}{'off float64':>13}{'off orthogonal':>16}{'singular values':>20}")
    for rows, columns in sizes:
        kinds = {"random": torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(device)}
        kinds["4 decades"] = spread(rows, columns, decades=4, device=device)
        for kind, matrix in kinds.items():
            exact = in_float64(matrix)
            for name in (*NS_DTYPES, "fp64"):
                turned = exact if name == "fp64" else orthogonalize(matrix, name)
                off = float((turned.double() - exact).norm() / exact.norm())
                values = torch.linalg.svdvals(turned.double())
                print(
                    f"{f'{rows} x {columns}, {kind}':<34}{name:>6}{off:>13.2e}{off_orthogonal(turned):>16.3f}"
                    f"{float(values.min()):>12.3f} to {float(values.max()):.3f}"
                )


def make_params(shapes: list[tuple[int, int]], dtype: torch.dtype, device: str) -> list[nn.Parameter]:
    """Weights with gradients."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter((torch.randn(s, generator=generator) * 0.02).to(dtype).to(device)) for s in shapes]
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * 1e-3).to(dtype).to(device)
    return params


def print_times(device: str, shapes: list[tuple[int, int]], rounds: int) -> None:
    """Steps that take turns: medians, as shares of torch.optim.Muon's."""
    steps: dict[str, Callable[[], object]] = {
        "torch.optim.Muon, fp32 weights": torch.optim.Muon(make_params(shapes, torch.float32, device), lr=LR).step
    }
    for label, dtype, options in (
        ("floatline fp32", torch.float32, {}),
        ("floatline bf16 exact", torch.bfloat16, {}),
        ("floatline fp16 exact", torch.float16, {}),
        ("floatline fp32, ns_dtype fp16", torch.float32, {"ns_dtype": "fp16"}),
        ("floatline fp32, ns_dtype fp32", torch.float32, {"ns_dtype": "fp32"}),
        ("floatline bf16 exact, ns_dtype fp32", torch.bfloat16, {"ns_dtype": "fp32"}),
    ):
        steps[label] = fl.optim.Muon(make_params(shapes, dtype, device), lr=LR, **options).step
    times: dict[str, list[float]] = {label: [] for label in steps}
    for i in range(rounds + 2):
        for label, step in steps.items():
            wait(device)
            start = time.perf_counter()
            step()
            wait(device)
            if i >= 2:
                times[label].append(time.perf_counter() - start)
    base = statistics.median(times["torch.optim.Muon, fp32 weights"])
    count = sum(rows * columns for rows, columns in shapes)
    print(f"\n{len(shapes)} matrices, {count / 1e6:.2f}M weights, {rounds} rounds in turn")
    for label, taken in times.items():
        median = statistics.median(taken)
        print(f"  {label:<38}{median * 1e3:>9.2f} ms   {median / base:.3f} of torch.optim.Muon")


def wait(device: str) -> None:
    """Until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if not hasattr(torch.optim, "Muon"):
        sys.exit("torch.optim.Muon exists from torch 2.9 on: there is nothing to compare with.")
    cuda = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if cuda else f"CPU {platform.machine()}, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}")
    if cuda:
        if "--times" not in sys.argv:  # the decompositions take a minute
            print_errors("cuda", [(1024, 1024), (4096, 1024), (4096, 4096)])
        print_times("cuda", [(1024, 1024)] * 24 * 4 + [(4096, 1024), (1024, 4096)] * 24, 20)
        print_times("cuda", [(64, 64)] * 200, 20)
    else:
        print_errors("cpu", [(64, 64), (256, 64), (160, 160)])
        print_times("cpu", [(96, 96)] * 4 + [(96, 32), (32, 96)] * 2, 9)
