"""Measures how near torch's own kernels come to their bounds on a device: python tools/kernel_bounds.py --device cuda.

Random and adversarial numbers of both formats go through every family of operations: as tests/probe/trace/
test_kernel_bounds.py has them for a CPU, and on CUDA large products under each setting of cuBLAS's reductions, and each
backend of attention. Prints JSON: by family and operation the largest error over what is allowed (1 is the bound), what
is beyond it, and planted wrong kernels that are not named. Where `holds` is true, the line `entry` may go into MEASURED
of kernel_checks.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.probe.trace import test_wrong_kernels as planted  # noqa: E402
from tests.probe.trace.test_kernel_bounds import FUNCTIONS, KINDS, PROGRAMS, SHAPES, JudgeAll, Numbers  # noqa: E402

from floatline.diagnosis.detectors.kernels import find_wrong_kernels  # noqa: E402
from floatline.probe.trace import kernel_checks  # noqa: E402
from floatline.probe.trace.kernel_checks import MEASURED, is_measured, name_kind  # noqa: E402

FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16}
BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)


def elementwise(numbers: Numbers) -> None:
    """Functions of one tensor; those that the device does not have in 16 bits are left out."""
    for shape, function in itertools.product(SHAPES, FUNCTIONS):
        with suppress(RuntimeError):
            result = function(numbers.leaf(*shape))
            result.backward(numbers(*result.shape))


def large_products(numbers: Numbers) -> None:
    """Products whose sums are long and whose results are few, which cuBLAS splits, and square ones."""
    for m, k, n in ((16, 16384, 16), (64, 8192, 64), (1, 4096, 1024), (512, 512, 512), (333, 1000, 77)):
        x, w = numbers.leaf(m, k), numbers.leaf(n, k)
        for result in (F.linear(x, w, numbers(n)), x @ w.t()):
            result.backward(numbers(*result.shape))
    a, b = numbers.leaf(6, 32, 2048), numbers.leaf(6, 2048, 32)
    (a @ b).backward(numbers(6, 32, 32))


def fused_attention(numbers: Numbers) -> None:
    """Attention of widths that every backend takes."""
    for queries, keys, width in ((128, 128, 64), (64, 512, 32), (33, 70, 128)):
        causal: tuple[dict[str, Any], ...] = ({"is_causal": True},) if queries == keys else ()
        for options in ({}, *causal, {"attn_mask": numbers(queries, keys)}, {"scale": 0.9}):
            q, k, v = numbers.leaf(2, 4, queries, width), *(numbers.leaf(2, 4, keys, width) for _ in "kv")
            with suppress(RuntimeError):  # a backend that does not take these
                result = F.scaled_dot_product_attention(q, k, v, **options)
                result.backward(numbers(*result.shape))


@contextmanager
def reductions_in_16_bits(allowed: bool) -> Iterator[None]:
    """cuBLAS with partial sums in 16 bits, or without."""
    flags = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = [getattr(flags, name) for name in names]
    try:
        for name in names:
            setattr(flags, name, allowed)
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(flags, name, value)


def list_families(device: str) -> dict[str, tuple[Callable[[Numbers], None], Callable[[], Any]]]:
    """What is run, and under which settings."""
    families: dict[str, tuple[Callable[[Numbers], None], Callable[[], Any]]] = {
        name: (elementwise if name == "elementwise" else program, nullcontext) for name, program in PROGRAMS.items()
    }
    if device == "cpu":
        return families | {"large products": (large_products, nullcontext)}
    for allowed in (True, False):
        words = "with" if allowed else "without"
        families[f"large products {words} reductions in 16 bits"] = (
            large_products,
            lambda allowed=allowed: reductions_in_16_bits(allowed),
        )
    for backend in BACKENDS:
        families[f"attention by {backend.name.lower()}"] = (fused_attention, lambda own=backend: sdpa_kernel(own))
    return families


def measure(device: str, kinds: list[str], seeds: int, table: dict[str, Any]) -> Iterator[str]:
    """Fill in the table: by family and operation, the largest error over what is allowed, and in which numbers."""
    for family, (program, settings) in list_families(device).items():
        nearest: dict[str, tuple[float, str]] = {}
        beyond: list[dict[str, Any]] = []
        failures: dict[str, int] = {}
        began = time.perf_counter()
        for kind, (name, dtype), seed in itertools.product(kinds, FORMATS.items(), range(seeds)):
            judge = JudgeAll()
            try:
                with settings(), judge:
                    program(Numbers(kind, dtype, seed, device))
            except RuntimeError as error:
                failures[f"{kind}, {name}: {error}"[:200]] = 1
            for op, ratio in judge.nearest.items():
                nearest[op] = max((ratio, f"{kind}, {name}"), nearest.get(op, (0.0, "")))
            beyond += [
                {"op": op, "numbers": f"{kind}, {name}, seed {seed}", **one.as_json()} for op, one in judge.wrong
            ]
            failures |= judge.failures
        rows = {op: {"ratio": round(ratio, 4), "numbers": where} for op, (ratio, where) in sorted(nearest.items())}
        seconds = round(time.perf_counter() - began, 1)
        table[family] = {"nearest": rows, "num_beyond": len(beyond), "beyond": beyond[:5], "failures": failures}
        print(f"{family}: {len(rows)} operations, {len(beyond)} beyond, {seconds} s", file=sys.stderr)
        yield family


def miss_plants(device: str) -> dict[str, str]:
    """Planted wrong kernels that are not named on the device, and why; those of a CPU's own attention are left out."""
    planted.DEVICE = device
    missed: dict[str, str] = {}
    for (plant, (op, call, kernel)), (name, dtype) in itertools.product(planted.PLANTS.items(), FORMATS.items()):
        if device != "cpu" and op == planted.FLASH:
            continue
        try:
            found = find_wrong_kernels(planted.record(op, call, kernel, dtype))
        except Exception as error:
            missed[f"{plant}, {name}"] = f"{type(error).__name__}: {error}"[:200]
            continue
        if [one.cause.id for one in found] != ["kernel-off"]:
            missed[f"{plant}, {name}"] = "not named"
    return missed


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description="Kernels of a device against their bounds.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), help="of numbers; all by default")
    parser.add_argument("--strict", action="store_true", help="bounds as derived; by default twice these, as diagnose")
    parser.add_argument("--out", type=Path, help="where to write the JSON as well, after each family")
    given = parser.parse_args()
    device = torch.device(given.device)
    kind, began = name_kind(device), time.perf_counter()
    MEASURED[kind] = (0, 0)
    is_measured.cache_clear()
    if given.strict:
        kernel_checks._CLEARLY = 1.0
    missed = miss_plants(given.device)
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    table: dict[str, Any] = {}
    document: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else kind,
        "torch": torch.__version__,
        "kinds": given.kinds,
        "seeds": given.seeds,
        "strict": given.strict,
        "holds": False,
        "entry": f'"{kind}": {version}',
        "num_beyond": 0,
        "plants_missed": missed,
        "families": table,
        "seconds": 0.0,
    }
    families = list_families(given.device)
    for _ in measure(given.device, given.kinds, given.seeds, table):
        document["num_beyond"] = sum(row["num_beyond"] for row in table.values())
        document["holds"] = len(table) == len(families) and not document["num_beyond"]
        document["seconds"] = round(time.perf_counter() - began, 1)
        if given.out:
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))
    raise SystemExit(0 if document["holds"] else 1)


if __name__ == "__main__":
    main()
