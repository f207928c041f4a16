"""Models of transformers' classes, and a VAE decoder, with planted outliers: FP16 before and after a fold.

python benchmarks/fold_models.py            # the table of docs/fold.md
python benchmarks/fold_models.py llama t5   # some of it
python benchmarks/fold_models.py --save checkpoints llama gemma3   # as folders of transformers, with tokens

Every model has random weights at toy size, rounded to BF16, with a residual stream of about 32. The plant puts 98,304
into one channel of it at the first token, as massive activations lie in trained models (arXiv:2402.17762): in a few
channels of a few tokens, some thousand times the median, and later layers leave them alone. In the VAE decoder, which
has no tokens, the channel is planted at every place, and gains of the norms that read it are raised so that the others
keep their size. "gate·up" has a large product in a gated layer, which the next matrix makes small again. "without" is
the same model before the plant: its error in FP16 is what a fold has to reach.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import floatline as fl

SIZE, STREAM, CHANNEL, TOKENS = 98304.0, 32.0, 5, 24
SMALL = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Toy:
    """A model to fold.

    Attributes:
        build: Makes it.
        inputs: What it is run on.
        planted: Parameter that the outlier is put into.
        writers: Parameters that write to the stream, as a regular expression.
        readers: Norms whose gains are raised, as a regular expression.
        last: Norms behind which nothing of the channel may reach the head, which is the embedding in some models.
        row: Token or position that is planted.
        added: What a norm's gain is added to.
        scale: What the model multiplies its embedding by.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    planted: str
    writers: str
    readers: str = ""
    last: str = ""
    row: int = 1
    added: float = 0.0
    scale: float = 1.0


def tokens() -> Tensor:
    """Two rows of tokens, which begin with token 1."""
    drawn = torch.randint(2, 96, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    drawn[:, 0] = 1
    return drawn


def causal(name: str, config: str = "", **settings: Any) -> Callable[[], nn.Module]:
    """A causal language model of transformers."""

    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, f"{config or name}Config")(**(SMALL | settings))
        return getattr(transformers, f"{name}ForCausalLM")(made)

    return build


def t5() -> nn.Module:
    """T5 v1.1: gated, its head tied to the embedding."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=96, d_model=128, d_ff=256, d_kv=32, num_layers=3, num_heads=4, feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def whisper() -> nn.Module:
    """Whisper: a convolutional stem, learned positions, biases, LayerNorm."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=96, d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, max_source_positions=TOKENS,
        max_target_positions=32, num_mel_bins=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def listen() -> dict[str, Any]:
    """A spectrogram, and tokens."""
    sound = torch.randn(2, 16, 2 * TOKENS, generator=torch.Generator().manual_seed(2))
    return {"input_features": sound, "decoder_input_ids": tokens(), "use_cache": False}


def read() -> dict[str, Any]:
    """Tokens for a causal language model."""
    return {"input_ids": tokens(), "use_cache": False}


def translate() -> dict[str, Any]:
    """Tokens for an encoder and a decoder."""
    return {"input_ids": tokens(), "decoder_input_ids": tokens().flip(0), "use_cache": False}


class ResidualBlock(nn.Module):
    """GroupNorm, silu, convolution, twice; and what came in, by another convolution where its width changes."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, width, eps=1e-6), nn.Conv2d(width, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, out, eps=1e-6), nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(width, out, 1) if width != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        y = self.conv1(functional.silu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(functional.silu(self.norm2(y)))


class VaeDecoder(nn.Module):
    """From latents to an image: blocks, nearest upsampling with a convolution, and a GroupNorm before the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(4, 64, 3, padding=1)
        self.mid = nn.ModuleList([ResidualBlock(64, 64), ResidualBlock(64, 64)])
        self.up = nn.Conv2d(64, 64, 3, padding=1)
        self.high = nn.ModuleList([ResidualBlock(64, 32), ResidualBlock(32, 32)])
        self.norm_out, self.conv_out = nn.GroupNorm(4, 32, eps=1e-6), nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        """Decode."""
        x = self.conv_in(latents)
        for block in self.mid:
            x = block(x)
        x = self.up(functional.interpolate(x, scale_factor=2.0, mode="nearest"))
        for block in self.high:
            x = block(x)
        return self.conv_out(functional.silu(self.norm_out(x)))


EMBEDDING = re.compile("embed|shared")
WRITERS = r"embed_tokens\.weight|(o_proj|down_proj)(\.weight|\.bias|)$"
LLAMA = ("model.embed_tokens.weight", WRITERS, "", r"model\.norm")
GEMMA = (
    "model.embed_tokens.weight",
    r"embed_tokens\.weight|(post_attention_layernorm|post_feedforward_layernorm)\.weight",
    "",
    r"model\.norm",
)
SLIDING = {"query_pre_attn_scalar": 32, "sliding_window": 8}
TOYS: dict[str, Toy] = {
    "llama": Toy(causal("Llama"), read, *LLAMA),
    "llama, gate·up": Toy(causal("Llama"), read, "model.layers.1.mlp.up_proj.weight", WRITERS, "", r"model\.norm"),
    "llama, tied": Toy(causal("Llama", tie_word_embeddings=True), read, *LLAMA),
    "qwen2": Toy(causal("Qwen2"), read, *LLAMA),
    "qwen3": Toy(causal("Qwen3"), read, *LLAMA),
    "gemma2": Toy(causal("Gemma2", **SLIDING), read, *GEMMA, added=1.0, scale=math.sqrt(128)),
    "gemma3": Toy(causal("Gemma3", "Gemma3Text", **SLIDING), read, *GEMMA, added=1.0, scale=math.sqrt(128)),
    "mixtral": Toy(causal("Mixtral", num_local_experts=4, num_experts_per_tok=2), read, *LLAMA),
    "gpt-neox": Toy(
        causal("GPTNeoX"),
        read,
        "gpt_neox.embed_in.weight",
        r"embed_in\.weight|(attention\.dense|dense_4h_to_h)\.(weight|bias)",
        "",
        r"final_layer_norm",
    ),
    "t5": Toy(t5, translate, "shared.weight", r"shared\.weight|\.(o|wo)\.weight", "", r"final_layer_norm"),
    "whisper, decoder": Toy(
        whisper,
        listen,
        "model.decoder.embed_positions.weight",
        r"decoder\.(embed_positions\.weight|embed_tokens\.weight|.*(out_proj|fc2)\.(weight|bias))",
        "",
        r"decoder\.layer_norm",
        row=0,
    ),
    "whisper, encoder": Toy(
        whisper,
        listen,
        "model.encoder.embed_positions.weight",
        r"encoder\.(embed_positions\.weight|.*(out_proj|fc2)\.(weight|bias))",
        row=0,
    ),
    "vae decoder": Toy(
        VaeDecoder,
        lambda: torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(3)),
        "conv_in.bias",
        r"conv_in\.(weight|bias)|conv2\.(weight|bias)",
        r"norm1|norm_out",
    ),
}


def build(name: str, *, planted: bool, seed: int = 0) -> tuple[nn.Module, Any]:
    """A model in evaluation mode, and its inputs."""
    toy = TOYS[name]
    torch.manual_seed(seed)
    model, inputs = toy.build().eval(), toy.inputs()
    with torch.no_grad():
        for one, parameter in model.named_parameters():  # initial weights are too small to say anything
            if parameter.dim() > 1:
                fan_in = parameter.shape[-1] if "experts" in one else parameter[0].numel()
                parameter.normal_(std=1.0 if EMBEDDING.search(one) else fan_in**-0.5)
            if re.search(toy.writers, one):
                added = toy.added if parameter.dim() == 1 else 0.0
                scale = toy.scale if EMBEDDING.search(one) else 1.0
                parameter.copy_((parameter + added) * STREAM / scale - added)
        for one, parameter in model.named_parameters():
            if toy.last and re.search(toy.last, one):
                parameter[CHANNEL] = -toy.added
        if planted:
            plant(model, toy, inputs)
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model, inputs


def plant(model: nn.Module, toy: Toy, inputs: Any) -> None:
    """Put outliers into a channel of the stream."""
    weight = model.get_parameter(toy.planted)
    if "up_proj" in toy.planted:  # a large product that the next matrix makes small again
        weight[CHANNEL] *= 2.0**17
        model.get_parameter(toy.planted.replace("up", "down"))[:, CHANNEL] *= 2.0**-17
        return
    if not isinstance(model, VaeDecoder):
        weight[toy.row, CHANNEL] = SIZE / toy.scale
        return
    norms = {name: one for name, one in model.named_modules() if re.search(toy.readers, name)}
    before = measure_inputs(model, norms, inputs)
    weight[CHANNEL] = SIZE
    model.up.weight[:, CHANNEL] *= STREAM / SIZE  # it reads the stream without a norm
    after = measure_inputs(model, norms, inputs)
    for name, norm in norms.items():
        norm.weight.mul_(after[name] / before[name])
        if after[name][CHANNEL] > 10 * before[name][CHANNEL]:
            norm.weight[CHANNEL] = 0.05


def measure_inputs(model: nn.Module, norms: dict[str, nn.Module], inputs: Any) -> dict[str, Tensor]:
    """Root mean square of what each norm divides by one number, for every channel."""
    found: dict[str, Tensor] = {}

    def measure(name: str, norm: Any, x: Tensor) -> None:
        groups = x.unflatten(1, (norm.num_groups, -1))
        found[name] = groups.square().mean(dim=(0, 2, 3, 4)).sqrt().repeat_interleave(groups.shape[2])

    handles = [
        norm.register_forward_pre_hook(lambda one, args, name=name: measure(name, one, args[0]))
        for name, norm in norms.items()
    ]
    run(model, inputs)
    for handle in handles:
        handle.remove()
    return found


def run(model: nn.Module, inputs: Any) -> Any:
    """The model's outputs."""
    with torch.no_grad():
        return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def show(number: float) -> str:
    """An error, or that there is none to give."""
    return f"{number:.1e}" if math.isfinite(number) else "not finite"


def main(names: list[str]) -> None:
    """Print one row for each model."""
    print("| model | scaled by | FP16 before | FP16 after | without the plant | ratio | FP32 |")
    print("|---|---|---:|---:|---:|---:|---|")
    for name in names:
        clean = fl.fold(*build(name, planted=False))
        fold = fl.fold(*build(name, planted=True))
        proof = fold.proof
        ratio = proof.fp16_after / clean.proof.fp16_before
        powers = ", ".join(sorted({f"2^{group.exponent}" for group in fold.groups})) or "nothing"
        same = "bit for bit" if proof.equal == proof.trials else f"within {proof.difference:.0e}"
        shown = f"{ratio:.2f}" if math.isfinite(ratio) else "-"
        print(
            f"| {name} | {powers} | {show(proof.fp16_before)} | {show(proof.fp16_after)} "
            f"| {show(clean.proof.fp16_before)} | {shown} | {same} |"
        )
        for obstacle in fold.obstacles[:1]:
            print(f"  {name}: {obstacle}", file=sys.stderr)


def save(names: list[str], folder: Path) -> None:
    """Write planted models in BF16, and one without a plant, and what they are run on."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    for name in names:
        model, _ = build(name, planted=True)
        model.to(torch.bfloat16).save_pretrained(folder / name)
    build(names[0], planted=False)[0].to(torch.bfloat16).save_pretrained(folder / f"{names[0]}-plain")
    (folder / "tokens.json").write_text(json.dumps(tokens().tolist()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*TOYS, []], help="Some of them; the default is all.")
    parser.add_argument("--save", metavar="FOLDER", type=Path, help="Write the planted models there instead.")
    options = parser.parse_args()
    if options.save:
        save(options.models or ["llama"], options.save)
    else:
        main(options.models or list(TOYS))
