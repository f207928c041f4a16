"""Ranges of a 100M-element FP16 tensor against reading it once. Prints ratios measured in one run.

CPU: one `measure_ranges` against one `x.abs().max()`, interleaved, medians.
GPU: bytes read per second against the bytes read and written by a device-to-device copy.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch

from floatline.numerics.ranges import measure_ranges

FORMATS = ("fp16", "bf16", "fp8_e4m3fn")


def interleaved(
    candidates: dict[str, Callable[[], object]], *, rounds: int, finish: Callable[[], object]
) -> dict[str, float]:
    """Median seconds of each candidate; they take turns, so that a busy machine slows all of them."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for i in range(rounds + 2):
        for name, run in candidates.items():
            finish()
            start = time.perf_counter()
            run()
            finish()
            if i >= 2:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def on_cpu(count: int) -> None:
    """Ratio to one pass of abs().max()."""
    x = (torch.randn(count) * 1e-3).half()
    candidates = {
        "abs().max()": lambda: x.abs().max().item(),
        "ranges, own format": lambda: measure_ranges(x).zeros,
        "ranges, 3 formats": lambda: measure_ranges(x, *FORMATS).zeros,
    }
    times = interleaved(candidates, rounds=9, finish=lambda: None)
    print(
        f"CPU {platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, {count:,} FP16 values"
    )
    for name, taken in times.items():
        print(f"  {name:<22} {taken * 1e3:8.1f} ms   {taken / times['abs().max()']:.2f} x one abs().max()")


def on_gpu(count: int) -> None:
    """Share of the copy bandwidth, by CUDA events; the host's work is kept out by replaying a captured graph."""
    bandwidth = copy_bandwidth()
    where = f"GPU {torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{where}, copy {bandwidth / 1e12:.2f} TB/s, {count:,} values")
    for dtype, scale in ((torch.float16, 1e-3), (torch.float16, 1.0), (torch.bfloat16, 1e-3), (torch.float32, 1e-3)):
        x = (torch.randn(count, device="cuda") * scale).to(dtype)
        name = str(dtype).removeprefix("torch.")
        for formats in ((), FORMATS):
            taken = gpu_seconds(lambda x=x, formats=formats: measure_ranges(x, *formats))
            label = f"{name} N(0, {scale:g}), {'own format' if not formats else '3 formats'}"
            print(f"  {label:<34} {taken * 1e6:8.1f} us   {x.nbytes / taken / bandwidth:.2f} of the copy bandwidth")


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of 4 GiB."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / gpu_seconds(lambda: target.copy_(source), graph=False)


def gpu_seconds(run: Callable[[], object], *, graph: bool = True) -> float:
    """Median of 50 timings after a warm-up; the inputs are larger than the second-level cache."""
    until = time.perf_counter() + 0.5  # the clocks need a while
    while time.perf_counter() < until:
        run()
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        run = captured.replay
    times: list[float] = []
    for _ in range(50):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=100_000_000)
    chosen = parser.parse_args()
    on_cpu(chosen.count)
    if torch.cuda.is_available():
        on_gpu(chosen.count)
    else:
        print("GPU: none here")
