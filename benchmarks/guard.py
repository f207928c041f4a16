"""A whole training step under guard against the loops people write. Ratios from one run.

GPU: a 369M-parameter GPT at batch 8 and 1, and a small one with 290 tensors, against FP16 autocast with GradScaler,
clip_grad_norm_ and fused AdamW. CPU: the small one against the bare loop.
"""

import argparse
import gc
import platform
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import floatline as fl

LR, DECAY, CLIP = 1e-4, 0.1, 1.0


class Block(nn.Module):
    """One transformer block: twelve tensors."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then the feed-forward part."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT whose output shares the embedding: 369.4M weights in 291 tensors with the default sizes."""

    def __init__(self, *, layers: int = 24, width: int = 1024, vocabulary: int = 65536, heads: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


SIZES = {
    "369M, batch 8": ({}, (8, 1024)),
    "369M, batch 1": ({}, (1, 1024)),
    "290 small tensors": ({"layers": 24, "width": 68, "vocabulary": 4096, "heads": 4}, (4, 64)),
}


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the next token."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def bare(
    model: nn.Module, device: str, dtype: torch.dtype = torch.float16, *, compiled: bool = False
) -> Callable[[torch.Tensor], object]:
    """What people run."""
    run = torch.compile(loss_of) if compiled else loss_of
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, fused=True)
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)

    def step(tokens: torch.Tensor) -> None:
        with torch.autocast(device, dtype=dtype):
            loss = run(model, tokens)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def hand_written(model: nn.Module, device: str) -> Callable[[torch.Tensor], object]:
    """The same with the checks that people add: loss, every parameter's gradient, the scale before and after."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, fused=True)
    scaler = torch.amp.GradScaler(device)

    def step(tokens: torch.Tensor) -> None:
        with torch.autocast(device, dtype=torch.float16):
            loss = loss_of(model, tokens)
        if torch.isnan(loss) or torch.isinf(loss):
            optimizer.zero_grad()
            return
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for param in model.parameters():
            if param.grad is not None and (torch.isnan(param.grad).any() or torch.isinf(param.grad).any()):
                break
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        _ = scaler.get_scale() < before
        optimizer.zero_grad(set_to_none=True)

    return step


def debug_hook(model: nn.Module, device: str) -> Callable[[torch.Tensor], object]:
    """transformers' DebugUnderflowOverflow around the bare loop."""
    from transformers.debug_utils import DebugUnderflowOverflow

    DebugUnderflowOverflow(model)
    return bare(model, device)


def guarded(
    model: nn.Module,
    _device: str,
    *,
    plan: str = "fp16-mixed",
    optimizer: str = "floatline",
    record: bool = False,
    states: str = "fp32",
    graph: bool = False,
    compiled: bool = False,
) -> Callable[[torch.Tensor], object]:
    """floatline's guard."""
    if plan.endswith("true"):
        model.to(torch.float16 if plan.startswith("fp16") else torch.bfloat16)
    if optimizer == "floatline":
        trained = fl.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, states=states)
    else:
        trained = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, fused=True)
    policy = fl.Policy(underflow_every=1) if record else None
    options = {"record_layers_every": 1 if record else 0, "policy": policy, "graph": graph}
    guard = fl.Guard(model, trained, plan=plan, clip_norm=CLIP, **options)
    run = torch.compile(loss_of) if compiled else loss_of

    def compute_loss(tokens: torch.Tensor) -> torch.Tensor:
        return run(model, tokens)

    def step(tokens: torch.Tensor) -> None:
        guard.step(compute_loss, tokens)

    return step


GPU_ARMS: dict[str, Callable[..., Callable[[torch.Tensor], object]]] = {
    "bare AMP + clip, fused AdamW": bare,
    "guard, fp16-mixed, floatline AdamW": guarded,
    "guard, fp16-mixed, torch fused AdamW": lambda m, d: guarded(m, d, optimizer="torch"),
    "the same as the first guard, layers recorded": lambda m, d: guarded(m, d, record=True),
    "guard, fp16-true": lambda m, d: guarded(m, d, plan="fp16-true"),
    "guard, bf16-true": lambda m, d: guarded(m, d, plan="bf16-true"),
    "guard, fp16-true, int8 states": lambda m, d: guarded(m, d, plan="fp16-true", states="int8"),
    "guard, fp16-mixed, graph": lambda m, d: guarded(m, d, graph=True),
    "guard, fp16-true, graph": lambda m, d: guarded(m, d, plan="fp16-true", graph=True),
    "guard, bf16-true, graph": lambda m, d: guarded(m, d, plan="bf16-true", graph=True),
    "hand-written checks": hand_written,
    "transformers DebugUnderflowOverflow": debug_hook,
}
COMPILED_ARMS: dict[str, Callable[..., Callable[[torch.Tensor], object]]] = {
    "bare AMP, compiled": lambda m, d: bare(m, d, compiled=True),
    "guard, fp16-mixed, compiled": lambda m, d: guarded(m, d, compiled=True),
    "guard, fp16-true, compiled": lambda m, d: guarded(m, d, plan="fp16-true", compiled=True),
    "guard, fp16-true, compiled, graph": lambda m, d: guarded(m, d, plan="fp16-true", graph=True, compiled=True),
}


def count_syncs(step: Callable[[torch.Tensor], object], tokens: torch.Tensor, *, steps: int = 3) -> float:
    """Host syncs per step that torch's sync debug mode sees."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(steps):
                step(tokens)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) and "prototype" not in str(w.message) for w in caught) / steps


def time_rounds(
    steps: dict[str, Callable[[torch.Tensor], object]], tokens: torch.Tensor, *, rounds: int, each: int
) -> dict[str, list[float]]:
    """Seconds per step of every arm in every round, the arms taking turns."""
    wait = torch.cuda.synchronize if tokens.is_cuda else (lambda: None)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            wait()
            start = time.perf_counter()
            for _ in range(each):
                step(tokens)
            wait()
            times[name].append((time.perf_counter() - start) / each)
    return times


def on_gpu(sizes: list[str], *, rounds: int, only: str, compiled: bool) -> None:
    """Every size, every arm; with `only` the first, and those whose names hold it."""
    arms = GPU_ARMS | (COMPILED_ARMS if compiled else {})
    first = next(iter(arms))
    bare(GPT(**SIZES["290 small tensors"][0]).cuda(), "cuda")(torch.zeros(1, 9, dtype=torch.int64, device="cuda"))
    print(f"GPU {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name in sizes:
        options, shape = SIZES[name]
        torch.manual_seed(0)
        tokens = torch.randint(0, options.get("vocabulary", 65536), (shape[0], shape[1] + 1), device="cuda")
        steps: dict[str, Callable[[torch.Tensor], object]] = {}
        memory: dict[str, float] = {}
        syncs: dict[str, float] = {}
        for arm, build in arms.items():
            if only not in arm and arm != first:
                continue
            torch.manual_seed(0)
            gc.collect()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            try:
                steps[arm] = build(GPT(**options).cuda(), "cuda")
            except ImportError as error:
                print(f"  {arm}: left out, {error}")
                continue
            for _ in range(12):  # a captured step is held against a plain one in the 1st, 2nd, 4th and 8th replay
                steps[arm](tokens)
            torch.cuda.synchronize()
            memory[arm] = (torch.cuda.max_memory_allocated() - before) / 2**30
            syncs[arm] = count_syncs(steps[arm], tokens)
        each = 20 if "small" in name else 3
        times = time_rounds(steps, tokens, rounds=rounds, each=each)
        report(name, times, memory, syncs)
        del steps
        gc.collect()
        torch.cuda.empty_cache()


def report(name: str, times: dict[str, list[float]], memory: dict[str, float], syncs: dict[str, float]) -> None:
    """Medians; ratios are medians of the ratios within a round."""
    first = next(iter(times))
    print(f"\n{name}")
    print(f"  {'':48} {'ms':>8} {'of bare':>8} {'GiB':>6} {'of bare':>8} {'syncs/step':>11}")
    for arm, values in times.items():
        ratio = statistics.median(v / b for v, b in zip(values, times[first], strict=True))
        line = f"  {arm:48} {statistics.median(values) * 1e3:8.2f} {ratio:8.3f}"
        if arm in memory:
            line += f" {memory[arm]:6.2f} {memory[arm] / memory[first]:8.3f} {syncs[arm]:11.1f}"
        print(line)


def on_cpu(*, rounds: int) -> None:
    """The small one against the bare loops, in FP32, and in BF16 where the CPU has it."""
    print(f"CPU {platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    options, shape = SIZES["290 small tensors"]
    tokens = torch.randint(0, options["vocabulary"], (shape[0], shape[1] + 1))
    plans = [("fp32", torch.float32)]
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        plans.append(("bf16-mixed", torch.bfloat16))
    for plan, dtype in plans:
        arms = {
            f"bare {plan} + clip, fused AdamW": bare_cpu(GPT(**options), dtype),
            f"guard, {plan}, torch fused AdamW": guarded(GPT(**options), "cpu", plan=plan, optimizer="torch"),
            f"guard, {plan}, floatline AdamW": guarded(GPT(**options), "cpu", plan=plan),
        }
        for step in arms.values():
            for _ in range(3):
                step(tokens)
        report(f"290 small tensors, {plan}", time_rounds(arms, tokens, rounds=rounds, each=3), {}, {})


def bare_cpu(model: nn.Module, dtype: torch.dtype) -> Callable[[torch.Tensor], object]:
    """Autocast or not, clip, fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, fused=True)

    def step(tokens: torch.Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = loss_of(model, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="a part of the names of the arms that are run, besides the first")
    parser.add_argument("--compiled", action="store_true", help="compiled loops as well, which take minutes to compile")
    parser.add_argument("--cpu", action="store_true", help="the CPU part only")
    arguments = parser.parse_args()
    if torch.cuda.is_available() and not arguments.cpu:
        on_gpu(arguments.sizes, rounds=arguments.rounds, only=arguments.only, compiled=arguments.compiled)
    else:
        on_cpu(rounds=arguments.rounds)
