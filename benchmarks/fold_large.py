"""Models of 1 to 3 billion weights with planted outliers: time to record and to fold them, and FP16 before and after.

    python benchmarks/fold_large.py [--device cuda] [--only llama-1b] [--tokens 512]

Prints a Markdown table. The models are built of transformers' classes with the published sizes of each family, and
their weights and plants are those of benchmarks/fold_models.py. "recorded" is a forward pass in FP16 whose every
operation is compared with FP32, in times of the plain forward pass in FP16. "speed" is that of the folded model in FP16
against the one before the fold, medians of passes that take turns.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import fold_models
from torch import Tensor, nn

import floatline as fl
from floatline.folding.rewriting import half_copy
from floatline.probe.steps.captured_forward import capture_forward

LLAMA_1B = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip
LLAMA_3B = LLAMA_1B | {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128}
QWEN2_3B = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128,
}  # fmt: skip
GEMMA3_1B = {
    "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256,
    "sliding_window": 512,
}  # fmt: skip
LARGE = {
    "llama-1b": ("llama", fold_models.causal("Llama", **LLAMA_1B), 1.0),
    "gemma3-1b": ("gemma3", fold_models.causal("Gemma3", "Gemma3Text", **GEMMA3_1B), math.sqrt(1152)),
    "llama-3b": ("llama", fold_models.causal("Llama", **LLAMA_3B), 1.0),
    "qwen2-3b": ("qwen2", fold_models.causal("Qwen2", **QWEN2_3B), 1.0),
}


def measure(work: Callable[[], Any]) -> float:
    """Seconds that a piece of work takes, to its end on the device."""
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def wait() -> None:
    """Until the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def build(name: str, tokens: Tensor, *, planted: bool) -> tuple[nn.Module, dict[str, Any]]:
    """A model of that size on the default device."""
    family, make, scale = LARGE[name]
    toy = replace(fold_models.TOYS[family], build=make, scale=scale)
    fold_models.TOYS[name] = replace(toy, inputs=lambda: {"input_ids": tokens, "use_cache": False})
    return fold_models.build(name, planted=planted)


def measure_recorded(model: nn.Module, inputs: dict[str, Any]) -> tuple[float, float]:
    """Seconds of a forward pass in FP16, and of one that is recorded."""
    half = half_copy(model, torch.float16)
    fold_models.run(half, inputs)
    plain = statistics.median(measure(lambda: fold_models.run(half, inputs)) for _ in range(5))
    step = capture_forward(model, inputs, plan="fp16-true")
    step.replay(trace=True)
    return plain, statistics.median(measure(lambda: step.replay(trace=True)) for _ in range(3))


def measure_speed(before: nn.Module, after: nn.Module, inputs: dict[str, Any]) -> float:
    """Time of the folded model in FP16 against that of the other, which take turns."""
    pair = [half_copy(one, torch.float16) for one in (before, after)]
    for one in pair:
        fold_models.run(one, inputs)
    rounds = [[measure(lambda one=one: fold_models.run(one, inputs)) for one in pair] for _ in range(20)]
    return statistics.median(after / before for before, after in rounds)


def report(name: str, tokens: Tensor) -> str:
    """One row of the table."""
    clean = fl.fold(*build(name, tokens, planted=False)).proof.fp16_before
    model, inputs = build(name, tokens, planted=True)
    plain, recorded = measure_recorded(model, inputs)
    made: list[fl.Fold] = []
    seconds = measure(lambda: made.append(fl.fold(model, inputs)))
    fold = made[0]
    proof = fold.proof
    speed = measure_speed(model, fold.model, inputs)
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    powers = ", ".join(sorted({f"2^{group.exponent}" for group in fold.groups})) or "nothing"
    same = "bit for bit" if proof.equal == proof.trials else f"within {proof.difference:.0e}"
    return (
        f"| {name} | {count:.2f}B | {plain * 1e3:.1f} ms | {recorded / plain:.1f} | {seconds:.0f} s | {powers} "
        f"| {fold_models.show(proof.fp16_before)} | {fold_models.show(proof.fp16_after)} | {fold_models.show(clean)} "
        f"| {proof.fp16_after / clean:.2f} | {same} | {speed:.3f} |"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=list(LARGE), default=list(LARGE))
    parser.add_argument("--tokens", type=int, default=512, help="of each of two rows")
    options = parser.parse_args()
    machine = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    now = datetime.now(tz=timezone.utc).strftime("%Y-%m-%d")
    print(f"{now}, {machine}, torch {torch.__version__}, 2 × {options.tokens} tokens.\n")
    titles = "model|weights|FP16 forward|recorded|fold|scaled by|FP16 before|FP16 after|without|ratio|FP32|speed"
    print("| " + titles.replace("|", " | ") + " |")
    print("|---" * (titles.count("|") + 1) + "|")
    drawn = torch.randint(2, 1000, (2, options.tokens), generator=torch.Generator().manual_seed(1))
    drawn[:, 0] = 1
    with torch.device(options.device):
        for name in options.only:
            print(report(name, drawn.to(options.device)), flush=True)
            if options.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
