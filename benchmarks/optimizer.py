"""The optimizer phase: unscale, finite check, clip by global norm, AdamW, scale update. Ratios from one run.

GPU: the weights of a 369M-parameter GPT and of 290 small tensors, against torch AMP (GradScaler, clip_grad_norm_,
fused AdamW), torch's fused AdamW on bare 16-bit weights, and other libraries where they can be imported.
CPU: one plain step of AdamW, Adam and SGD against torch's foreach step.
"""

import importlib
import platform
import statistics
import time
import warnings
from collections.abc import Callable

import torch

import floatline as fl

LR, DECAY, CLIP = 1e-3, 0.1, 1.0


def gpt_shapes(layers: int = 24, width: int = 1024, vocabulary: int = 65536) -> list[tuple[int, ...]]:
    """A GPT's weights: 369.4M numbers in 291 tensors."""
    block = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(vocabulary, width), *block * layers, (width,), (width,)]


def small_shapes() -> list[tuple[int, ...]]:
    """290 tensors, 1.6M numbers: the launches cost more than the work."""
    return [(74, 74)] * 290


def make_params(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: str) -> list[torch.nn.Parameter]:
    """Weights with gradients as a scaled backward pass leaves them."""
    params = [torch.nn.Parameter((torch.randn(s, device=device) * 0.02).to(dtype)) for s in shapes]
    for param in params:
        param.grad = (torch.randn(param.shape, device=device) * 1e-3).to(dtype)
    return params


def torch_amp(shapes: list[tuple[int, ...]]) -> Callable[[], object]:
    """What people run: GradScaler, clip_grad_norm_ and fused AdamW on FP32 weights."""
    params = make_params(shapes, torch.float32, "cuda")
    optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=DECAY, fused=True)
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(torch.zeros((), device="cuda"))

    def phase() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, CLIP)
        scaler.step(optimizer)
        scaler.update()

    return phase


def floatline_phase(shapes: list[tuple[int, ...]], dtype: torch.dtype, **options: str) -> Callable[[], object]:
    """floatline's: one call, and torch's own kernel for the scale."""
    params = make_params(shapes, dtype, "cuda")
    optimizer = fl.optim.AdamW(params, lr=LR, weight_decay=DECAY, **options)
    scale = torch.full((), 65536.0, device="cuda")
    tracker = torch.zeros((), dtype=torch.int32, device="cuda")
    skipped = torch.zeros((), device="cuda")

    def phase() -> None:
        optimizer.step(scale=scale, clip_norm=CLIP)
        torch.logical_not(optimizer.decision.applied, out=skipped)
        torch._amp_update_scale_(scale, tracker, skipped, 2.0, 0.5, 1000)

    phase.optimizer = optimizer
    return phase


def bare_step(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> Callable[[], object]:
    """torch's fused AdamW on 16-bit weights: no scaling, no clipping, and it loses updates."""
    return torch.optim.AdamW(make_params(shapes, dtype, "cuda"), lr=LR, weight_decay=DECAY, fused=True).step


def other_libraries(shapes: list[tuple[int, ...]]) -> dict[str, Callable[[], object]]:
    """Step alone, without unscale and clip, of libraries that are installed here."""
    found: dict[str, Callable[[], object]] = {}
    for module, label in (("optimi", "optimi bf16 kahan"), ("flashoptim", "flashoptim bf16")):
        if importlib.util.find_spec(module):
            cls = getattr(importlib.import_module(module), "AdamW", None) or importlib.import_module(module).FlashAdamW
            found[f"{label}, step alone"] = cls(make_params(shapes, torch.bfloat16, "cuda"), lr=LR).step
    return found


def wall(phases: dict[str, Callable[[], object]], *, rounds: int) -> dict[str, float]:
    """Median seconds from an idle device to an idle device: what a phase adds to a step, host work included.

    The phases take turns in every round: a host that slows down or speeds up does so for all of them. Each runs
    twice and the second time counts: the first after another phase finds the host's caches full of that one.
    """
    times: dict[str, list[float]] = {label: [] for label in phases}
    for i in range(rounds + 5):
        for label, run in phases.items():
            run()
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            if i >= 5:
                times[label].append(time.perf_counter() - start)
    return {label: statistics.median(taken) for label, taken in times.items()}


def device_time(run: Callable[[], object], *, rounds: int = 30) -> float:
    """Median seconds on the device alone, replayed from a captured graph."""
    for _ in range(3):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return events(graph.replay, rounds=rounds)


def events(run: Callable[[], object], *, rounds: int = 30) -> float:
    """Median seconds between two events on the device."""
    times: list[float] = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of 4 GiB."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    for _ in range(20):
        target.copy_(source)
    return 2 * source.nbytes / events(lambda: target.copy_(source))


def on_gpu() -> None:
    """Both sizes, everything in one run."""
    bandwidth = copy_bandwidth()
    print(f"GPU {torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s")
    kinds = {
        "fp16 exact": (torch.float16, {}, 28),
        "bf16 exact": (torch.bfloat16, {}, 28),
        "fp32": (torch.float32, {}, 32),
        "bf16 stochastic": (torch.bfloat16, {"update": "stochastic"}, 24),
        "bf16 kahan": (torch.bfloat16, {"update": "kahan"}, 28),
        "fp16 exact, bf16 states": (torch.float16, {"states": "bf16"}, 20),
        "fp16 exact, int8 states": (torch.float16, {"states": "int8"}, 16),
    }
    for name, shapes, rounds in (("369M", gpt_shapes(), 40), ("290 small tensors", small_shapes(), 100)):
        count = sum(torch.Size(shape).numel() for shape in shapes)
        phases: dict[str, Callable[[], object]] = {"torch AMP": torch_amp(shapes)}
        first: dict[str, float] = {}
        for kind, (dtype, options, _) in kinds.items():
            phases[kind] = floatline_phase(shapes, dtype, **options)
            start = time.perf_counter()
            phases[kind]()
            torch.cuda.synchronize()
            first[kind] = time.perf_counter() - start
        for dtype in (torch.float16, torch.bfloat16):
            phases[f"torch fused, bare {str(dtype)[6:]}"] = bare_step(shapes, dtype)
        phases |= other_libraries(shapes)
        taken = wall(phases, rounds=rounds)
        base = taken["torch AMP"]
        print(f"\n{name}: {count / 1e6:.1f}M weights, {rounds} rounds in turn; torch AMP {base * 1e3:.3f} ms")
        print(f"  {'':<34}{'ms':>8}{'of AMP':>8}{'device ms':>11}{'of floor':>10}{'bytes/weight':>14}{'first s':>9}")
        for kind, (_, _, traffic) in kinds.items():
            alone = device_time(phases[kind])
            held = phases[kind].optimizer.memory()
            print(
                f"  {'floatline ' + kind:<34}{taken[kind] * 1e3:>8.3f}{taken[kind] / base:>8.3f}{alone * 1e3:>11.3f}"
                f"{alone / (traffic * count / bandwidth):>10.2f}{held.total / held.num_parameters:>14.2f}"
                f"{first[kind]:>9.1f}"
            )
        for label in [label for label in phases if label not in kinds and label != "torch AMP"]:
            print(f"  {label:<34}{taken[label] * 1e3:>8.3f}{taken[label] / base:>8.3f}")
        del phases
        torch.cuda.empty_cache()


def on_cpu() -> None:
    """One plain step on 10M weights in 50 tensors, taking turns with torch's foreach step of the same kind."""
    shapes = gpt_shapes(layers=4, width=384, vocabulary=8192)
    count = sum(torch.Size(shape).numel() for shape in shapes)
    cores = torch.get_num_threads()
    print(f"CPU {platform.machine()}, {cores} threads, torch {torch.__version__}, {count / 1e6:.1f}M weights")
    kinds = {
        "AdamW": ("AdamW", {"weight_decay": DECAY}),
        "Adam": ("Adam", {}),
        "SGD, momentum": ("SGD", {"momentum": 0.9}),
        "SGD, momentum, decay": ("SGD", {"momentum": 0.9, "weight_decay": 1e-4}),
        "SGD, plain": ("SGD", {}),
    }
    for title, (name, options) in kinds.items():
        wide = make_params(shapes, torch.float32, "cpu")
        steps = {f"torch foreach {title}": getattr(torch.optim, name)(wide, lr=LR, foreach=True, **options).step}
        for label, dtype in (("fp32", torch.float32), ("fp16 exact", torch.float16), ("bf16 exact", torch.bfloat16)):
            params = make_params(shapes, dtype, "cpu")
            steps[f"floatline {label}"] = getattr(fl.optim, name)(params, lr=LR, **options).step
        print_cpu_times(steps)


def print_cpu_times(steps: dict[str, Callable[[], object]]) -> None:
    """Medians of steps that take turns, as shares of the first one's; processor time where there is one thread."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {label: [] for label in steps}
    for i in range(24):
        for label, step in steps.items():
            start = clock()
            step()
            if i >= 3:
                times[label].append(clock() - start)
    first = next(iter(times))
    base = statistics.median(times[first])
    for label, taken in times.items():
        median = statistics.median(taken)
        print(f"  {label:<36}{median * 1e3:>8.1f} ms   {median / base:.2f}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    on_cpu()
    if torch.cuda.is_available():
        on_gpu()
    else:
        print("GPU: none here")
